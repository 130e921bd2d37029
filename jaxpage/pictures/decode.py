"""Encoded pictures to RGB pixels, with limits that hold before anything large is allocated.

What is read: PNG, JPEG, WebP, GIF, BMP and TIFF, by PIL. Of several frames the first; turned as EXIF says; 16 bits a
channel reduced to 8; what is transparent put on white. Knows no URL and no model.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_BYTES = 32 << 20  # of a file
MAX_PIXELS = 64 << 20  # of a picture: 192 MiB as RGB
_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV")
# What PIL raises for files that are truncated, have broken checksums or bad tables; Warning where warnings are errors.
_DAMAGED = (
    OSError,
    SyntaxError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    NotImplementedError,
    struct.error,
    zlib.error,
    Warning,
)
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N", "I")


def decode(data: bytes, *, max_bytes: int = MAX_BYTES, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """uint8[height, width, 3] of a file's bytes.

    Raises ValueError for what is no picture, and for one that is damaged or too large.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise ValueError("pictures need Pillow: pip install 'jaxpage[vision]'") from None
    if len(data) > max_bytes:
        raise ValueError(f"the file has {len(data)} bytes, more than the {max_bytes} that are read")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        check_size(*image.size, max_pixels)
        image.load()  # of several frames the first
        image = ImageOps.exif_transpose(image)
    except UnidentifiedImageError:
        raise ValueError(
            f"the {len(data)} bytes are no picture in a format that is read: {', '.join(FORMATS)}"
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"the picture is too large: {error}") from None
    except ValueError:
        raise
    except _DAMAGED as error:
        raise ValueError(f"the picture is damaged: {error or type(error).__name__}") from None
    return to_rgb(image, max_pixels=max_pixels)


def check_size(width: int, height: int, max_pixels: int = MAX_PIXELS) -> None:
    """Raise ValueError for a picture that would take too much memory; its pixels need not be decoded yet."""
    if width * height > max_pixels:
        raise ValueError(
            f"the picture has {width}x{height} pixels, more than the {max_pixels} that are read"
        )


def to_rgb(image: Image, *, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """uint8[height, width, 3] of an image of any usual mode. Raises ValueError for others, and for damaged ones."""
    check_size(*image.size, max_pixels)
    try:
        if image.mode in _SIXTEEN_BITS:
            return _of_16_bits(np.asarray(image))
        if image.mode not in _MODES:
            raise ValueError(
                f"a picture of mode {image.mode!r} is not read; convert it to RGB before"
            )
        return _on_white(image)
    except OSError as error:  # an image that was opened and not loaded
        raise ValueError(f"the picture is damaged: {error}") from None


def _on_white(image: Image) -> np.ndarray:
    from PIL import Image as Images

    if image.mode.endswith(("A", "a")) or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Images.new("RGBA", image.size, (255, 255, 255, 255))
        image = Images.alpha_composite(white, image)
    return np.asarray(image.convert("RGB"))


def _of_16_bits(gray: np.ndarray) -> np.ndarray:
    if gray.size and not 0 <= gray.min() <= gray.max() < 2**16:
        raise ValueError(
            f"a picture of {gray.dtype} has values from {gray.min()} to {gray.max()}; 0 to 65535 are read"
        )
    gray = ((gray.astype(np.uint32) * 255 + 2**15) // (2**16 - 1)).astype(np.uint8)
    return np.repeat(gray[:, :, None], 3, axis=2)
