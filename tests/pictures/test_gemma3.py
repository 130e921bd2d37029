"""Gemma 3's processor against transformers' one: pixels, and prompts as text that is tokenised with its pictures."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers
import transformers
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor as TheirProcessor

from jaxpage.pictures.gemma3 import Gemma3Processor, gemma3_processor
from jaxpage.pictures.settings import read_settings
from tests.picture_models import GEMMA_BEGIN, GEMMA_END, GEMMA_IMAGE, gemma3_config, pixels

SPECIAL = {"<img>": GEMMA_IMAGE, "<boi>": GEMMA_BEGIN, "<eoi>": GEMMA_END}


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Letters, and runs of up to eight newlines, which join in every way, as in Gemma's vocabulary."""
    names = ["<pad>", *"abcdefgh \n"]
    vocabulary = {name: index for index, name in enumerate(names)}
    merges = []
    for length in range(2, 9):
        vocabulary["\n" * length] = len(vocabulary)
        merges += [("\n" * (length - n), "\n" * n) for n in range(1, length)]
    while len(vocabulary) < GEMMA_IMAGE:
        vocabulary[f"unused{len(vocabulary)}"] = len(vocabulary)
    vocabulary |= SPECIAL
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    made.add_special_tokens(list(SPECIAL))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        extra_special_tokens={
            "image_token": "<img>",
            "boi_token": "<boi>",
            "eoi_token": "<eoi>",
        },
        pad_token="<pad>",
    )


@pytest.fixture
def make(tmp_path, tokenizer):
    def processor(**options) -> Gemma3Processor:
        settings = read_settings(tmp_path)
        return gemma3_processor(gemma3_config(), settings, tokenizer=tokenizer, options=options)

    return processor


@pytest.fixture(scope="module")
def theirs(tokenizer) -> TheirProcessor:
    images = Gemma3ImageProcessorPil(
        size={"height": 56, "width": 56}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    return TheirProcessor(images, tokenizer, image_seq_length=16)


@pytest.mark.parametrize(("height", "width"), [(56, 56), (1, 300), (900, 1500), (30, 30)])
def test_pixels_are_those_of_transformers(make, theirs, height, width):
    array = pixels(height, width)
    picture = make().image(array)
    image = Image.fromarray(array)
    expected = theirs.image_processor(image, return_tensors="np")["pixel_values"][0]
    # Blocks of 2 x 2 patches, then patches, then channels: where each of our patches stands in theirs.
    found = picture.patches.reshape(4, 4, 2, 2, 3, 7, 7).transpose(4, 0, 2, 5, 1, 3, 6)
    np.testing.assert_array_equal(found.reshape(3, 56, 56), expected)
    assert (picture.grid, picture.num_tokens) == ((1, 8, 8), 16)


@pytest.mark.parametrize(
    "text",
    [
        "<boi>",
        "ab<boi>cd",
        "ab\n<boi>\ncd",
        "a\n\n<boi><boi>\n\n\nb",
        "<boi>\n<boi>b\n\n",
        "\n\n\n<boi>\n\n\n\n\n",
        "<boi>\n\na",
    ],
)
def test_prompts_are_those_of_transformers(make, theirs, tokenizer, text):
    images = [Image.fromarray(pixels(56, 56, seed=i)) for i in range(text.count("<boi>"))]
    expected = theirs(images=[images], text=[text])["input_ids"][0]
    processor = make()
    pictures = [processor.image(image) for image in images]
    prompt = processor.expand(tokenizer.encode(text, add_special_tokens=False), pictures)
    assert prompt.token_ids == list(expected)
    assert (prompt.positions, prompt.next_position) == (None, len(expected))
    for first, length in prompt.spans:
        assert length == 16
        assert prompt.token_ids[first - 1 : first + 17] == [
            GEMMA_BEGIN,
            *[GEMMA_IMAGE] * 16,
            GEMMA_END,
        ]
    assert processor.expand(prompt.token_ids, pictures) == prompt


def test_newlines_elsewhere_stay_as_they_are(make, tokenizer):
    newline = tokenizer.get_vocab()["\n"]
    processor = make()
    picture = processor.image(pixels(56, 56))
    prompt = processor.expand([newline, newline, 1, GEMMA_BEGIN, 2, newline, newline], [picture])
    assert prompt.token_ids[:3] == [newline, newline, 1]
    assert prompt.token_ids[-3:] == [2, newline, newline]


def test_what_cannot_be_served_is_refused(make, tokenizer, tmp_path):
    processor = make()
    picture = processor.image(pixels(56, 56))
    with pytest.raises(ValueError, match="takes no videos"):
        processor.video([pixels(56, 56)], fps=1.0)
    with pytest.raises(ValueError, match="0 placeholders for images .* there are 1 images"):
        processor.expand([5, 6], [picture])
    with pytest.raises(ValueError, match="do_pan_and_scan is not supported"):
        make(do_pan_and_scan=True)
    with pytest.raises(ValueError, match="max_pixels unknown"):
        make(max_pixels=5)
    with pytest.raises(ValueError, match="two pictures touch at token 17 of the prompt"):
        processor.expand([5, GEMMA_IMAGE, GEMMA_IMAGE, 6], [picture] * 2)
    without = gemma3_processor(gemma3_config(), read_settings(tmp_path))
    assert without.expand([5, GEMMA_IMAGE], [picture]).spans == ((1, 16),)
    with pytest.raises(ValueError, match="no token of two newlines is known"):
        without.expand([5, GEMMA_BEGIN], [picture])
    with pytest.raises(ValueError, match="does not pool evenly to 16 embeddings"):
        gemma3_processor(gemma3_config(image_size=63), read_settings(tmp_path), tokenizer=tokenizer)
    size = {"size": {"height": 224, "width": 224}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(size))
    with pytest.raises(ValueError, match="the vision tower wants 56 pixels a side"):
        make()
