"""Qwen2.5-VL on the host: pictures and videos to patches, prompts with mrope positions; and what Qwen3-VL shares of it.

Sizes, rounding and order of patches are those of transformers' Qwen2VLImageProcessor and Qwen2VLVideoProcessor, which
have no form for videos that works without torchvision. Knows no array on a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpage.pictures.border import Expanded, Picture, Pixels
from jaxpage.pictures.mrope import mrope_positions
from jaxpage.pictures.pixels import Normalisation, content_hash, resized, rgb
from jaxpage.pictures.placeholders import expand_placeholders
from jaxpage.pictures.settings import ProcessorSettings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_MOST_ASPECT = 200
_MOST_FRAMES = 768  # as transformers samples at most
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_BICUBIC = 3
IMAGE_PIXELS = (56 * 56, 28 * 28 * 1280)
_VIDEO_PIXELS = (128 * 28 * 28, 28 * 28 * 768)
_OPTIONS = ("min_pixels", "max_pixels")  # that a user may give instead of the checkpoint's


@dataclass(frozen=True, kw_only=True)
class QwenPreparation:
    """How pictures of one kind are resized and normalised."""

    min_pixels: int
    max_pixels: int
    patch_size: int
    frames_per_patch: int
    merge_size: int
    resample: int
    normalisation: Normalisation

    def grid(self, height: int, width: int, num_frames: int = 1) -> tuple[int, int]:
        """Patches of frames of height x width pixels, as (height, width), both multiples of `merge_size`.

        The limits are of each frame.
        """
        del num_frames
        factor = self.patch_size * self.merge_size
        height, width = smart_resize(
            height, width, factor=factor, min_pixels=self.min_pixels, max_pixels=self.max_pixels
        )
        return height // self.patch_size, width // self.patch_size

    def patches(self, frames: Sequence[np.ndarray]) -> tuple[np.ndarray, tuple[int, int, int]]:
        """float32[P, C * frames_per_patch * patch_size**2] of uint8[h, w, 3] frames of one size, and their grid.

        Patches that the encoder merges into one embedding follow each other. The last frame is repeated until the
        number divides evenly.
        """
        grid_height, grid_width = self.grid(frames[0].shape[0], frames[0].shape[1], len(frames))
        size, merge, depth = self.patch_size, self.merge_size, self.frames_per_patch
        height, width = grid_height * size, grid_width * size
        ready = [self.normalisation(resized(f, height, width, self.resample)) for f in frames]
        ready += [ready[-1]] * (-len(ready) % depth)
        grid = (len(ready) // depth, grid_height, grid_width)
        blocks = (grid_height // merge, merge, size, grid_width // merge, merge, size)
        values = np.stack(ready).reshape(grid[0], depth, *blocks, 3)
        # To frames, row and column of blocks, row and column within a block; then channel, frame, row and column.
        values = values.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return values.reshape(math.prod(grid), -1), grid


def smart_resize(
    height: int,
    width: int,
    *,
    factor: int,
    min_pixels: int,
    max_pixels: int,
    num_frames: int = 1,
    frames_per_patch: int = 1,
) -> tuple[int, int]:
    """Multiples of `factor` close to height x width pixels; all frames together have `min_pixels` to `max_pixels`.

    Raises ValueError for an aspect ratio above 200.
    """
    aspect = max(height, width) / min(height, width)
    if aspect > _MOST_ASPECT:
        raise ValueError(
            f"a picture of {width}x{height} pixels has an aspect ratio of {aspect:.0f}; at most {_MOST_ASPECT} "
            "is supported"
        )
    near_height, near_width = round(height / factor) * factor, round(width / factor) * factor
    depth = round(num_frames / frames_per_patch) * frames_per_patch
    if depth * near_height * near_width > max_pixels:
        ratio = math.sqrt(num_frames * height * width / max_pixels)
        near_height = max(factor, math.floor(height / ratio / factor) * factor)
        near_width = max(factor, math.floor(width / ratio / factor) * factor)
    elif depth * near_height * near_width < min_pixels:
        ratio = math.sqrt(min_pixels / (num_frames * height * width))
        near_height = math.ceil(height * ratio / factor) * factor
        near_width = math.ceil(width * ratio / factor) * factor
    return near_height, near_width


@dataclass(frozen=True, kw_only=True)
class QwenVLProcessor:
    """The `PictureProcessor` of Qwen2.5-VL."""

    images: QwenPreparation
    videos: QwenPreparation
    image_token_id: int
    video_token_id: int
    tokens_per_second: float  # of videos
    max_positions: int  # of the model

    def image(self, pixels: Pixels) -> Picture:
        return qwen_picture([rgb(pixels)], self.images)

    def video(self, frames: Sequence[Pixels], *, fps: float) -> Picture:
        arrays = checked_frames(frames, fps)
        return qwen_picture(arrays, self.videos, kind="video", fps=fps)

    def expand(self, token_ids: list[int], pictures: Sequence[Picture]) -> Expanded:
        ids = {"image": self.image_token_id, "video": self.video_token_id}
        expanded, spans = expand_placeholders(token_ids, pictures, ids)
        positions, following = mrope_positions(
            len(expanded),
            spans,
            pictures,
            merge_size=self.images.merge_size,
            tokens_per_second=self.tokens_per_second,
            max_positions=self.max_positions,
        )
        return Expanded(
            token_ids=expanded, spans=spans, positions=positions, next_position=following
        )


def checked_frames(frames: Sequence[Pixels], fps: float) -> list[np.ndarray]:
    """uint8[height, width, 3] of each frame of a video. Raises ValueError for what is none."""
    arrays = [rgb(frame) for frame in frames]
    if not 1 <= len(arrays) <= _MOST_FRAMES:
        raise ValueError(
            f"a video of {len(arrays)} frames; give 1 to {_MOST_FRAMES}, sampled evenly"
        )
    if not (fps > 0 and math.isfinite(fps)):
        raise ValueError(f"fps is {fps}; give the frames per second of a video, above 0")
    shapes = {frame.shape for frame in arrays}
    if len(shapes) > 1:
        sizes = ", ".join(sorted(f"{width}x{height}" for height, width, _ in shapes))
        raise ValueError(f"the frames of a video have sizes {sizes}; they must have one size")
    return arrays


def qwen_picture(
    frames: list[np.ndarray],
    how: QwenPreparation,
    *,
    kind: str = "image",
    fps: float | None = None,
) -> Picture:
    """Frames of one size as patches of one grid. `fps` says how far apart they are in time."""
    patches, grid = how.patches(frames)
    return Picture(
        patches=patches,
        grid=grid,
        num_tokens=math.prod(grid) // how.merge_size**2,
        content_hash=content_hash(frames, "qwen_vl", kind, fps, how),
        second_per_grid=None if fps is None else how.frames_per_patch / fps,
        kind=kind,
    )


def qwen2_5_vl_processor(
    hf: PretrainedConfig,
    settings: ProcessorSettings,
    *,
    tokenizer: Any = None,
    options: Mapping[str, Any] | None = None,
) -> QwenVLProcessor:
    """The processor of a Qwen2_5_VLConfig; `options`: `min_pixels` and `max_pixels` in place of the checkpoint's.

    Raises ValueError for options and settings that cannot be served.
    """
    del tokenizer
    told = checked_options(options)
    return QwenVLProcessor(
        images=qwen_preparation(hf, settings.image | told, IMAGE_PIXELS),
        videos=qwen_preparation(hf, settings.video | told, _VIDEO_PIXELS),
        image_token_id=hf.image_token_id,
        video_token_id=hf.video_token_id,
        tokens_per_second=hf.vision_config.tokens_per_second,
        max_positions=hf.get_text_config().max_position_embeddings,
    )


def checked_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a user says of the preparation. Raises ValueError for unknown names and limits that contradict."""
    unknown = sorted(set(options or {}) - set(_OPTIONS))
    if unknown:
        raise ValueError(
            f"options of the picture processor: {', '.join(unknown)} unknown; known are {', '.join(_OPTIONS)}"
        )
    told = dict(options or {})
    least, most = told.get("min_pixels"), told.get("max_pixels")
    if least is not None and most is not None and least > most:
        raise ValueError(
            f"min_pixels is {least} and max_pixels {most}; the first must not be larger"
        )
    return told


def qwen_preparation(
    hf: PretrainedConfig, told: Mapping[str, Any], pixels: tuple[int, int]
) -> QwenPreparation:
    """What a checkpoint says, or `pixels`, the limits, where it says nothing. Raises ValueError if it is not served."""
    vision = hf.vision_config
    off = [key for key in ("do_resize", "do_rescale", "do_normalize") if told.get(key) is False]
    if off:
        raise ValueError(
            f"the checkpoint's picture processor has {off[0]} off, which is not supported"
        )
    shape = (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
    names = ("patch_size", "temporal_patch_size", "merge_size")
    said = tuple(told.get(name, value) for name, value in zip(names, shape, strict=True))
    if said != shape:
        raise ValueError(
            f"the picture processor has {', '.join(names)} {said}, config.json has {shape}; they must be equal"
        )
    size = told.get("size") or {}
    min_pixels = told.get("min_pixels") or size.get("shortest_edge") or pixels[0]
    max_pixels = told.get("max_pixels") or size.get("longest_edge") or pixels[1]
    if min(min_pixels, max_pixels) < 1:
        raise ValueError(
            f"min_pixels is {min_pixels} and max_pixels {max_pixels}; give numbers above 0"
        )
    return QwenPreparation(
        # A user may give but one, and for images and videos alike, whose other limits differ.
        min_pixels=min(min_pixels, max_pixels),
        max_pixels=max_pixels,
        patch_size=shape[0],
        frames_per_patch=shape[1],
        merge_size=shape[2],
        resample=told.get("resample", _BICUBIC),
        normalisation=Normalisation(
            scale=told.get("rescale_factor", 1 / 255),
            mean=tuple(told.get("image_mean") or _CLIP_MEAN),
            std=tuple(told.get("image_std") or _CLIP_STD),
        ),
    )
