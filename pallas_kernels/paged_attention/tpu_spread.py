"""The heads of a tile of tokens, one below the other, and their results side by side again. Letters as in `tpu.py`.

In HBM a token is a row of lanes, one head after the other; so XLA needs no copy, and one DMA brings a tile. A matmul
needs the heads as rows. Where two heads fill a register, each is put into the lanes of its keys. Where every row has
one query, it is picked out of the tile: registers of 4 bytes can be loaded with a stride, and of the heads one below
the other those of a token are every `tile_tokens`-th row. Knows nothing of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu_shape import LANES, Shape
from pallas_kernels.paged_attention.tpu_write import repeat

# Registers of heads in a turn of the loop, at most: each turn waits for its first rotation. With one query per row it
# matters less, since heads are spread once for several rows.
UNROLLED, UNROLLED_OF_PROMPTS = 4, 8


class Spread(NamedTuple):
    """VMEM of a tile of tokens, and of the row that is computed."""

    # [K', P, A, W]; if `picks_rows` float32[P * W / LANES, heads * tile_tokens, LANES]: of each head its tokens. Those
    # of the last stack may be fewer than its rows, and what lies beyond is anything.
    queries: Any
    out: Any  # likewise
    own: Any = None  # [K', P, A, W], the row's queries, if `picks_rows`


def scratch_shapes(shape: Shape) -> Spread:
    of_heads = (shape.num_stacks, shape.num_planes, shape.rows, shape.read_lanes)
    of_heads = pltpu.VMEM(of_heads, shape.dtype)
    if not shape.picks_rows:
        return Spread(of_heads, of_heads)
    of_tokens = pltpu.VMEM(shape.picked_shape, jnp.float32)
    return Spread(of_tokens, of_tokens, of_heads)


def spread_queries(shape: Shape, spread: Spread, tile: Any) -> None:
    """A tile of queries, [tile_tokens, H * D], head by head; half a register in the lanes of keys."""

    def act(lanes, places):
        x = tile[:, lanes].astype(jnp.float32)
        if len(places) == 1:
            spread.queries[places[0]] = x
            return
        for place, half in zip(places, (x, pltpu.roll(x, LANES // 2, 1)), strict=True):
            own = jnp.where(_in_first_half(x), half, 0.0)
            spread.queries[place] = own.astype(spread.queries.dtype)

    _for_each_register(shape, act)


def collect_results(shape: Shape, spread: Spread, tile: Any) -> None:
    """The inverse, of results, which lie in the lanes of values."""

    def act(lanes, places):
        x, *other = (spread.out[place].astype(jnp.float32) for place in places)
        if other:
            x = jnp.where(_in_first_half(x), pltpu.roll(x, LANES // 2, 1), other[0])
        tile[:, lanes] = x.astype(shape.dtype)

    _for_each_register(shape, act)


def pick(shape: Shape, spread: Spread, token) -> None:
    """The queries of a token, counted from the tile's first."""
    for stack in range(shape.num_stacks):
        heads = _heads_of(shape, stack, token, shape.rows)
        for plane in range(shape.num_planes):
            parts = [spread.queries[i, heads] for i in _registers(shape, plane)]
            spread.own[stack, plane] = jnp.concatenate(parts, axis=1).astype(shape.dtype)


def put(shape: Shape, spread: Spread, token, stack, plane: int, out: jax.Array) -> None:
    """The results of a stack for a token, float32[A, W]."""
    num_heads = shape.stack * shape.group
    heads = _heads_of(shape, stack, token, num_heads)
    for i, register in enumerate(_registers(shape, plane)):
        spread.out[register, heads] = out[:num_heads, i * LANES : (i + 1) * LANES]


def _for_each_register(shape: Shape, act: Callable) -> None:
    """act(lanes of a tile, places of what is in them): a place is where a register of a head has its tokens."""
    count, tokens = shape.num_planes * shape.read_lanes // LANES, shape.tile_tokens
    in_register = max(1, LANES // shape.head_lanes)
    num_heads = max(1, in_register // shape.num_planes)  # whose registers are whole
    places = [(head, register) for head in range(num_heads) for register in range(count)]
    num_registers = len(places) // in_register
    num_steps = shape.num_heads // num_heads
    most = UNROLLED if shape.picks_rows else UNROLLED_OF_PROMPTS
    unrolled = max(n for n in range(1, most + 1) if num_steps % n == 0)

    def place(head, register):
        if shape.picks_rows:
            return register, pl.ds(pl.multiple_of(head * tokens, tokens), tokens)
        first = pl.multiple_of(lax.rem(head, shape.group) * tokens, tokens)
        return lax.div(head, shape.group), register, pl.ds(first, tokens)

    def some(index):
        for i in range(unrolled):
            step = index * unrolled + i
            for number in range(num_registers):
                lane = pl.multiple_of((step * num_registers + number) * LANES, LANES)
                mine = places[number * in_register : (number + 1) * in_register]
                heads = [place(step * num_heads + head, register) for head, register in mine]
                act(pl.ds(lane, LANES), heads)

    repeat(0, num_steps // unrolled, some)


def _in_first_half(x: jax.Array) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, x.shape, 1) < LANES // 2


def _heads_of(shape: Shape, stack, token, size: int) -> Any:
    """The rows of a token in `size` heads, from a stack's first."""
    first = stack * (shape.stack * shape.group * shape.tile_tokens) + token
    return pl.ds(first, size, stride=shape.tile_tokens)


def _registers(shape: Shape, plane: int) -> range:
    count = shape.read_lanes // LANES
    return range(plane * count, (plane + 1) * count)
