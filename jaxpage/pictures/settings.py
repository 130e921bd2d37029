"""What a checkpoint says of the preparation of its pictures and videos. Reads JSON files, and no others."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ProcessorSettings:
    """Options of transformers' processors under their names; empty where the files say nothing."""

    image: dict[str, Any]
    video: dict[str, Any]
    # Of texts with pictures: what is in processor_config.json beside the two.
    joint: dict[str, Any] = field(default_factory=dict)


def read_settings(folder: str | Path) -> ProcessorSettings:
    """The settings in a checkpoint's folder, from the files that transformers reads, in its order of precedence.

    Raises ValueError for a file that is no JSON object.
    """
    folder = Path(folder)
    nested = _read(folder / "processor_config.json") or {}
    legacy = _read(folder / "preprocessor_config.json") or {}
    image = nested.get("image_processor") or legacy
    # Released checkpoints without a file for videos mean the same for both.
    video = nested.get("video_processor") or _read(folder / "video_preprocessor_config.json")
    joint = {
        key: value
        for key, value in nested.items()
        if key not in ("image_processor", "video_processor")
    }
    return ProcessorSettings(image=image, video=legacy if video is None else video, joint=joint)


def _read(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds {type(values).__name__}, not an object of settings")
    return values
