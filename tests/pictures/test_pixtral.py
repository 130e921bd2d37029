"""Mistral 3's processor against transformers' one: sizes, pixels, and prompts with the tokens that end rows."""

from __future__ import annotations

import importlib
import json
import sys

import numpy as np
import pytest
from PIL import Image
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from jaxpage.pictures.pixtral import PixtralProcessor, pixtral_processor, pixtral_vision_config
from jaxpage.pictures.settings import read_settings
from jaxpage.tokenizer import load_tokenizer
from tests import picture_models
from tests.picture_models import (
    MISTRAL_BREAK,
    MISTRAL_END,
    MISTRAL_IMAGE,
    MISTRAL_SIDE,
    mistral3_config,
    mistral3_values,
    pixels,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    picture_models.save_tokenizer(folder)
    return load_tokenizer(str(folder))


@pytest.fixture
def make(tmp_path, tokenizer):
    def processor(tokenizer=tokenizer, **options) -> PixtralProcessor:
        settings = read_settings(tmp_path)
        return pixtral_processor(mistral3_config(), settings, tokenizer=tokenizer, options=options)

    return processor


def their_processor(tokenizer, longest: int, **more):
    """transformers' one, whose module imports an image processor that needs torchvision, and uses a function of it that
    the module of the other image processor has too.
    """
    pixtral = "transformers.models.pixtral"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            sys.modules, f"{pixtral}.image_processing_pixtral", image_processing_pil_pixtral
        )
        module = importlib.import_module(f"{pixtral}.processing_pixtral")
    images = PixtralImageProcessorPil(size={"longest_edge": longest})
    return module.PixtralProcessor(images, tokenizer, patch_size=6, spatial_merge_size=2, **more)


# The last of these is shrunk to 24.6 pixels, rounded down, if it may have 120.
SIZES = [
    (12, 12),
    (3, 300),
    (121, 120),
    (200, 410),
    (30, 30),
    (119, 121),
    (13, 1),
    (240, 5),
    (200, 41),
]


@pytest.mark.parametrize("longest", [120, 126, 400])
def test_pixels_are_those_of_transformers(make, longest):
    theirs = PixtralImageProcessorPil(size={"longest_edge": longest})
    processor = make(size={"longest_edge": longest})
    for height, width in SIZES:
        array = pixels(height, width)
        expected = theirs(Image.fromarray(array), return_tensors="np", patch_size=MISTRAL_SIDE)
        picture = processor.image(array)
        found = mistral3_values(processor.config, [picture])
        np.testing.assert_array_equal(found["image_sizes"].numpy(), expected["image_sizes"])
        np.testing.assert_array_equal(found["pixel_values"].numpy(), expected["pixel_values"])
        rows, columns = expected["image_sizes"][0] // MISTRAL_SIDE
        assert (picture.num_tokens, picture.num_embeddings) == (
            rows * (columns + 1),
            rows * columns,
        )


def test_without_files_sizes_are_those_of_transformers(make):
    array = pixels(90, 1100)
    expected = PixtralImageProcessorPil()(
        Image.fromarray(array), return_tensors="np", patch_size=MISTRAL_SIDE
    )
    found = mistral3_values(make().config, [make().image(array)])
    np.testing.assert_array_equal(found["pixel_values"].numpy(), expected["pixel_values"])


@pytest.mark.parametrize("text", ["[IMG]", "ab[IMG]cd", "[IMG][IMG]x", "a[IMG] b[IMG]\n[IMG]"])
def test_prompts_are_those_of_transformers(make, tokenizer, text):
    sizes = [(90, 150), (5, 10), (300, 40)][: text.count("[IMG]")]
    images = [Image.fromarray(pixels(*size)) for size in sizes]
    theirs = their_processor(tokenizer, 120)
    expected = theirs(images=[images], text=[text], return_tensors="np")["input_ids"][0].tolist()
    processor = make(size={"longest_edge": 120})
    pictures = [processor.image(image) for image in images]
    prompt = processor.expand(tokenizer.encode(text, add_special_tokens=False), pictures)
    assert prompt.token_ids == expected
    assert (prompt.positions, prompt.next_position) == (None, len(expected))
    for (first, length), picture in zip(prompt.spans, pictures, strict=True):
        own = expected[first : first + length]
        _, height, width = picture.grid
        row = [MISTRAL_IMAGE] * (width // 2) + [MISTRAL_BREAK]
        assert own == (row * (height // 2))[:-1] + [MISTRAL_END]
        assert [i for i, token in enumerate(own) if token != MISTRAL_IMAGE] == list(picture.breaks)
    assert processor.expand(prompt.token_ids, pictures) == prompt


def test_a_picture_of_one_embedding_may_have_its_end(make):
    processor = make()
    one = processor.image(pixels(10, 10))
    whole = [5, MISTRAL_IMAGE, MISTRAL_END, 6, MISTRAL_IMAGE, MISTRAL_END]
    for ids in (whole, [5, MISTRAL_IMAGE, 6, MISTRAL_IMAGE], [*whole[:4], MISTRAL_IMAGE]):
        expanded = processor.expand(ids, [one, one])
        assert (expanded.token_ids, expanded.spans) == (whole, ((1, 2), (4, 2)))


def test_files_of_a_checkpoint_are_heard(make, tokenizer, tmp_path):
    """Sizes and names of tokens from the file that transformers writes; an option of the engine comes first."""
    theirs = their_processor(
        tokenizer, 60, image_break_token="<unused 290>", image_end_token="<unused 291>"
    )
    theirs.image_processor.resample = Image.Resampling.BILINEAR
    theirs.save_pretrained(tmp_path)
    assert '"<unused 290>"' in (tmp_path / "processor_config.json").read_text()
    image, processor = Image.fromarray(pixels(90, 150)), make()
    expected = theirs(images=[[image]], text=["[IMG]"], return_tensors="np")
    picture = processor.image(image)
    assert (
        processor.expand([MISTRAL_IMAGE], [picture]).token_ids == expected["input_ids"][0].tolist()
    )
    assert 290 in expected["input_ids"][0] and 291 in expected["input_ids"][0]
    found = mistral3_values(processor.config, [picture])
    np.testing.assert_array_equal(found["pixel_values"].numpy(), expected["pixel_values"])
    other = make(size={"height": 24, "width": 36}).image(image)
    assert other.grid == (1, 4, 6) and other.content_hash != picture.content_hash


def test_the_largest_picture_of_the_tower_is_a_square_of_whole_embeddings():
    for size, side in ((240, 40), (241, 42)):
        tower = pixtral_vision_config(mistral3_config(image_size=size))
        assert tower.most_patches == side**2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_pixels": 3}, "max_pixels unknown; known is size"),
        ({"size": {"longest_edge": 0}}, "size of the picture processor is .*give {.longest_edge"),
        ({"size": {"longest_edge": True}}, "in whole pixels above 0"),
        ({"size": {"height": 30}}, "in whole pixels above 0"),
        ({"size": 30}, "is 30; give"),
        ({"size": {}}, "is {}; give"),
    ],
)
def test_options_that_are_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("file", "told", "message"),
    [
        ("processor_config.json", {"patch_size": 16}, "patch_size is 16 in .*and 6 in config.json"),
        ("processor_config.json", {"spatial_merge_size": 1}, "spatial_merge_size is 1 in"),
        ("processor_config.json", {"image_token": "<unused 290>"}, "token 290 of the tokenizer"),
        ("processor_config.json", {"image_end_token": {"content": "x"}}, "end_token is {'content'"),
        ("preprocessor_config.json", {"do_rescale": False}, "has do_rescale off"),
    ],
)
def test_files_that_contradict_are_refused(make, tmp_path, file, told, message):
    (tmp_path / file).write_text(json.dumps(told))
    with pytest.raises(ValueError, match=message):
        make()


def test_pictures_and_prompts_that_are_refused(make):
    processor = make(size={"longest_edge": 120})
    with pytest.raises(
        ValueError, match="of 300x1 pixels, shrunk to at most 120x120, would be 120x0"
    ):
        processor.image(pixels(1, 300))
    with pytest.raises(ValueError, match="give some frames as pictures"):
        processor.video([], fps=1.0)
    picture = processor.image(pixels(24, 36))
    with pytest.raises(ValueError, match="2 placeholders .* but there are 1 images.* their 6"):
        processor.expand([MISTRAL_IMAGE, 5, MISTRAL_IMAGE], [picture])
    with pytest.raises(ValueError, match="image 0 has 6 .* with the ends of its rows from token 0"):
        processor.expand([MISTRAL_IMAGE] * 6, [picture])


def test_without_the_tokens_that_end_rows_text_alone_can_be_served(make):
    processor = make(tokenizer=None)
    assert processor.expand([5, 6], []).token_ids == [5, 6]
    with pytest.raises(ValueError, match="IMG_BREAK.* not known: use the tokenizer"):
        processor.expand([MISTRAL_IMAGE], [processor.image(pixels(24, 36))])
