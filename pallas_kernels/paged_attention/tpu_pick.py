"""A row's queries out of a tile of tokens, and its results into one: of rows with one query. Letters as in `tpu.py`.

In HBM a token is a row of lanes, one head after the other; so XLA needs no copy, and one DMA brings a tile. A matmul
needs the heads as rows. Registers of 4 bytes can be loaded with a stride: with the heads of a tile one below the other,
those of a token are every `tile_tokens`-th row. Knows nothing of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu_shape import LANES, Shape
from pallas_kernels.paged_attention.tpu_write import repeat

UNROLLED = 4  # heads, of which a loop is


class Picked(NamedTuple):
    """VMEM of a tile of tokens, and of the row that is computed."""

    # float32[P * W / LANES, heads * tile_tokens, LANES]: of each head its tokens. Those of the last stack may be fewer
    # than its rows, and what lies beyond is anything.
    queries: Any
    out: Any  # likewise
    own: Any  # [K', P, A, W], the row's queries


def scratch_shapes(shape: Shape) -> Picked:
    of_tokens = pltpu.VMEM(shape.picked_shape, jnp.float32)
    own = (shape.num_stacks, shape.num_planes, shape.rows, shape.read_lanes)
    return Picked(of_tokens, of_tokens, pltpu.VMEM(own, shape.dtype))


def spread(shape: Shape, picked: Picked, tile: Any) -> None:
    """A tile of queries, [tile_tokens, H * D], in 4 bytes and head by head."""

    def act(register, tokens, lanes):
        picked.queries[register, tokens] = tile[:, lanes].astype(jnp.float32)

    _for_each_part(shape, act)


def collect(shape: Shape, picked: Picked, tile: Any) -> None:
    """The inverse, of results."""

    def act(register, tokens, lanes):
        tile[:, lanes] = picked.out[register, tokens].astype(shape.dtype)

    _for_each_part(shape, act)


def pick(shape: Shape, picked: Picked, token) -> None:
    """The queries of a token, counted from the tile's first."""
    for stack in range(shape.num_stacks):
        heads = _heads_of(shape, stack, token, shape.rows)
        for plane in range(shape.num_planes):
            parts = [picked.queries[i, heads] for i in _registers(shape, plane)]
            picked.own[stack, plane] = jnp.concatenate(parts, axis=1).astype(shape.dtype)


def put(shape: Shape, picked: Picked, token, stack, plane: int, out: jax.Array) -> None:
    """The results of a stack for a token, float32[A, W]."""
    num_heads = shape.stack * shape.group
    heads = _heads_of(shape, stack, token, num_heads)
    for i, register in enumerate(_registers(shape, plane)):
        picked.out[register, heads] = out[:num_heads, i * LANES : (i + 1) * LANES]


def _for_each_part(shape: Shape, act: Callable) -> None:
    """act(number among a head's registers, the head's tokens there, lanes in a tile)"""
    count, tokens = shape.num_planes * shape.read_lanes // LANES, shape.tile_tokens
    unrolled = math.gcd(shape.num_heads, UNROLLED)

    def some(index):
        for i in range(unrolled):
            head = index * unrolled + i
            own = pl.ds(pl.multiple_of(head * tokens, tokens), tokens)
            for register in range(count):
                lane = pl.multiple_of((head * count + register) * LANES, LANES)
                act(register, own, pl.ds(lane, LANES))

    repeat(0, shape.num_heads // unrolled, some)


def _heads_of(shape: Shape, stack, token, size: int) -> Any:
    """The rows of a token in `size` heads, from a stack's first."""
    first = stack * (shape.stack * shape.group * shape.tile_tokens) + token
    return pl.ds(first, size, stride=shape.tile_tokens)


def _registers(shape: Shape, plane: int) -> range:
    count = shape.read_lanes // LANES
    return range(plane * count, (plane + 1) * count)
