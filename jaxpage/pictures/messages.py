"""Pictures in messages and prompts: taken out of vLLM's and OpenAI's forms, and what stays for the chat template.

Knows the forms. Must not know how a picture is prepared for a model: whoever calls says what is made of each, one at a
time, so that pixels are not kept.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpage.pictures.border import Picture
from jaxpage.pictures.decode import check_size, decode, to_rgb

FPS = 2.0  # of frames that come without saying so: as Qwen's tools sample videos
_LEAST_FPS, _MOST_FPS = 1e-6, 1e6
_PARTS = ("image_url", "image_pil", "image", "video")
_REFUSED = ("video_url", "audio_url", "input_audio", "image_embeds")


@dataclass(frozen=True, kw_only=True, eq=False)
class Media:
    """A picture or a video, decoded."""

    kind: str  # "image" or "video"
    frames: tuple[np.ndarray, ...]  # uint8[height, width, 3]; one of a picture
    fps: float = FPS  # of a video


Prepare = Callable[[Media], Picture]


class MediaPart(dict):
    """A content part that a chat template gets in the place of a picture: {"type": "image"}, or "video"."""

    def __init__(self, picture: Picture):
        super().__init__(type=picture.kind)
        self.picture = picture


def has_media(messages: Iterable[Any]) -> bool:
    """Whether some message of a conversation has a picture or a video that was not loaded yet."""
    contents = (m.get("content") for m in messages if isinstance(m, Mapping))
    return any(
        _is_media(part) and not isinstance(part, MediaPart)
        for content in contents
        if isinstance(content, list | tuple)
        for part in content
    )


def load_media(
    messages: Iterable[Any], read: Callable[[str], bytes], prepare: Prepare
) -> list[Any]:
    """A conversation with a `MediaPart` for each picture and video in it. `read`: the bytes behind a URL.

    Raises ValueError, which begins with where in the messages it is.
    """

    def loaded(message: Any, where: str) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple) or not any(map(_is_media, content)):
            return message
        parts = [
            part
            if isinstance(part, MediaPart) or not _is_media(part)
            else MediaPart(_at(f"{where}.content[{i}]", part, _part_reader(read), prepare))
            for i, part in enumerate(content)
        ]
        return dict(message) | {"content": parts}

    return [loaded(message, f"messages[{i}]") for i, message in enumerate(messages)]


def pictures_of(messages: Iterable[Any]) -> list[Picture]:
    """The pictures and videos of a conversation that `load_media` made, in order."""
    contents = (m.get("content") for m in messages if isinstance(m, Mapping))
    parts = (part for c in contents if isinstance(c, list | tuple) for part in c)
    return [part.picture for part in parts if isinstance(part, MediaPart)]


def prompt_pictures(data: Any, prepare: Prepare) -> list[Picture]:
    """Those of a prompt's "multi_modal_data": {"image": one or a list, "video": one or a list}. Raises ValueError."""
    if not isinstance(data, Mapping):
        raise ValueError(f'"multi_modal_data" must be a dict, got {type(data).__name__}')
    unknown = [key for key in data if key not in ("image", "video") and data[key] is not None]
    if unknown:
        raise ValueError(f'"multi_modal_data" may have "image" and "video", got {unknown[0]!r}')
    images = _listed(data.get("image"), _is_one_image)
    videos = _listed(data.get("video"), _is_one_video)
    found = [_at(f"image {i}", x, _picture, prepare) for i, x in enumerate(images)]
    return found + [_at(f"video {i}", x, _video, prepare) for i, x in enumerate(videos)]


def _listed(value: Any, is_one: Callable[[Any], bool]) -> list[Any]:
    if value is None:
        return []
    return [value] if is_one(value) else list(value)


def _is_one_image(value: Any) -> bool:
    return not isinstance(value, list | tuple)


def _is_one_video(value: Any) -> bool:
    """An array [frames, ...], frames in a list, or one of these with what is known of it."""
    if isinstance(value, tuple):
        return len(value) == 2 and isinstance(value[1], Mapping | None)
    return not isinstance(value, list) or bool(value and _is_frame(value[0]))


def _is_frame(value: Any) -> bool:
    return not isinstance(value, list | tuple) and getattr(value, "ndim", 3) == 3


def _is_media(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in (*_PARTS, *_REFUSED)


def _at(where: str, given: Any, read: Callable[[Any], Media], prepare: Prepare) -> Picture:
    try:
        return prepare(read(given))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _part_reader(read: Callable[[str], bytes]) -> Callable[[Mapping[str, Any]], Media]:
    def of_part(part: Mapping[str, Any]) -> Media:
        kind = part["type"]
        if kind in _REFUSED:
            raise ValueError(f"{kind} is not supported; give pictures, or a video as its frames")
        value: Any = part.get(kind)
        if value is None:
            raise ValueError(f'a part of type {kind!r} must have "{kind}"')
        if kind == "video":
            return _video(value, part.get("fps"))
        if kind == "image_url" and isinstance(value, Mapping):
            value = value.get("url")
        if kind == "image_url" or isinstance(value, str):
            return Media(kind="image", frames=(decode(read(value)),))
        return _picture(value)

    return of_part


def _picture(value: Any) -> Media:
    return Media(kind="image", frames=(_frame(value),))


def _video(value: Any, fps: Any = None) -> Media:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping | None):
        value, known = value
        fps = (known or {}).get("fps") if fps is None else fps
    fps = FPS if fps is None else fps
    if not _is_number(fps) or not _LEAST_FPS <= fps <= _MOST_FPS:
        raise ValueError(
            f"fps must be a number from {_LEAST_FPS} to {_MOST_FPS:.0e}, the frames that were taken of a second, "
            f"got {fps!r}"
        )
    if not isinstance(value, list | tuple) and getattr(value, "ndim", 0) != 4:
        raise ValueError("a video must be an array [frames, height, width, 3], or a list of frames")
    return Media(kind="video", frames=tuple(_frame(frame) for frame in value), fps=float(fps))


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _frame(value: Any) -> np.ndarray:
    """uint8[height, width, 3] of an image of PIL, or of an array."""
    if hasattr(value, "detach"):  # torch
        value = value.detach().cpu().numpy()
    if hasattr(value, "__array__") and not hasattr(value, "getbands"):
        array = np.asarray(value)
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
            raise ValueError(
                f"an array must be uint8 [height, width, 3], got {array.dtype} {list(array.shape)}"
            )
        check_size(array.shape[1], array.shape[0])
        return np.ascontiguousarray(array)
    if not hasattr(value, "getbands"):
        raise ValueError(
            f"a picture must be an image of PIL or an array, got {type(value).__name__}"
        )
    return to_rgb(value)
