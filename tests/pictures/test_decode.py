"""Encoded pictures: right RGB pixels, or a clear error, and never more memory than the limits say."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from jaxpage.pictures.decode import decode, to_rgb

COLOURS = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [250, 240, 10]]], np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def colours(size: int = 2) -> Image.Image:
    return Image.fromarray(COLOURS).resize((size, size), Image.Resampling.NEAREST)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_pixels_are_those_that_were_saved(kind):
    np.testing.assert_array_equal(decode(encoded(colours(), kind)), COLOURS)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_lossy_formats_are_read(kind):
    found = decode(encoded(colours(32), kind, quality=95))
    assert np.abs(found.astype(int) - np.asarray(colours(32)).astype(int)).mean() < 12


def test_a_palette_is_looked_up():
    image = colours().convert("P", palette=Image.Palette.ADAPTIVE)
    np.testing.assert_array_equal(decode(encoded(image)), COLOURS)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode):
    if mode == "P":
        image = Image.new("P", (2, 1))
        image.putpalette([9, 9, 9, 0, 0, 0])
        image.putdata([0, 1])
        data = encoded(image, transparency=0)
    else:
        image = Image.new(mode, (2, 1))
        image.putpixel((1, 0), (0, 0, 0, 255) if mode == "RGBA" else (0, 255))
        data = encoded(image)
    np.testing.assert_array_equal(decode(data)[0], [[255] * 3, [0] * 3])


def test_gray_and_black_and_white_become_rgb():
    np.testing.assert_array_equal(decode(encoded(Image.new("L", (1, 1), 77)))[0, 0], [77] * 3)
    np.testing.assert_array_equal(decode(encoded(Image.new("1", (1, 1), 1)))[0, 0], [255] * 3)


def test_16_bits_are_reduced_and_not_cut():
    gray = np.array([[0, 257 * 100, 65535]], np.uint16)
    found = decode(encoded(Image.fromarray(gray)))
    np.testing.assert_array_equal(found[0, :, 0], [0, 100, 255])


def test_cmyk_is_read_and_floats_are_refused():
    image = Image.new("CMYK", (1, 1), (0, 255, 255, 0))
    assert decode(encoded(image, "TIFF"))[0, 0].tolist() == [255, 0, 0]
    with pytest.raises(ValueError, match="mode 'F'"):
        decode(encoded(Image.new("F", (1, 1)), "TIFF"))


def test_a_picture_is_turned_as_exif_says():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    image = Image.fromarray(np.repeat(np.repeat(COLOURS[:1], 8, 0), 8, 1))  # red left, green right
    found = decode(encoded(image, "JPEG", exif=exif, quality=95))
    assert found.shape == (16, 8, 3)
    assert found[2, 4].argmax() == 0 and found[-3, 4].argmax() == 1


def test_of_an_animation_the_first_frame_is_taken():
    frames = [Image.new("RGB", (2, 2), colour) for colour in ("red", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert decode(data)[0, 0].tolist() == [255, 0, 0], kind


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_truncated_file_is_refused(kind):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    data = encoded(image, kind)
    for part in (data[: len(data) // 2], data[:20], data[:3]):
        with pytest.raises(ValueError, match="damaged|no picture"):
            decode(part)


def test_damaged_bytes_never_raise_anything_else():
    rng = np.random.default_rng(1)
    image = Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8))
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        data = encoded(image, kind)
        for _ in range(40):
            broken = bytearray(data)
            for _ in range(3):
                broken[rng.integers(len(broken))] = rng.integers(256)
            try:
                assert decode(bytes(broken)).shape[2] == 3
            except ValueError:
                pass


@pytest.mark.parametrize("data", [b"", b"hello", b"<svg></svg>", b"%PDF-1.4", bytes(1000)])
def test_what_is_no_picture_is_refused(data):
    with pytest.raises(ValueError, match="no picture"):
        decode(data)


def png_of(width: int, height: int) -> bytes:
    """The header of a PNG that says to be so large, and little behind it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(10_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    "size", [(9_000, 9_000), (12_000, 12_000), (60_000, 60_000), (2**31 - 1, 2)]
)
def test_a_decompression_bomb_is_refused_before_it_is_decoded(size):
    with pytest.raises(ValueError, match="too large|more than|damaged"):
        decode(png_of(*size))


def test_large_files_and_pictures_are_refused():
    data = encoded(colours())
    with pytest.raises(ValueError, match=f"{len(data)} bytes, more than the 10"):
        decode(data, max_bytes=10)
    with pytest.raises(ValueError, match="2x2 pixels, more than the 3"):
        decode(data, max_pixels=3)
    with pytest.raises(ValueError, match="2x2 pixels"):
        to_rgb(colours(), max_pixels=3)


def test_errors_that_are_not_of_the_file_are_not_hidden(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("not of the file")

    monkeypatch.setattr(Image, "open", fails)
    with pytest.raises(RuntimeError, match="not of the file"):
        decode(encoded(colours()))


def test_an_image_that_was_opened_and_not_loaded_may_be_damaged(tmp_path):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    file = tmp_path / "half.png"
    file.write_bytes(encoded(image)[:4000])
    with Image.open(file) as opened, pytest.raises(ValueError, match="damaged"):
        to_rgb(opened)
