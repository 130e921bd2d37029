"""Qwen3-VL on the host: pictures as Qwen2.5-VL's; frames of a video stand apart in a prompt, each after its time.

Sizes and times are those of transformers' Qwen3VLVideoProcessor and Qwen3VLProcessor. Knows no array on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpage.pictures.border import Expanded, Picture, Pixels
from jaxpage.pictures.mrope import mrope_positions
from jaxpage.pictures.pixels import content_hash, rgb
from jaxpage.pictures.placeholders import expand_placeholders, has_one_each
from jaxpage.pictures.qwen_vl import (
    IMAGE_PIXELS,
    QwenPreparation,
    checked_frames,
    checked_options,
    qwen_picture,
    qwen_preparation,
    smart_resize,
)
from jaxpage.pictures.settings import ProcessorSettings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_VIDEO_PIXELS = (128 * 32 * 32, 32 * 32 * 768)
_HALF = (0.5, 0.5, 0.5)
_FRAME_TOKENS = 768  # of a frame at most, where frames have a limit of their own


@dataclass(frozen=True, kw_only=True)
class VideoPreparation(QwenPreparation):
    """How videos are resized and normalised: the limits of pixels are of all frames together."""

    most_frame_tokens: int | None = None

    def grid(self, height: int, width: int, num_frames: int = 1) -> tuple[int, int]:
        factor = self.patch_size * self.merge_size
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        num_frames = max(num_frames, self.frames_per_patch)  # a single one is repeated
        max_pixels = self.max_pixels
        if self.most_frame_tokens is not None:
            most = min(self.most_frame_tokens * factor**2, max_pixels // num_frames)
            max_pixels = max(most, int(self.min_pixels * 1.05)) * num_frames
        height, width = smart_resize(
            height,
            width,
            factor=factor,
            min_pixels=self.min_pixels,
            max_pixels=max_pixels,
            num_frames=num_frames,
            frames_per_patch=self.frames_per_patch,
        )
        return height // self.patch_size, width // self.patch_size


@dataclass(frozen=True, kw_only=True)
class Qwen3VLProcessor:
    """The `PictureProcessor` of Qwen3-VL."""

    images: QwenPreparation
    videos: VideoPreparation
    image_token_id: int
    video_token_id: int
    start_token_id: int  # before the placeholders of a picture or a frame
    end_token_id: int  # after them
    encode_text: Callable[[str], list[int]] | None  # None: there is no tokenizer

    def image(self, pixels: Pixels) -> Picture:
        return qwen_picture([rgb(pixels)], self.images)

    def video(self, frames: Sequence[Pixels], *, fps: float) -> Picture:
        """As many pictures as the encoder has rows of frames; attention in the encoder is within a row."""
        arrays, how = checked_frames(frames, fps), self.videos
        whole = qwen_picture(arrays, how, kind="video", fps=fps)
        (num_rows, height, width), depth = whole.grid, how.frames_per_patch
        rows = [
            Picture(
                patches=patches,
                grid=(1, height, width),
                num_tokens=whole.num_tokens // num_rows,
                content_hash=content_hash(
                    arrays[i * depth : (i + 1) * depth], "qwen3_vl", height, width, how
                ),
                kind="video",
            )
            for i, patches in enumerate(np.split(whole.patches, num_rows))
        ]
        return Picture(
            patches=whole.patches,
            grid=whole.grid,
            num_tokens=whole.num_tokens,
            content_hash=whole.content_hash,
            kind="video",
            frames=tuple(rows),
            times=_times(len(arrays), fps, depth),
        )

    def expand(self, token_ids: list[int], pictures: Sequence[Picture]) -> Expanded:
        videos = [picture for picture in pictures if picture.kind == "video"]
        if has_one_each(token_ids, pictures, "video", self.video_token_id):
            token_ids = self._with_times(token_ids, videos)
        parts = [part for picture in pictures for part in picture.parts]
        ids = {"image": self.image_token_id, "video": self.video_token_id}
        expanded, spans = expand_placeholders(token_ids, parts, ids)
        positions, following = mrope_positions(
            len(expanded), spans, parts, merge_size=self.images.merge_size, tokens_per_second=0.0
        )
        return Expanded(
            token_ids=expanded, spans=spans, positions=positions, next_position=following
        )

    def _with_times(self, token_ids: list[int], videos: list[Picture]) -> list[int]:
        """The prompt with times, and start, placeholder and end for each row of frames.

        They stand in the place of a video's placeholder and of start and end around it, as in vLLM and transformers 4.
        (transformers 5 leaves these two; the models were trained as it is here.)
        """
        start, placeholder, end = self.start_token_id, self.video_token_id, self.end_token_id
        waiting, made, index = list(videos), [], 0
        while index < len(token_ids):
            if token_ids[index] != placeholder:
                made.append(token_ids[index])
                index += 1
                continue
            if made[-1:] == [start] and token_ids[index + 1 : index + 2] == [end]:
                made.pop()
                index += 1
            for time in waiting.pop(0).times:
                made += [*self._text(f"<{time:.1f} seconds>"), start, placeholder, end]
            index += 1
        return made

    def _text(self, text: str) -> list[int]:
        if self.encode_text is None:
            raise ValueError(
                "the times of a video's frames are text, and there is no tokenizer; leave skip_tokenizer_init out, or "
                "give the prompt with all times and placeholders"
            )
        return self.encode_text(text)


def _times(num_frames: int, fps: float, depth: int) -> tuple[float, ...]:
    """Seconds, in the middle between the first and the last frame of each row."""
    last = num_frames - 1
    return tuple(
        (i / fps + min(i + depth - 1, last) / fps) / 2 for i in range(0, num_frames, depth)
    )


def qwen3_vl_processor(
    hf: PretrainedConfig,
    settings: ProcessorSettings,
    *,
    tokenizer: Any = None,
    options: Mapping[str, Any] | None = None,
) -> Qwen3VLProcessor:
    """The processor of a Qwen3VLConfig; `options` as of Qwen2.5-VL, of pictures and not of videos.

    Raises ValueError for options and settings that cannot be served.
    """
    video: dict[str, Any] = {"image_mean": _HALF, "image_std": _HALF} | settings.video
    shared = qwen_preparation(hf, video, _VIDEO_PIXELS)
    capped = video.get("cap_pixels_per_frame")
    return Qwen3VLProcessor(
        images=qwen_preparation(hf, settings.image | checked_options(options), IMAGE_PIXELS),
        videos=VideoPreparation(
            **vars(shared),
            most_frame_tokens=video.get("max_video_tokens", _FRAME_TOKENS) if capped else None,
        ),
        image_token_id=hf.image_token_id,
        video_token_id=hf.video_token_id,
        start_token_id=hf.vision_start_token_id,
        end_token_id=hf.vision_end_token_id,
        encode_text=None if tokenizer is None else _encoder(tokenizer),
    )


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_special_tokens=False)
