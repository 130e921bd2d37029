"""Gemma 4 on the host: pictures to patches, prompts with begin and end of each picture, and the encoder's inputs.

A picture keeps its proportions and is resized to as many patches as it may have. Values are those of transformers'
Gemma4ImageProcessorPil. Knows no array on a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpage.pictures.border import Expanded, Picture, Pixels
from jaxpage.pictures.pixels import Normalisation, content_hash, resized, rgb
from jaxpage.pictures.placeholders import expand_placeholders, has_one_each
from jaxpage.pictures.qwen_vision import PADDING, check_padding
from jaxpage.pictures.settings import ProcessorSettings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_BICUBIC = 3
_MOST_TOKENS = "max_soft_tokens"
_TOKEN_LIMITS = (70, 140, 280, 560, 1120)  # the values of that option
_HALVES = (0.5, 0.5, 0.5)


@dataclass(frozen=True, kw_only=True)
class Gemma4VisionConfig:
    """A tower over patches of 3 colours, and the pooling of squares of them to embeddings."""

    depth: int
    hidden_size: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    out_hidden_size: int
    activation: str
    patch_size: int  # pixels a side
    pool_size: int  # patches a side that become one embedding
    num_places: int  # columns, and rows, that have an embedding of their position
    rope_theta: float
    norm_eps: float
    standardises: bool  # embeddings, with learned numbers
    clips: bool  # inputs and outputs of linear layers, at learned bounds
    bidirectional: bool
    initializer_range: float

    @property
    def patch_values(self) -> int:
        return 3 * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        return self.pool_size**2

    @property
    def embedding_size(self) -> int:
        return self.out_hidden_size

    @property
    def num_patches(self) -> None:
        return None

    @property
    def most_patches(self) -> None:
        return None

    @property
    def causal_without_window(self) -> bool:
        return True

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        """float32[P, patch_values] of float32[height, width, 3]; patches that are pooled follow each other."""
        blocks = (-1, self.pool_size, self.patch_size)
        side = self.pool_size * self.patch_size
        height, width = pixels.shape[0] // side, pixels.shape[1] // side
        values = pixels.reshape(height, *blocks[1:], width, *blocks[1:], 3)
        values = values.transpose(0, 3, 1, 4, 2, 5, 6)
        return np.ascontiguousarray(values).reshape(-1, self.patch_values)

    def places(self, grid: tuple[int, int, int]) -> np.ndarray:
        """int32[2, P]: column and row of each patch, in the order of `patches`."""
        _, height, width = grid
        size = self.pool_size
        rows, columns = np.mgrid[:height, :width]
        both = np.stack([columns, rows]).reshape(2, height // size, size, width // size, size)
        return both.transpose(0, 1, 3, 2, 4).reshape(2, -1).astype(np.int32)

    def encoder_inputs(self, picture: Picture, padded_patches: int) -> dict[str, np.ndarray]:
        """patches float32[P, patch_values]; places int32[2, P], columns and rows; segments int32[P]."""
        num_patches = len(picture.patches)
        check_padding(picture, padded_patches, self.patches_per_token)
        patches = np.zeros((padded_patches, self.patch_values), np.float32)
        patches[:num_patches] = picture.patches
        places = np.zeros((2, padded_patches), np.int32)
        places[:, :num_patches] = self.places(picture.grid)
        segments = np.full(padded_patches, PADDING, np.int32)
        segments[:num_patches] = 0
        return {"patches": patches, "places": places, "segments": segments}


@dataclass(frozen=True, kw_only=True)
class Gemma4Processor:
    """The `PictureProcessor` of Gemma 4."""

    config: Gemma4VisionConfig
    most_tokens: int  # of a picture
    resample: int
    normalisation: Normalisation
    image_token_id: int
    begin_token_id: int
    end_token_id: int

    def image(self, pixels: Pixels) -> Picture:
        config, array = self.config, rgb(pixels)
        height, width = self._size(*array.shape[:2])
        grid = (1, height // config.patch_size, width // config.patch_size)
        if max(grid) > config.num_places:
            raise ValueError(
                f"a picture of {array.shape[1]}x{array.shape[0]} pixels is {max(grid)} patches long, and the model "
                f"knows {config.num_places} places; cut it"
            )
        values = self.normalisation(resized(array, height, width, self.resample))
        patches = config.patches(values)
        return Picture(
            patches=patches,
            grid=grid,
            num_tokens=len(patches) // config.patches_per_token,
            content_hash=content_hash(
                [array], "gemma4", config, self.most_tokens, self.resample, self.normalisation
            ),
        )

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """Pixels of the resized picture: as large as `most_tokens` allow, in whole squares of patches."""
        side = self.config.pool_size * self.config.patch_size
        factor = math.sqrt(self.most_tokens * side**2 / (height * width))
        rows, columns = (int(factor * length / side) for length in (height, width))
        # A long one keeps one row, or column, of squares.
        if rows == 0:
            rows, columns = 1, min(width // height, self.most_tokens)
        elif columns == 0:
            rows, columns = min(height // width, self.most_tokens), 1
        return rows * side, columns * side

    def video(self, frames: Sequence[Pixels], *, fps: float) -> Picture:
        raise ValueError("videos of Gemma 4 are not supported; give some frames as pictures")

    def expand(self, token_ids: list[int], pictures: Sequence[Picture]) -> Expanded:
        """A placeholder gets a begin and an end, if it has none; placeholders that are all there already stay."""
        placeholder = self.image_token_id
        if has_one_each(token_ids, pictures, "image", placeholder):
            token_ids = self._with_ends(token_ids)
        expanded, spans = expand_placeholders(token_ids, pictures, {"image": placeholder})
        return Expanded(
            token_ids=expanded, spans=spans, positions=None, next_position=len(expanded)
        )

    def _with_ends(self, token_ids: list[int]) -> list[int]:
        found = list[int]()
        for index, token_id in enumerate(token_ids):
            if token_id != self.image_token_id:
                found.append(token_id)
                continue
            has_begin = index > 0 and token_ids[index - 1] == self.begin_token_id
            has_end = index + 1 < len(token_ids) and token_ids[index + 1] == self.end_token_id
            found += [] if has_begin else [self.begin_token_id]
            found += [token_id] if has_end else [token_id, self.end_token_id]
        return found


def gemma4_processor(
    hf: PretrainedConfig,
    settings: ProcessorSettings,
    *,
    tokenizer: Any = None,
    options: Mapping[str, Any] | None = None,
) -> Gemma4Processor:
    """The processor of a Gemma4Config. Raises ValueError for options and settings that cannot be served."""
    del tokenizer
    options = options or {}
    if unknown := sorted(set(options) - {_MOST_TOKENS}):
        raise ValueError(
            f"options of the picture processor: {', '.join(unknown)} unknown; known is {_MOST_TOKENS}"
        )
    told, config = settings.image | dict(options), gemma4_vision_config(hf)
    for name, size in (
        ("patch_size", config.patch_size),
        ("pooling_kernel_size", config.pool_size),
    ):
        if told.get(name, size) != size:
            raise ValueError(
                f"{name} of the picture processor is {told[name]}, of the vision tower {size}; correct "
                "preprocessor_config.json"
            )
    if (most := told.get(_MOST_TOKENS, 280)) not in _TOKEN_LIMITS:
        raise ValueError(f"{_MOST_TOKENS} is {most!r}; it must be one of {_TOKEN_LIMITS}")
    return Gemma4Processor(
        config=config,
        most_tokens=most,
        resample=told.get("resample", _BICUBIC),
        # The model's own 2 (x - 0.5).
        normalisation=Normalisation(
            scale=told.get("rescale_factor", 1 / 255), mean=_HALVES, std=_HALVES
        ),
        image_token_id=hf.image_token_id,
        begin_token_id=hf.boi_token_id,
        end_token_id=hf.eoi_token_id,
    )


def gemma4_vision_config(hf: PretrainedConfig) -> Gemma4VisionConfig:
    """The shape of the encoder of a Gemma4Config. Raises ValueError for what cannot be served."""
    vision, text = hf.vision_config, hf.get_text_config()
    if vision.num_key_value_heads != vision.num_attention_heads or vision.head_dim % 4:
        raise ValueError(
            f"the vision tower has {vision.num_attention_heads} heads of {vision.head_dim} and "
            f"{vision.num_key_value_heads} KV heads; both numbers must be the same, and the size a multiple of 4"
        )
    return Gemma4VisionConfig(
        depth=vision.num_hidden_layers,
        hidden_size=vision.hidden_size,
        num_heads=vision.num_attention_heads,
        head_dim=vision.head_dim,
        intermediate_size=vision.intermediate_size,
        out_hidden_size=text.hidden_size,
        activation=vision.hidden_activation,
        patch_size=vision.patch_size,
        pool_size=vision.pooling_kernel_size,
        num_places=vision.position_embedding_size,
        rope_theta=vision.rope_parameters["rope_theta"],
        norm_eps=vision.rms_norm_eps,
        standardises=bool(vision.standardize),
        clips=bool(vision.use_clipped_linears),
        bidirectional=text.use_bidirectional_attention == "vision",
        initializer_range=vision.initializer_range,
    )
