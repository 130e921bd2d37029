"""Pan and scan: of a long picture also some crops, side by side (Gemma 3). Knows arrays of pixels only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

# transformers' names -> where neither the checkpoint nor the options say anything.
DEFAULTS: Mapping[str, Any] = {
    "do_pan_and_scan": False,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


@dataclass(frozen=True, kw_only=True)
class PanAndScan:
    """Which pictures are cropped, and how, as in transformers."""

    min_crop_size: int  # pixels; no crop has a shorter side
    max_num_crops: int
    min_ratio: float  # of the long side to the short one, from which on there are crops

    def crops(self, pixels: np.ndarray) -> list[np.ndarray]:
        """uint8[h, w, 3] each, of uint8[height, width, 3]: from left to right or from top to bottom; may be none."""
        axis = 1 if pixels.shape[1] >= pixels.shape[0] else 0
        long, short = pixels.shape[axis], pixels.shape[1 - axis]
        if long / short < self.min_ratio:
            return []
        wanted = min(long // self.min_crop_size, math.floor(long / short + 0.5))
        size = math.ceil(long / min(max(wanted, 2), self.max_num_crops))
        if min(size, short) < self.min_crop_size:
            return []
        starts = range(0, long, size)
        return [pixels[:, i : i + size] if axis else pixels[i : i + size] for i in starts]


def pan_and_scan(told: Mapping[str, Any]) -> PanAndScan | None:
    """What options under transformers' names ask for; None if for nothing. Raises ValueError."""
    found = {
        name: default if told.get(name) is None else told[name]
        for name, default in DEFAULTS.items()
    }
    do, min_crop_size, max_num_crops, min_ratio = found.values()
    if not isinstance(do, bool):
        raise ValueError(f"do_pan_and_scan must be a bool, got {do!r}")
    numbers = {
        "pan_and_scan_min_crop_size": (min_crop_size, int),
        "pan_and_scan_max_num_crops": (max_num_crops, int),
        "pan_and_scan_min_ratio_to_activate": (min_ratio, (int, float)),
    }
    for name, (value, kind) in numbers.items():
        if isinstance(value, bool) or not isinstance(value, kind) or not value >= 1:
            raise ValueError(f"{name} must be at least 1, got {value!r}")
    if not do:
        return None
    return PanAndScan(min_crop_size=min_crop_size, max_num_crops=max_num_crops, min_ratio=min_ratio)
