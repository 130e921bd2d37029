"""Decoded pixels, as all families take them: RGB arrays, their hash, resized and normalised. PIL and NumPy only."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpage.pictures.border import Pixels


def rgb(pixels: Pixels) -> np.ndarray:
    """uint8[height, width, 3]; what is transparent is put on white. Raises ValueError for what is no picture."""
    if isinstance(pixels, np.ndarray):
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise ValueError(
                f"a picture as an array must be uint8[height, width, 3], got {pixels.dtype}{list(pixels.shape)}"
            )
        array = np.ascontiguousarray(pixels)
    else:
        array = _of_image(pixels)
    if 0 in array.shape:
        raise ValueError(f"a picture of {array.shape[1]}x{array.shape[0]} pixels is empty")
    return array


def _of_image(image: Any) -> np.ndarray:
    from PIL import Image

    if not isinstance(image, Image.Image):
        raise ValueError(
            f"a picture must be a PIL.Image.Image or a NumPy array, got {type(image).__name__}"
        )
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return np.asarray(image.convert("RGB"))


def resized(pixels: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """uint8[height, width, 3] of uint8[h, w, 3]; `resample` is a number of PIL.Image.Resampling."""
    from PIL import Image

    if pixels.shape[:2] == (height, width):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling(resample)))


@dataclass(frozen=True, kw_only=True)
class Normalisation:
    """(pixel * scale - mean) / std, by channel."""

    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """float32[..., 3] of uint8[..., 3], rounded in the order in which transformers rounds."""
        scaled = (np.arange(256, dtype=np.float64) * self.scale).astype(np.float32)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        table = (scaled[:, None] - mean) / std  # a value of each byte and channel
        return np.stack([table[pixels[..., c], c] for c in range(3)], axis=-1)


def content_hash(frames: Sequence[np.ndarray], *told: Any) -> bytes:
    """32 bytes of uint8[h, w, 3] frames and of what the processor was `told`, values with a stable repr."""
    digest = hashlib.sha256(repr((told, [frame.shape for frame in frames])).encode())
    for frame in frames:
        digest.update(np.ascontiguousarray(frame).data)
    return digest.digest()
