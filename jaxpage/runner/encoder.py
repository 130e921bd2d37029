"""Pictures on the device: encoded into the picture cache, from which their embeddings replace tokens.

The picture cache is the array "pictures" of the request state, [rows, embedding size] in words; row 0 is the null row.
An encoder program writes the embeddings of one picture to the rows given in the plan; `forward` reads the rows of its
tokens. The engine knows which row belongs to which picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxpage.models.inputs import ForwardInput
from jaxpage.pictures.border import Picture, VisionConfig
from jaxpage.runner.calls import Call
from jaxpage.runner.kept_rows import words_of
from jaxpage.runner.layout import Field
from jaxpage.runner.spec import PictureSpec
from jaxpage.sampling.fields import RequestState

SMALLEST_PATCHES = 256
MOST_PATCHES = 65536  # of one picture: 3584 x 3584 pixels in patches of 14 x 14
CACHE_BYTES = 256 << 20  # default size of the picture cache


def encode_name(size: int) -> str:
    return f"encode P={size}"


def make_picture_spec(
    vision: VisionConfig,
    *,
    row_bytes: int,
    cache_bytes: int | None,
    max_model_len: int,
    max_num_batched_tokens: int,
    has_positions: bool,
) -> PictureSpec:
    """Encoder sizes in powers of two up to the largest that fits a prompt and the model, or its only size; and a cache.

    Without `cache_bytes` the cache has room for several steps, and at least for the largest picture.
    """
    ratio = vision.patches_per_token
    most = min(vision.most_patches or MOST_PATCHES, MOST_PATCHES, (max_model_len - 1) * ratio)
    sizes = [vision.num_patches or max(SMALLEST_PATCHES // ratio, 1) * ratio]
    while vision.num_patches is None and sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    num_rows = min(CACHE_BYTES // row_bytes, 4 * max(max_model_len, max_num_batched_tokens))
    num_rows = max(num_rows, sizes[-1] // ratio)
    if cache_bytes is not None:
        num_rows = cache_bytes // row_bytes
    return PictureSpec(
        vision=vision, sizes=tuple(sizes), num_rows=num_rows + 1, has_positions=has_positions
    )


def picture_fields(spec: PictureSpec | None, num_tokens: int) -> tuple[Field, ...]:
    """The fields of a `forward` that concern pictures."""
    if spec is None:
        return ()
    rows = Field("picture_rows", (num_tokens,))  # the null row for text tokens and padding
    # Filled: the position is the token's index plus the offset of its slot.
    positions = Field("positions", (3, num_tokens), fill=-1)
    return (rows, positions) if spec.has_positions else (rows,)


def pack_encode(picture: Picture, rows: np.ndarray, spec: PictureSpec) -> Call:
    """The call that encodes a picture into these rows of the cache."""
    size = spec.size_for(len(picture.patches))
    destinations = np.zeros(size // spec.vision.patches_per_token, np.int32)
    destinations[: len(rows)] = rows
    inputs = spec.vision.encoder_inputs(picture, size)
    return Call(encode_name(size), (destinations, *(inputs[name] for name in sorted(inputs))))


def pack_picture_tokens(
    views: Mapping[str, np.ndarray],
    row_starts: np.ndarray,
    picture_tokens: Sequence[tuple[int, int, np.ndarray]],
    positions: Sequence[tuple[int, np.ndarray]],
) -> None:
    """Fill the `picture_fields` of a step; `row_starts` has the first token of each row."""
    for row, offset, rows in picture_tokens:
        start = row_starts[row] + offset
        views["picture_rows"][start : start + len(rows)] = rows
    for row, axes in positions:
        start = row_starts[row]
        views["positions"][:, start : start + axes.shape[1]] = axes


def abstract_inputs(vision: VisionConfig, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The encoder's inputs for a padded size, by name."""
    side = max(int(vision.patches_per_token**0.5), 1)
    grid = (1, side, vision.patches_per_token // side)
    example = Picture(
        patches=np.zeros((vision.patches_per_token, vision.patch_values), np.float32),
        grid=grid,
        num_tokens=1,
        content_hash=bytes(32),
    )
    inputs = vision.encoder_inputs(example, size)
    return {
        name: jax.ShapeDtypeStruct(inputs[name].shape, inputs[name].dtype)
        for name in sorted(inputs)
    }


def encode_into(
    state: RequestState,
    model: Any,
    destinations: jax.Array,
    inputs: dict[str, jax.Array],
    dtype: DTypeLike,
) -> RequestState:
    """The state with the embeddings of a picture written to the rows `destinations` of the picture cache."""
    embeds = model.visual(**inputs).astype(dtype)
    words = lax.bitcast_convert_type(embeds, words_of(dtype))
    return state | {"pictures": state["pictures"].at[destinations].set(words)}


def last_keys(
    spec: PictureSpec | None,
    rows: Mapping[str, jax.Array],
    positions: jax.Array,
    token_rows: jax.Array,
) -> jax.Array | None:
    """int32[T]: the last token of its picture for a token of one, itself for others. None if all tokens are causal.

    rows: what went up for the step; positions, token_rows: int32[T]. A step has the rest of every picture that it has
    a token of, so the last is where the run of tokens with pictures ends; pictures do not touch.
    """
    if spec is None or not spec.vision.bidirectional or "picture_rows" not in rows:
        return None
    seen, index = rows["picture_rows"] > 0, jnp.arange(positions.shape[0], dtype=jnp.int32)
    goes_on = seen[:-1] & seen[1:] & (token_rows[:-1] == token_rows[1:])
    ends = jnp.where(jnp.append(goes_on, False), index.shape[0], index)
    return positions + lax.cummin(ends, reverse=True) - index


def with_pictures(
    inputs: ForwardInput, state: RequestState, rows: jax.Array, dtype: DTypeLike
) -> ForwardInput:
    """The same, with picture embeddings in place of the tokens that have a row of the cache."""
    found, seen = lax.bitcast_convert_type(state["pictures"][rows], dtype), rows > 0
    if inputs.embeds is None or inputs.is_embed is None:
        return replace(inputs, embeds=found, is_embed=seen)
    missing = found.shape[1] - inputs.embeds.shape[1]  # > 0 if pictures feed several layers
    others = jnp.pad(inputs.embeds, ((0, 0), (0, missing)))
    return replace(
        inputs,
        embeds=jnp.where(seen[:, None], found, others),
        is_embed=inputs.is_embed | seen,
    )
