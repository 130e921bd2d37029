"""Videos of Qwen3-VL: sizes, times and positions as in transformers, a time in the prompt before each row of frames."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import transformers

from jaxpage.models.registry import picture_processor
from jaxpage.pictures.prompt import PromptPictures
from jaxpage.pictures.qwen3_vl import Qwen3VLProcessor
from tests.picture_models import END, IMAGE, START, VIDEO, pixels, qwen3_vl_config


def video_processing():
    """transformers' module, which it does not let out without torchvision."""
    name = "transformers.models.qwen3_vl.video_processing_qwen3_vl"
    folder = Path(transformers.__file__).parent / "models" / "qwen3_vl"
    spec = importlib.util.spec_from_file_location(name, folder / "video_processing_qwen3_vl.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return module


theirs = video_processing()


class Letters:
    """Encodes a letter as its number."""

    @staticmethod
    def encode(text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def processor(folder, tokenizer=Letters, **options) -> Qwen3VLProcessor:
    config = qwen3_vl_config()
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    made = picture_processor(config, folder, tokenizer=tokenizer, options=options)
    assert isinstance(made, Qwen3VLProcessor)
    return made


@pytest.fixture
def small(tmp_path) -> Qwen3VLProcessor:
    """Videos of 8 to 40 tokens, if frames are few."""
    size = {"shortest_edge": 2 * 8 * 32 * 32, "longest_edge": 2 * 40 * 32 * 32}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({"size": size}))
    return processor(tmp_path)


def clip(number: int, height: int = 64, width: int = 96) -> list[np.ndarray]:
    return [pixels(height, width, seed) for seed in range(number)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_capped", [False, True])
def test_sizes_are_those_of_transformers(tmp_path, seed, is_capped):
    told = {"size": {"shortest_edge": 4096, "longest_edge": 2_000_000}}
    told |= {"cap_pixels_per_frame": is_capped, "max_video_tokens": 200}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(told))
    grid = processor(tmp_path).videos.grid
    rng = np.random.default_rng(seed)
    for _ in range(200):
        height, width, num_frames = (int(x) for x in rng.integers((1, 1, 2), (900, 900, 20)))
        most = 2_000_000
        if is_capped:
            most = max(min(200 * 32 * 32, most // num_frames), int(4096 * 1.05)) * num_frames
        if max(height, width) > 150 * min(height, width):
            continue
        found = grid(height, width, num_frames)
        wanted = theirs.smart_resize(num_frames, height, width, 2, 32, 4096, most)
        assert (found[0] * 16, found[1] * 16) == wanted


def test_without_files_videos_are_prepared_as_by_transformers(tmp_path):
    videos = processor(tmp_path).videos
    size = theirs.Qwen3VLVideoProcessor.size
    assert (videos.min_pixels, videos.max_pixels) == tuple(size.values())
    assert videos.normalisation.mean == tuple(theirs.Qwen3VLVideoProcessor.image_mean)


@pytest.mark.parametrize(("num_frames", "fps"), [(4, 2.0), (7, 3.0), (1, 1.0), (8, 0.3)])
def test_times_stand_before_the_rows_as_transformers_writes_them(small, num_frames, fps):
    video = small.video(clip(num_frames), fps=fps)
    expanded = small.expand([5, START, VIDEO, END, 6], [video])
    processing = transformers.Qwen3VLProcessor
    stand_in = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token=chr(START),
        vision_end_token=chr(END),
        video_token=chr(VIDEO),
    )
    stand_in._calculate_timestamps = processing._calculate_timestamps.__get__(stand_in)
    known = SimpleNamespace(fps=fps, frames_indices=np.arange(num_frames))
    given = {"video_grid_thw": [np.array(video.grid)], "video_metadata": [known]}
    wanted = processing.replace_video_token(stand_in, given, 0)
    assert expanded.token_ids == [5, *map(ord, wanted), 6]


def test_each_row_of_frames_is_a_picture_of_its_own(small):
    frames = clip(5)
    video = small.video(frames, fps=2.0)
    assert (video.grid, len(video.parts), video.parts[0].grid) == ((3, 4, 6), 3, (1, 4, 6))
    np.testing.assert_array_equal(np.concatenate([p.patches for p in video.parts]), video.patches)
    assert sum(part.num_tokens for part in video.parts) == video.num_tokens == 18
    changed = small.video([*frames[:4], frames[0]], fps=1.0)
    equal = [
        a.content_hash == b.content_hash for a, b in zip(video.parts, changed.parts, strict=True)
    ]
    assert equal == [True, True, False]
    assert len({part.content_hash for part in (*video.parts, *changed.parts)}) == 4
    assert small.image(frames[0]).parts[0].kind == "image"


PROMPT = [5, START, IMAGE, END, 6, START, VIDEO, END, START, VIDEO, END, 7]


def prompt_pictures(small: Qwen3VLProcessor):
    videos = [small.video(clip(4), fps=2.0), small.video(clip(3, 96, 64), fps=1.0)]
    return [videos[0], small.image(pixels(64, 160)), videos[1]]


def test_positions_are_those_of_transformers(small):
    import torch

    pictures = prompt_pictures(small)
    expanded = small.expand(PROMPT, pictures)
    model = transformers.Qwen3VLModel
    stand_in = SimpleNamespace(config=qwen3_vl_config())
    stand_in.get_vision_position_ids = model.get_vision_position_ids.__get__(stand_in)
    ids = torch.tensor([expanded.token_ids])
    positions, delta = model.get_rope_index(
        stand_in,
        ids,
        (ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
        torch.tensor([pictures[1].grid]),
        torch.tensor([pictures[0].grid, pictures[2].grid]),
    )
    np.testing.assert_array_equal(expanded.positions, positions[:, 0].numpy())
    assert expanded.next_position == int(delta[0, 0]) + len(expanded.token_ids)


def test_the_parts_stand_in_their_spans_and_a_whole_prompt_stays(small):
    pictures = prompt_pictures(small)
    expanded = small.expand(PROMPT, pictures)
    placed = PromptPictures.of(expanded, pictures)
    assert [p.kind for p in placed.pictures] == ["image", *["video"] * 4]
    for part, (first, length) in zip(placed.pictures, placed.spans, strict=True):
        kind = IMAGE if part.kind == "image" else VIDEO
        assert expanded.token_ids[first - 1 : first + length + 1] == [START, *[kind] * length, END]
    again = small.expand(expanded.token_ids, pictures)
    assert (again.token_ids, again.spans) == (expanded.token_ids, expanded.spans)
    bare = small.expand([token for token in PROMPT if token not in (START, END)], pictures)
    assert bare.token_ids.count(START) == bare.token_ids.count(END) == 4


def test_prompts_that_do_not_fit_are_refused(small):
    pictures = prompt_pictures(small)
    with pytest.raises(ValueError, match="1 placeholders for videos .* but there are 2 videos"):
        small.expand([IMAGE, VIDEO], pictures)
    without = dataclasses.replace(small, encode_text=None)
    whole = small.expand(PROMPT, pictures).token_ids
    assert without.expand(whole, pictures).token_ids == whole
    with pytest.raises(ValueError, match="there is no tokenizer; leave skip_tokenizer_init out"):
        without.expand(PROMPT, pictures)
    with pytest.raises(ValueError, match="a video of 0 frames"):
        small.video([], fps=1.0)
