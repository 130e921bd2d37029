"""The heads of a tile of tokens, one below the other, and their results side by side again. Letters as in `tpu.py`.

In HBM a token is a row of lanes, one head after the other; so XLA needs no copy, and one DMA brings a tile. A matmul
needs the heads as rows. Where heads are no whole registers, each is put into the lanes of its keys, among zeros. Where
every row has one query, it is picked out of the tile: registers of 4 bytes can be loaded with a stride, and of the
heads one below the other those of a token are every `tile_tokens`-th row. Knows nothing of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic_tpu import LANES, repeat
from pallas_kernels.paged_attention.tpu_lanes import gathered, loader, moves
from pallas_kernels.paged_attention.tpu_shape import Shape

# Registers of a tile in an iteration, unless a stretch of heads has more: each iteration waits for its first rotation.
# With one query per row it matters less, since heads are spread once for several rows.
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
    """A tile of queries, [tile_tokens, H * D], head by head, in the lanes of keys."""

    def act(lanes_of, parts):
        for part in parts:
            wanted = moves(part.lane, part.of_keys, shape.head_lanes)
            load = loader(lambda source: tile[:, lanes_of(source)])
            for register in range(shape.read_lanes // LANES):
                x = gathered(wanted, register, load, 0.0)
                x = jnp.broadcast_to(x, (shape.tile_tokens, LANES))
                spread.queries[part.place(register)] = x.astype(spread.queries.dtype)

    _for_each_stretch(shape, act)


def collect_results(shape: Shape, spread: Spread, tile: Any) -> None:
    """The inverse, of results, which lie in the lanes of values."""

    def act(lanes_of, parts):
        wanted = [moves(part.of_values, part.lane, shape.head_lanes) for part in parts]
        loads = [loader(lambda i, p=part: spread.out[p.place(i)]) for part in parts]
        for register in range((parts[-1].lane + shape.head_lanes) // LANES):
            x: Any = None
            for each, load in zip(wanted, loads, strict=True):
                x = gathered(each, register, load, x)
            tile[:, lanes_of(register)] = x.astype(shape.dtype)

    _for_each_stretch(shape, act)


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


class _Part(NamedTuple):
    """A head, or a plane of one: `head_lanes` lanes of a tile."""

    lane: int  # where it begins, counted from the stretch's first register
    of_keys: int  # and among the lanes that are read of its keys,
    of_values: int  # and of its values
    # Where its tokens are in the arrays of `Spread`, by register of those lanes.
    place: Callable[[int], tuple]


def _for_each_stretch(shape: Shape, act: Callable) -> None:
    """Calls act(lanes of a tile by register, parts) for each stretch of heads: the shortest that fills whole registers,
    and after which the lanes of keys repeat.
    """
    planes, tokens, lanes = shape.num_planes, shape.tile_tokens, shape.head_lanes
    of_period = 1 if shape.period == 1 else shape.period * shape.group
    num_parts = math.lcm(LANES // math.gcd(lanes, LANES), of_period * planes)
    num_stretches, num_registers = shape.num_heads * planes // num_parts, num_parts * lanes // LANES
    most = (UNROLLED if shape.picks_rows else UNROLLED_OF_PROMPTS) // num_registers
    unrolled = max(n for n in range(1, max(1, most) + 1) if num_stretches % n == 0)

    def part(stretch, number: int) -> _Part:
        in_stretch, plane = divmod(number, planes)
        kv_head = in_stretch // shape.group
        head = stretch * (num_parts // planes) + in_stretch

        def place(register: int) -> tuple:
            if shape.picks_rows:
                rows = pl.ds(pl.multiple_of(head * tokens, tokens), tokens)
                return _registers(shape, plane)[register], rows
            first = pl.multiple_of(lax.rem(head, shape.group) * tokens, tokens)
            some = pl.ds(register * LANES, LANES)
            return lax.div(head, shape.group), plane, pl.ds(first, tokens), some

        keys, values = (shape.lanes(kv_head, value)[1] for value in (False, True))
        return _Part(number * lanes, keys, values, place)

    def some(index):
        for i in range(unrolled):
            stretch = index * unrolled + i

            def lanes_of(register: int, stretch=stretch):
                first = stretch * num_registers + register
                return pl.ds(pl.multiple_of(first * LANES, LANES), LANES)

            act(lanes_of, [part(stretch, number) for number in range(num_parts)])

    repeat(0, num_stretches // unrolled, some)


def _heads_of(shape: Shape, stack, token, size: int) -> Any:
    """The rows of a token in `size` heads, from a stack's first."""
    first = stack * (shape.stack * shape.group * shape.tile_tokens) + token
    return pl.ds(first, size, stride=shape.tile_tokens)


def _registers(shape: Shape, plane: int) -> range:
    count = shape.read_lanes // LANES
    return range(plane * count, (plane + 1) * count)
