"""Pixtral on the host, as in Mistral 3: pictures to patches, prompts with ends of rows, and the encoder's inputs.

A picture keeps its size unless it is too long, and its tokens stand in rows. Values are those of transformers'
PixtralImageProcessorPil, prompts those of its PixtralProcessor. Knows no array on a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpage.pictures.border import Expanded, Picture, Pixels
from jaxpage.pictures.pixels import Normalisation, content_hash, resized, rgb
from jaxpage.pictures.placeholders import expand_placeholders
from jaxpage.pictures.qwen_vision import check_padding, padded, places_of
from jaxpage.pictures.settings import ProcessorSettings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_BICUBIC = 3
_LONGEST_EDGE = 1024  # pixels, where the checkpoint does not say
_SIZE = "size"  # the only option that a user may give instead of the checkpoint's
_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "patch_size", "image_size"),
)


@dataclass(frozen=True, kw_only=True)
class PixtralVisionConfig:
    """A Pixtral tower, and the merging of squares of its patches to embeddings."""

    depth: int
    last_layer: int  # number of layers that run: the output of the last of them is merged
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    activation: str
    projector_activation: str
    projector_bias: bool
    image_size: int  # pixels of a side of the largest picture
    patch_size: int  # pixels a side
    merge_size: int  # patches a side that become one embedding
    rope_theta: float
    norm_eps: float  # of the projector
    initializer_range: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def side(self) -> int:
        """Pixels a side that become one embedding."""
        return self.patch_size * self.merge_size

    @property
    def patch_values(self) -> int:
        return 3 * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        return self.merge_size**2

    @property
    def embedding_size(self) -> int:
        return self.out_hidden_size

    @property
    def num_patches(self) -> None:
        return None

    @property
    def most_patches(self) -> int:
        return (-(-self.image_size // self.side) * self.merge_size) ** 2

    @property
    def bidirectional(self) -> bool:
        return False

    @property
    def causal_without_window(self) -> bool:
        return False

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        """float32[P, patch_values] of float32[height, width, 3]; patches that are merged follow each other."""
        height, width = pixels.shape[0] // self.side, pixels.shape[1] // self.side
        block = (self.merge_size, self.patch_size)
        values = pixels.reshape(height, *block, width, *block, 3)
        # To rows and columns of squares and within one; then channel, row and column of a pixel.
        values = values.transpose(0, 3, 1, 4, 6, 2, 5)
        return np.ascontiguousarray(values).reshape(-1, self.patch_values)

    def encoder_inputs(self, picture: Picture, padded_patches: int) -> dict[str, np.ndarray]:
        """patches float32[P, patch_values]; places int32[2, P], rows and columns; segments int32[P]."""
        num_patches = len(picture.patches)
        check_padding(picture, padded_patches, self.patches_per_token)
        patches = np.zeros((padded_patches, self.patch_values), np.float32)
        patches[:num_patches] = picture.patches
        rows, columns, frames = places_of(picture.grid, self.merge_size)
        places = np.zeros((2, padded_patches), np.int32)
        places[:, :num_patches] = rows, columns
        return {"patches": patches, "places": places, "segments": padded(frames, padded_patches)}


@dataclass(frozen=True, kw_only=True)
class PixtralProcessor:
    """The `PictureProcessor` of models with a Pixtral tower."""

    config: PixtralVisionConfig
    largest: tuple[int, int]  # pixels: height and width
    resample: int
    normalisation: Normalisation
    image_token_id: int
    # The tokens that end a row and the last row; None: they are not known.
    break_token_id: int | None
    end_token_id: int | None

    def image(self, pixels: Pixels) -> Picture:
        config, array = self.config, rgb(pixels)
        height, width = self._size(*array.shape[:2])
        rows, columns = height // config.side, width // config.side
        num_tokens = rows * (columns + 1)
        values = self.normalisation(resized(array, height, width, self.resample))
        return Picture(
            patches=config.patches(values),
            grid=(1, height // config.patch_size, width // config.patch_size),
            num_tokens=num_tokens,
            breaks=tuple(range(columns, num_tokens, columns + 1)),
            content_hash=content_hash(
                [array], "pixtral", config, self.largest, self.resample, self.normalisation
            ),
        )

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """Pixels of the resized picture: whole squares of patches that hold it, shrunk to `largest` if it is larger."""
        ratio = max(height / self.largest[0], width / self.largest[1])
        rows, columns = (
            math.floor(length / ratio) if ratio > 1 else length for length in (height, width)
        )
        if min(rows, columns) < 1:
            raise ValueError(
                f"a picture of {width}x{height} pixels, shrunk to at most {self.largest[1]}x{self.largest[0]}, would "
                f"be {columns}x{rows}; cut it into shorter ones"
            )
        side = self.config.side
        return -(-rows // side) * side, -(-columns // side) * side

    def video(self, frames: Sequence[Pixels], *, fps: float) -> Picture:
        raise ValueError("the model takes no videos; give some frames as pictures")

    def expand(self, token_ids: list[int], pictures: Sequence[Picture]) -> Expanded:
        """A placeholder becomes rows of them, each with its end; pictures that have all their tokens stay."""
        expanded, spans = expand_placeholders(
            token_ids, pictures, {"image": self.image_token_id}, self._tokens
        )
        return Expanded(
            token_ids=expanded, spans=spans, positions=None, next_position=len(expanded)
        )

    def _tokens(self, picture: Picture) -> list[int]:
        if self.break_token_id is None or self.end_token_id is None:
            raise ValueError(
                "the tokens that end the rows of a picture, [IMG_BREAK] and [IMG_END], are not known: use the "
                "tokenizer of the checkpoint, without skip_tokenizer_init"
            )
        tokens = [self.image_token_id] * picture.num_tokens
        for index in picture.breaks:
            tokens[index] = self.break_token_id
        tokens[-1] = self.end_token_id
        return tokens


def pixtral_processor(
    hf: PretrainedConfig,
    settings: ProcessorSettings,
    *,
    tokenizer: Any = None,
    options: Mapping[str, Any] | None = None,
) -> PixtralProcessor:
    """The processor of a Mistral3Config. Raises ValueError for options and settings that cannot be served."""
    if unknown := sorted(set(options or {}) - {_SIZE}):
        raise ValueError(
            f"options of the picture processor: {', '.join(unknown)} unknown; known is {_SIZE}"
        )
    told, config = settings.image, pixtral_vision_config(hf)
    off = [key for key in ("do_resize", "do_rescale", "do_normalize") if told.get(key) is False]
    if off:
        raise ValueError(
            f"the checkpoint's picture processor has {off[0]} off, which is not supported"
        )
    # The image processor has a patch_size too, which transformers does not heed.
    for name, size in (
        ("patch_size", config.patch_size),
        ("spatial_merge_size", config.merge_size),
    ):
        if settings.joint.get(name, size) != size:
            raise ValueError(
                f"{name} is {settings.joint[name]} in processor_config.json, and {size} in config.json; they must be "
                "equal"
            )
    image, row_break, end = _tokens_of(settings, tokenizer)
    if image is not None and image != hf.image_token_id:
        raise ValueError(
            f"the placeholder of pictures is token {image} of the tokenizer, and {hf.image_token_id} in config.json; "
            "they must be equal"
        )
    usual = told.get(_SIZE) or {"longest_edge": _LONGEST_EDGE}
    return PixtralProcessor(
        config=config,
        largest=_largest((options or {}).get(_SIZE, usual)),
        resample=told.get("resample", _BICUBIC),
        normalisation=Normalisation(
            scale=told.get("rescale_factor", 1 / 255),
            mean=tuple(told.get("image_mean") or _CLIP_MEAN),
            std=tuple(told.get("image_std") or _CLIP_STD),
        ),
        image_token_id=hf.image_token_id,
        break_token_id=row_break,
        end_token_id=end,
    )


def _tokens_of(settings: ProcessorSettings, tokenizer: Any) -> list[int | None]:
    """Placeholder, end of a row, end of a picture; None for those that the tokenizer does not have.

    Raises ValueError for names that are none.
    """
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    names = {
        "image_token": "[IMG]",
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
    }
    names |= {name: settings.joint[name] for name in names if name in settings.joint}
    for name, token in names.items():
        if not isinstance(token, str):
            raise ValueError(f"{name} is {token!r} in processor_config.json; it must be a string")
    return [vocabulary.get(token) for token in names.values()]


def _largest(size: Any) -> tuple[int, int]:
    """Height and width of the largest picture, of a `size` as transformers writes it. Raises ValueError."""
    given = size if isinstance(size, Mapping) else {}
    longest = given.get("longest_edge")
    sides = (given.get(name) if longest is None else longest for name in ("height", "width"))
    height, width = (side if type(side) is int and side > 0 else None for side in sides)
    if height is None or width is None:
        raise ValueError(
            f'{_SIZE} of the picture processor is {size!r}; give {{"longest_edge": ...}}, or {{"height": ..., '
            '"width": ...}, in whole pixels above 0'
        )
    return height, width


def pixtral_vision_config(hf: PretrainedConfig) -> PixtralVisionConfig:
    """The shape of the encoder of a Mistral3Config. Raises ValueError for what cannot be served."""
    vision, text = hf.vision_config, hf.get_text_config()
    if vision.model_type != "pixtral":
        raise ValueError(
            f"the vision tower is of model_type {vision.model_type!r}; supported is pixtral"
        )
    sizes = {name: getattr(vision, name) for name in _SIZES}
    sizes["spatial_merge_size"] = hf.spatial_merge_size
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(
                f"{name} of the vision tower is {size!r} in config.json; it must be a positive integer"
            )
    if vision.num_channels != 3:
        raise ValueError(f"the vision tower has {vision.num_channels} channels; supported are 3")
    if vision.hidden_size % (4 * vision.num_attention_heads):
        raise ValueError(
            f"the vision tower has {vision.num_attention_heads} heads for hidden_size {vision.hidden_size}; the size "
            "of a head must be a multiple of 4"
        )
    theta = vision.rope_parameters["rope_theta"]
    if not theta > 0:
        raise ValueError(f"rope_theta of the vision tower is {theta!r}; it must be above 0")
    return PixtralVisionConfig(
        depth=vision.num_hidden_layers,
        last_layer=_last_layer(hf.vision_feature_layer, vision.num_hidden_layers),
        hidden_size=vision.hidden_size,
        num_heads=vision.num_attention_heads,
        intermediate_size=vision.intermediate_size,
        out_hidden_size=text.hidden_size,
        activation=vision.hidden_act,
        projector_activation=hf.projector_hidden_act,
        projector_bias=bool(hf.multimodal_projector_bias),
        image_size=vision.image_size,
        patch_size=vision.patch_size,
        merge_size=hf.spatial_merge_size,
        rope_theta=theta,
        norm_eps=text.rms_norm_eps,
        initializer_range=vision.initializer_range,
    )


def _last_layer(feature_layer: Any, depth: int) -> int:
    """How many layers run: transformers counts states, of which the first goes into the layers. Raises ValueError."""
    layers = feature_layer if isinstance(feature_layer, list | tuple) else [feature_layer]
    number = sum(layers) + (depth + 1 if sum(layers) < 0 else 0)
    if len(layers) != 1 or not 0 <= number <= depth:
        raise ValueError(
            f"vision_feature_layer is {feature_layer!r}; supported is one of the {depth} layers' outputs, a number "
            f"from {-depth - 1} to {depth}"
        )
    return number
