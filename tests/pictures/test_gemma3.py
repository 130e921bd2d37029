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
from tests.picture_models import (
    GEMMA_BEGIN,
    GEMMA_END,
    GEMMA_IMAGE,
    gemma3_config,
    gemma_pixels,
    pixels,
)

SPECIAL = {"<img>": GEMMA_IMAGE, "<boi>": GEMMA_BEGIN, "<eoi>": GEMMA_END}


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Letters, two pairs, and runs of up to eight newlines, which join in every way, as in Gemma's vocabulary."""
    names = ["<pad>", *"abcdefghilmnoprstuvwyH \n", "bH", "aH"]
    vocabulary = {name: index for index, name in enumerate(names)}
    # Across the border of a text and the words before crops.
    merges = [("b", "H"), ("a", "H")]
    for length in range(2, 9):
        vocabulary["\n" * length] = len(vocabulary)
        merges += [("\n" * (length - n), "\n" * n) for n in range(1, length)]
    while len(vocabulary) < GEMMA_IMAGE:
        vocabulary[f"unused{len(vocabulary)}"] = len(vocabulary)
    vocabulary |= SPECIAL
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    made.add_special_tokens(list(SPECIAL))
    made.decoder = tokenizers.decoders.Fuse()
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


PAN_AND_SCAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 20,
    "pan_and_scan_max_num_crops": 3,
    "pan_and_scan_min_ratio_to_activate": 1.5,
}
# Height, width -> crops.
CROPPED = {
    (60, 89): 0,
    (60, 90): 2,
    (90, 60): 2,
    (60, 151): 3,
    (401, 60): 3,
    (60, 400): 3,
    (19, 100): 0,
    (25, 39): 2,
    (25, 38): 0,
}


@pytest.mark.parametrize(("size", "number"), CROPPED.items())
def test_crops_are_those_of_transformers(make, theirs, size, number):
    array = pixels(*size)
    picture = make(**PAN_AND_SCAN).image(array)
    assert (len(picture.crops), picture.num_tokens, len(picture.parts)) == (number, 16, 1 + number)
    image = Image.fromarray(array)
    expected = theirs.image_processor(image, return_tensors="np", **PAN_AND_SCAN)
    assert expected["num_crops"] == [number]
    found = np.stack([gemma_pixels(part) for part in picture.parts])
    np.testing.assert_array_equal(found, expected["pixel_values"])
    assert picture.parts[0].content_hash == make().image(array).content_hash
    hashes = {part.content_hash for part in picture.parts}
    assert len(hashes) == 1 + number


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_checkpoint_that_pans_and_scans_is_heard(make, theirs, tokenizer, tmp_path, is_nested):
    """From either file that transformers writes; an option of the engine comes first.

    transformers' processor of texts and pictures has a default of its own, no crops, so it is told the same here.
    """
    images = Gemma3ImageProcessorPil(size={"height": 56, "width": 56}, **PAN_AND_SCAN)
    written = TheirProcessor(images, tokenizer, image_seq_length=16) if is_nested else images
    written.save_pretrained(tmp_path)
    file = "processor_config.json" if is_nested else "preprocessor_config.json"
    assert '"do_pan_and_scan": true' in (tmp_path / file).read_text()
    array = pixels(60, 151)
    image = Image.fromarray(array)
    expected = Gemma3ImageProcessorPil.from_pretrained(tmp_path)(image, return_tensors="np")
    assert expected["num_crops"] == [3]
    processor = make()
    picture = processor.image(array)
    found = np.stack([gemma_pixels(part) for part in picture.parts])
    np.testing.assert_array_equal(found, expected["pixel_values"])
    text = "ab<boi>cd"
    wanted = theirs(images=[[image]], text=[text], images_kwargs=PAN_AND_SCAN)["input_ids"][0]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert processor.expand(ids, [picture]).token_ids == list(wanted)
    assert make(do_pan_and_scan=False).image(array).crops == ()


def test_defaults_are_those_of_transformers(make, theirs, tokenizer):
    """Crops of 256 pixels or more, four at most, from a ratio of 1.2 on."""
    arrays = [pixels(h, w) for h, w in ((300, 360), (300, 350), (260, 2000), (700, 500))]
    images = [Image.fromarray(array) for array in arrays]
    text = "<boi>" * len(arrays)
    expected = theirs(
        images=[images], text=[text], images_kwargs={"do_pan_and_scan": True}, return_tensors="np"
    )
    processor = make(do_pan_and_scan=True)
    pictures = [processor.image(array) for array in arrays]
    assert [len(picture.crops) for picture in pictures] == [0, 0, 4, 2]
    found = np.stack([gemma_pixels(part) for picture in pictures for part in picture.parts])
    np.testing.assert_array_equal(found, expected["pixel_values"])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert processor.expand(ids, pictures).token_ids == expected["input_ids"][0].tolist()


@pytest.mark.parametrize(
    "text",
    [
        "<boi>",
        "ab<boi>cd",
        "a\n\n<boi><boi>\n\n\nb",
        "\n<boi> a <boi>b<boi>\n",
        "a<eoi>he<boi>re<eoi>\n<boi>",
    ],
)
@pytest.mark.parametrize("sizes", [((60, 151), (60, 60), (90, 60)), ((56, 56), (60, 90), (50, 60))])
def test_prompts_with_crops_are_those_of_transformers(make, theirs, tokenizer, text, sizes):
    arrays = [pixels(*size, seed=i) for i, size in enumerate(sizes)][: text.count("<boi>")]
    expected = theirs(
        images=[[Image.fromarray(array) for array in arrays]],
        text=[text],
        images_kwargs=PAN_AND_SCAN,
    )["input_ids"][0]
    processor = make(**PAN_AND_SCAN)
    pictures = [processor.image(array) for array in arrays]
    prompt = processor.expand(tokenizer.encode(text, add_special_tokens=False), pictures)
    assert prompt.token_ids == list(expected)
    assert len(prompt.spans) == sum(len(picture.parts) for picture in pictures)
    for first, length in prompt.spans:
        assert prompt.token_ids[first : first + length] == [GEMMA_IMAGE] * 16
    assert processor.expand(prompt.token_ids, pictures) == prompt


def test_ids_that_no_text_has_stay_as_they_are_beside_crops(make, tokenizer):
    newline = tokenizer.get_vocab()["\n"]
    processor = make(**PAN_AND_SCAN)
    picture = processor.image(pixels(60, 90))
    ids = [newline, newline, 1, GEMMA_BEGIN, newline, newline, 2]
    found = processor.expand(ids, [picture]).token_ids
    assert found[:3] == ids[:3] and found[-3:] == ids[-3:]


def test_pan_and_scan_that_cannot_be_had_is_refused(make, tmp_path):
    for options, complaint in (
        ({"do_pan_and_scan": 1}, "do_pan_and_scan must be a bool, got 1"),
        ({"pan_and_scan_max_num_crops": 0}, "max_num_crops must be at least 1, got 0"),
        ({"pan_and_scan_min_crop_size": 1.5}, "min_crop_size must be at least 1, got 1.5"),
    ):
        with pytest.raises(ValueError, match=complaint):
            make(**options)
    processor = make(**PAN_AND_SCAN)
    picture = processor.image(pixels(60, 90))
    with pytest.raises(ValueError, match="the 1 pictures are 3, crops included: give a begin"):
        processor.expand([5, GEMMA_BEGIN, GEMMA_IMAGE, GEMMA_END], [picture])
    with pytest.raises(ValueError, match="2 placeholders for images .* there are 3 images"):
        processor.expand([5, GEMMA_IMAGE, 6, GEMMA_IMAGE], [picture])
    without = gemma3_processor(gemma3_config(), read_settings(tmp_path), options=PAN_AND_SCAN)
    with pytest.raises(ValueError, match="puts words before crops and needs the tokenizer"):
        without.expand([5, GEMMA_BEGIN], [picture])
    parts = [5, GEMMA_IMAGE, 6, GEMMA_IMAGE, 6, GEMMA_IMAGE]
    assert len(without.expand(parts, [picture]).spans) == 3


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
