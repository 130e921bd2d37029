"""The processor of Qwen2.5-VL and Qwen3-VL against transformers' one for PIL, its positions, and what it refuses."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from jaxpage.models.registry import picture_processor
from jaxpage.pictures.border import Picture
from jaxpage.pictures.qwen_vl import QwenVLProcessor, smart_resize
from tests.picture_models import END, IMAGE, START, VIDEO, pixels, qwen2_5_vl_config

LEAST, MOST = 4 * 28 * 28, 60 * 28 * 28


def processor(folder, **options) -> QwenVLProcessor:
    config = qwen2_5_vl_config()
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    made = picture_processor(config, folder, options=options)
    assert isinstance(made, QwenVLProcessor)
    return made


@pytest.fixture
def small(tmp_path) -> QwenVLProcessor:
    return processor(tmp_path, min_pixels=LEAST, max_pixels=MOST)


def theirs(images) -> tuple[np.ndarray, np.ndarray]:
    """Patches and grids of transformers."""
    made = Qwen2VLImageProcessorPil(min_pixels=LEAST, max_pixels=MOST)(images, return_tensors="np")
    return made["pixel_values"], made["image_grid_thw"]


@pytest.mark.parametrize(
    ("height", "width"), [(28, 28), (29, 300), (300, 29), (900, 1500), (56, 84), (1, 150)]
)
def test_patches_are_those_of_transformers(small, height, width):
    array = pixels(height, width)
    picture = small.image(array)
    patches, grids = theirs([Image.fromarray(array)])
    assert picture.grid == tuple(grids[0])
    assert picture.num_tokens == math.prod(picture.grid) // 4
    np.testing.assert_array_equal(picture.patches, patches)
    assert picture.patches.dtype == np.float32


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1", "I;16", "CMYK"])
def test_images_of_every_mode_are_read_as_transformers_reads_them(small, mode):
    image = Image.fromarray(pixels(60, 90))
    if mode == "RGBA":
        image.putalpha(Image.fromarray(pixels(60, 90, seed=1)[..., 0]))
    elif mode == "I;16":
        image = Image.fromarray(pixels(60, 90)[..., 0].astype(np.uint16) * 256)
    else:
        image = image.convert(mode)
    np.testing.assert_array_equal(small.image(image).patches, theirs([image])[0])


def test_frames_of_a_video_stand_in_their_patches_as_pictures_do(small):
    frames = [pixels(90, 150, seed=seed) for seed in range(5)]
    video = small.video(frames, fps=4.0)
    assert (video.grid, video.kind) == ((3, 6, 10), "video")
    assert (video.num_tokens, video.second_per_grid) == (45, 0.5)
    by_frame = video.patches.reshape(3, 60, 3, 2, 14 * 14)
    for index in range(6):
        one = small.image(frames[min(index, 4)]).patches.reshape(60, 3, 2, 14 * 14)
        np.testing.assert_array_equal(by_frame[index // 2, :, :, index % 2], one[:, :, 0])


def test_a_checkpoint_says_how_pictures_are_prepared(tmp_path):
    values = {"min_pixels": 3136, "max_pixels": 5 * 784, "image_mean": [0.5, 0.4, 0.3]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    made = processor(tmp_path)
    assert (made.images.max_pixels, made.videos.max_pixels) == (5 * 784, 5 * 784)
    assert made.images.normalisation.mean == (0.5, 0.4, 0.3)
    assert made.image(pixels(400, 400)).num_tokens == 4
    (tmp_path / "video_preprocessor_config.json").write_text('{"size": {"longest_edge": 7840}}')
    made = processor(tmp_path)
    assert (made.images.max_pixels, made.videos.max_pixels) == (5 * 784, 7840)
    nested = {"image_processor": {"max_pixels": 6272}, "video_processor": {"max_pixels": 9408}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    made = processor(tmp_path, min_pixels=784)
    assert (made.images.max_pixels, made.videos.max_pixels) == (6272, 9408)
    assert (made.images.min_pixels, made.videos.min_pixels) == (784, 784)
    assert processor(tmp_path, max_pixels=800).videos.min_pixels == 800  # not above the largest


def test_files_and_options_that_cannot_be_served_are_refused(tmp_path):
    with pytest.raises(ValueError, match="fps unknown; known are min_pixels, max_pixels"):
        processor(tmp_path, fps=2)
    with pytest.raises(ValueError, match="min_pixels is 800 and max_pixels 700"):
        processor(tmp_path, min_pixels=800, max_pixels=700)
    with pytest.raises(ValueError, match="max_pixels -1; give numbers above 0"):
        processor(tmp_path, max_pixels=-1)
    file = tmp_path / "preprocessor_config.json"
    for text, message in (
        ("{", "cannot be read as JSON"),
        ("[]", "holds list"),
        ('{"patch_size": 16}', r"\(16, 2, 2\), config.json has \(14, 2, 2\)"),
        ('{"do_resize": false}', "do_resize off"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            processor(tmp_path)


def test_pictures_that_are_none_are_refused(small):
    with pytest.raises(ValueError, match="6000x28 pixels has an aspect ratio of 214"):
        small.image(np.zeros((28, 6000, 3), np.uint8))
    with pytest.raises(ValueError, match="0x5 pixels is empty"):
        small.image(np.zeros((5, 0, 3), np.uint8))
    with pytest.raises(ValueError, match=r"uint8\[height, width, 3\], got float32\[5, 5, 3\]"):
        small.image(np.zeros((5, 5, 3), np.float32))
    with pytest.raises(ValueError, match="got str"):
        small.image("cat.jpg")
    with pytest.raises(ValueError, match="a video of 0 frames"):
        small.video([], fps=1.0)
    with pytest.raises(ValueError, match="fps is 0"):
        small.video([pixels(28, 28)], fps=0)
    with pytest.raises(ValueError, match="sizes 28x28, 56x28"):
        small.video([pixels(28, 28), pixels(28, 56)], fps=1.0)


def test_hashes_tell_apart_pixels_and_what_the_processor_was_told(small, tmp_path):
    array = pixels(56, 84)
    found = small.image(array).content_hash
    assert len(found) == 32
    assert small.image(Image.fromarray(array)).content_hash == found
    changed = array.copy()
    changed[5, 6, 1] ^= 1
    others = [
        small.image(changed),
        small.image(array.transpose(1, 0, 2)),
        processor(tmp_path, min_pixels=LEAST, max_pixels=MOST - 1).image(array),
        small.video([array], fps=1.0),
        small.video([array], fps=2.0),
        small.video([array, array], fps=2.0),
    ]
    assert len({found, *(other.content_hash for other in others)}) == 7


def picture(*grid: int, second_per_grid: float | None = None) -> Picture:
    return Picture(
        patches=np.zeros((math.prod(grid), 0), np.float32),
        grid=grid,
        num_tokens=math.prod(grid) // 4,
        content_hash=b"",
        second_per_grid=second_per_grid,
        kind="image" if second_per_grid is None else "video",
    )


def torch_positions(token_ids: list[int], pictures: list[Picture]) -> tuple[np.ndarray, int]:
    """Positions of transformers, and the one after them."""
    import torch

    model = transformers.Qwen2_5_VLModel
    stand_in = type("OnlyConfig", (), {"config": qwen2_5_vl_config()})()
    stand_in.get_vision_position_ids = model.get_vision_position_ids.__get__(stand_in)
    ids = torch.tensor([token_ids])
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    images = [torch.tensor(p.grid) for p in pictures if p.kind == "image"]
    videos = [p for p in pictures if p.kind == "video"]
    positions, delta = model.get_rope_index(
        stand_in,
        ids,
        kinds,
        images or None,
        [torch.tensor(p.grid) for p in videos] or None,
        torch.tensor([p.second_per_grid for p in videos]) if videos else None,
    )
    return positions[:, 0].numpy(), int(delta[0, 0]) + len(token_ids)


IMAGES = [picture(1, 4, 6), picture(1, 2, 2), picture(1, 12, 4)]
SHORT = picture(3, 12, 8, second_per_grid=0.6)
PROMPT = [5, START, IMAGE, END, 6, 7, START, VIDEO, END, START, IMAGE, END, START, IMAGE, END, 8]


@pytest.mark.parametrize(
    ("token_ids", "pictures"),
    [
        ([5, START, IMAGE, END, 6, 7], IMAGES[:1]),
        ([IMAGE], IMAGES[2:]),
        ([START, IMAGE, END, 9, START, IMAGE, END, START, IMAGE, END], IMAGES),
        (PROMPT, [IMAGES[0], SHORT, IMAGES[1], IMAGES[2]]),
        (PROMPT, [SHORT, *IMAGES]),
    ],
)
def test_positions_are_those_of_transformers(small, token_ids, pictures):
    expanded = small.expand(token_ids, pictures)
    positions, following = torch_positions(expanded.token_ids, pictures)
    np.testing.assert_array_equal(expanded.positions, positions)
    assert (expanded.positions.dtype, expanded.next_position) == (np.int32, following)
    for (first, length), own in zip(expanded.spans, pictures, strict=True):
        assert length == own.num_tokens
        kind = IMAGE if own.kind == "image" else VIDEO
        assert expanded.token_ids[first : first + length] == [kind] * length
    again = small.expand(expanded.token_ids, pictures)
    assert (again.token_ids, again.spans) == (expanded.token_ids, expanded.spans)
    np.testing.assert_array_equal(again.positions, expanded.positions)


def test_what_follows_a_long_video_has_positions_above_all_of_it(small):
    """transformers 5 counts on from the larger side of the grid; the models were trained as it is here."""
    video = picture(10, 4, 4, second_per_grid=1.0)
    expanded = small.expand([5, VIDEO, 6], [video])
    assert expanded.positions[0, 1:-1].max() == 1 + 9 * 2
    assert expanded.positions[:, -1].tolist() == [20, 20, 20]
    assert expanded.next_position == 21


def test_videos_that_last_longer_than_the_model_has_positions_are_refused(small):
    """4096; longer texts are for the engine to refuse."""
    longest = picture(3, 4, 4, second_per_grid=1023.5)
    assert small.expand([5, VIDEO], [longest]).next_position == 4096
    for prompt in ([5, VIDEO, 6], [5, 6, VIDEO]):
        with pytest.raises(ValueError, match="its last position is 4096, .* has 4096.*fps"):
            small.expand(prompt, [longest])
    for videos in (
        [picture(3, 4, 4, second_per_grid=2e6)],
        [picture(384, 2, 2, second_per_grid=2e6)] * 3,
    ):
        with pytest.raises(ValueError, match="the model has 4096 positions"):
            small.expand([VIDEO] * len(videos), videos)
    assert small.expand([5] * 5000, []).next_position == 5000


def test_a_prompt_without_pictures_counts_up(small):
    expanded = small.expand([5, 6, 7], [])
    assert expanded.positions.tolist() == [[0, 1, 2]] * 3
    assert (expanded.spans, expanded.next_position) == ((), 3)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([5, 6], "0 placeholders for images .* but there are 1 images"),
        ([IMAGE, 5, IMAGE], "2 placeholders for images"),
        ([IMAGE, IMAGE, IMAGE, 5, IMAGE, IMAGE, IMAGE], "image 0 has 6 embeddings, but fewer"),
        ([IMAGE, VIDEO], "1 placeholders for videos .* but there are 0 videos"),
    ],
)
def test_placeholders_that_do_not_fit_are_refused(small, token_ids, message):
    with pytest.raises(ValueError, match=message):
        small.expand(token_ids, IMAGES[:1])


@pytest.mark.parametrize("seed", range(3))
def test_sizes_are_within_the_limits(seed):
    rng = np.random.default_rng(seed)
    for _ in range(200):
        height, width = (int(x) for x in rng.integers(1, 3000, 2))
        if max(height, width) > 200 * min(height, width):
            continue
        found = smart_resize(height, width, factor=28, min_pixels=56 * 56, max_pixels=1_000_000)
        assert all(side % 28 == 0 and side > 0 for side in found)
        assert math.prod(found) >= 56 * 56
        # A side is at least one factor, so extreme shapes may be larger.
        assert math.prod(found) <= 1_000_000 or 28 in found
