"""The smallest family that takes pictures: a linear layer over patches, in front of the decoder of the demo's model.

Its placeholder is the token 0, which the demo's tokenizer writes <|endoftext|>.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import jax
import numpy as np
from flax import nnx

from jaxpage.models.config import decoder_config
from jaxpage.models.layers import Linear, Normal
from jaxpage.models.registry import REGISTRY, Family
from jaxpage.models.vision import PictureLM
from jaxpage.pictures.border import Expanded, Picture
from jaxpage.pictures.pixels import content_hash, rgb
from jaxpage.pictures.placeholders import expand_placeholders

PLACEHOLDER, VIDEO_PLACEHOLDER = 0, 1900
NAME = "FakeSeeing"
OPTIONS = {"hf_overrides": {"architectures": [NAME]}, "load_format": "dummy"}
# As Hugging Face's templates of models that see.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|endoftext|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class FakeVision:
    """Four patches, of one pixel each, become an embedding of the demo's model."""

    embedding_size: int
    patch_values: int = 3
    patches_per_token: int = 4
    num_patches: int | None = None
    most_patches: int | None = None
    bidirectional: bool = False
    causal_without_window: bool = False

    def encoder_inputs(self, picture: Picture, padded_patches: int) -> dict[str, np.ndarray]:
        patches = np.zeros((padded_patches, 3), np.float32)
        patches[: len(picture.patches)] = picture.patches
        return {"patches": patches}


class FakeTower(nnx.Module):
    def __init__(self, config: Any):
        size, init = config.hidden_size, Normal(1.0)
        self.proj = Linear(
            (size, 12), axes=("embed", "embed"), bias=False, init=init, dtype=config.dtype
        )

    def __call__(self, *, patches: jax.Array) -> jax.Array:
        return self.proj(patches.reshape(-1, 12).astype(self.proj.weight.get_value().dtype))


class FakeProcessor:
    """A patch is a pixel; the number of pixels is a multiple of four."""

    def image(self, pixels: Any) -> Picture:
        array = rgb(pixels)
        height, width, _ = array.shape
        if height * width % 4:
            raise ValueError(f"a picture of {width}x{height} pixels is no multiple of four")
        return Picture(
            patches=(array.reshape(-1, 3) / 255).astype(np.float32),
            grid=(1, height, width),
            num_tokens=height * width // 4,
            content_hash=content_hash([array], "fake"),
        )

    def video(self, frames: Sequence[Any], *, fps: float) -> Picture:
        whole = self.image(np.concatenate([rgb(frame) for frame in frames]))
        return dataclasses.replace(whole, kind="video", second_per_grid=1 / fps)

    def expand(self, token_ids: list[int], pictures: Sequence[Picture]) -> Expanded:
        ids = {"image": PLACEHOLDER, "video": VIDEO_PLACEHOLDER}
        expanded, spans = expand_placeholders(token_ids, pictures, ids)
        return Expanded(
            token_ids=expanded, spans=spans, positions=None, next_position=len(expanded)
        )


def _processor(*_: Any, **__: Any) -> FakeProcessor:
    return FakeProcessor()


@contextmanager
def registered() -> Iterator[None]:
    """Engines that are built meanwhile, with OPTIONS, are of this family."""
    family = Family(
        config_from_hf=partial(decoder_config, qkv_bias=True, vision=FakeVision(192)),
        module=lambda config: PictureLM(config, FakeTower(config)),
        processor=_processor,
    )
    with mock.patch.dict(REGISTRY, {NAME: family}):
        yield


def pixels(number: int, height: int = 4, width: int = 6) -> np.ndarray:
    """uint8[height, width, 3] of the picture of that number."""
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, (height, width, 3)).astype(np.uint8)
