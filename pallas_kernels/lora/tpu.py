"""Low-rank adapters on TPUs (Mosaic): shrink and expand in one kernel, which reads only what the batch uses.

The columns of B, S r of them, are divided into units of LANES: several slots if the rank is small, a part of one if it
is large. A tile of tokens visits the units of its tokens' slots, in order; the grid is (tile of tokens, tile of
outputs, visited unit), and its last size is dynamic. A x of each visited unit is computed with the first tile of
outputs and stays in VMEM, with 0 in columns of other slots than the token's.

y is added here: XLA would add it to the result where it multiplies with the layer's weight, in smaller tiles.

A visited unit may include slots that no token uses. Their columns of A x are 0 already; those of B are masked to 0
bitwise, since NaN times 0 is NaN.

A row's sums are over its own units in order, and all other terms are 0: its result does not depend on the number of
rows, as long as the MXU's does not.

Letters: T tokens, E inputs, S slots, r rank, P projections, F outputs of all of them, U units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.mosaic_tpu import LANES, dot_transposed

SUBLANES = 16  # tokens per tile, and ranks in bfloat16, are multiples of it
VMEM_BYTES = 48 << 20  # of at least 64 MB
TILES_BYTES = 40 << 20  # all tiles together


@dataclass(frozen=True, kw_only=True)
class TileSizes:
    """What may depend on the kind of device; no result depends on it.

    tile_tokens: most tokens per tile, SUBLANES times a power of two; halved until it fits. tile_out: outputs per tile,
    a multiple of LANES.
    """

    tile_tokens: int = 512
    tile_out: int = 2048


DEFAULT = TileSizes()


@dataclass(frozen=True, kw_only=True)
class _Shapes:
    """The shapes of one call."""

    num_slots: int
    rank: int
    num_in: int
    num_outs: tuple[int, ...]
    itemsize: int
    tile_tokens: int
    tile_out: int

    @property
    def num_units(self) -> int:
        return self.num_slots * self.rank // LANES

    @property
    def tiles_bytes(self) -> int:
        """Bytes in VMEM: inputs and outputs are double-buffered."""
        parts, tokens = len(self.num_outs), self.tile_tokens
        moved = (tokens + parts * LANES) * self.num_in + parts * self.tile_out * LANES
        inner = self.num_units * parts * tokens * LANES
        floats = 2 * tokens * (2 * self.tile_out + LANES) + self.num_units * 8 * LANES
        return (2 * moved + inner) * self.itemsize + floats * 4

    @property
    def first_tiles(self) -> list[int]:
        """The index of each projection's first tile of outputs, and the number of tiles."""
        return list(accumulate((pl.cdiv(n, self.tile_out) for n in self.num_outs), initial=0))


def unsupported_reason(
    a: jax.ShapeDtypeStruct | jax.Array,
    b: Sequence[jax.ShapeDtypeStruct | jax.Array],
    *,
    num_slots: int,
) -> str | None:
    """Why the kernel does not support such adapters, in one line; None if it does. Needs only shapes and dtypes."""
    if a.dtype not in (jnp.bfloat16, jnp.float32):
        return f"adapters are {a.dtype}; the kernel reads bfloat16 and float32"
    rank = b[0].shape[1] // num_slots
    if rank % SUBLANES or (LANES % rank and rank % LANES):
        return f"rank {rank} is none of 16, 32, 64, and no multiple of {LANES}"
    if num_slots * rank % LANES:
        return f"{num_slots} slots of rank {rank} are no multiple of {LANES}"
    if a.shape[1] % LANES:
        return f"{a.shape[1]} inputs are no multiple of {LANES}"
    if odd := [each.shape[0] for each in b if each.shape[0] % LANES]:
        return f"{odd[0]} outputs are no multiple of {LANES}"
    if _fitting(0, a, b, num_slots, DEFAULT).tiles_bytes > TILES_BYTES:
        return f"{num_slots} slots of rank {rank} with {a.shape[1]} inputs do not fit into VMEM"
    return None


def lora(
    y: Float32[Array, "T F"],
    x: Float[Array, "T E"],
    a: Float[Array, "S*P*r E"],
    b: Sequence[Float[Array, "_ S*r"]],
    slots: Int[Array, " T"],
    *,
    num_slots: int,
    sizes: TileSizes = DEFAULT,
    interpret: pltpu.InterpretParams | bool = False,
) -> Float32[Array, "T F"]:
    """Same contract as `reference.lora`. Raises NotImplementedError with the reason."""
    if reason := unsupported_reason(a, b, num_slots=num_slots):
        raise NotImplementedError(reason)
    num_tokens = x.shape[0]
    shapes = _fitting(num_tokens, a, b, num_slots, sizes)
    missing = -num_tokens % shapes.tile_tokens
    y, x = (jnp.pad(each, ((0, missing), (0, 0))) for each in (y, x.astype(a.dtype)))
    return _call(y, x, a, b, jnp.pad(slots, (0, missing)), shapes, interpret)[:num_tokens]


def _fitting(num_tokens: int, a, b, num_slots: int, sizes: TileSizes) -> _Shapes:
    """The largest tiles of tokens that fit, all of one size; the smallest if none fits."""
    num_outs = tuple(each.shape[0] for each in b)
    num_tiles = pl.cdiv(max(num_outs), sizes.tile_out)
    tile_out = pl.cdiv(max(num_outs), num_tiles * LANES) * LANES
    shapes = _Shapes(
        num_slots=num_slots,
        rank=b[0].shape[1] // num_slots,
        num_in=a.shape[1],
        num_outs=num_outs,
        itemsize=a.dtype.itemsize,
        tile_tokens=0,
        tile_out=min(tile_out, *num_outs),
    )
    most = sizes.tile_tokens
    while True:
        num_tiles = pl.cdiv(max(num_tokens, 1), most)
        tokens = pl.cdiv(max(num_tokens, 1), num_tiles * SUBLANES) * SUBLANES
        shapes = replace(shapes, tile_tokens=tokens)
        if shapes.tiles_bytes <= TILES_BYTES or most <= SUBLANES:
            return shapes
        most //= 2


def _visited(slots: jax.Array, shapes: _Shapes) -> tuple[jax.Array, jax.Array]:
    """Units that each tile of tokens visits, int32[tiles, U], in order and padded with the last one; and their number,
    int32[tiles].
    """
    own = jax.nn.one_hot(slots - 1, shapes.num_slots, dtype=jnp.bool_)
    is_used = own.reshape(-1, shapes.tile_tokens, shapes.num_slots).any(axis=1)
    columns = jnp.repeat(is_used, shapes.rank, axis=1)
    is_visited = columns.reshape(is_used.shape[0], -1, LANES).any(axis=2)
    count = is_visited.sum(axis=1, dtype=jnp.int32)
    units = jnp.argsort(~is_visited, axis=1, stable=True).astype(jnp.int32)
    turn = jnp.arange(shapes.num_units, dtype=jnp.int32)
    turn = jnp.minimum(turn[None], jnp.maximum(count - 1, 0)[:, None])
    return jnp.take_along_axis(units, turn, axis=1), count


def _call(y, x, a, b, slots, shapes: _Shapes, interpret) -> jax.Array:
    """T must be a multiple of the tile."""
    tokens, parts = shapes.tile_tokens, len(b)
    units, count = _visited(slots, shapes)
    # Each projection's ranks are contiguous, within a slot or over several.
    a = a.reshape(shapes.num_slots, parts, shapes.rank, -1)
    together, pieces = max(1, LANES // shapes.rank), max(1, shapes.rank // LANES)

    def index_a(t, o, j, units, count):
        # Later tiles of outputs keep the current tile.
        unit = units[t, jnp.where(o == 0, j, shapes.num_units - 1)]
        return unit // pieces, 0, unit % pieces, 0

    outputs = pl.BlockSpec(
        (pl.Element(tokens), pl.Element(shapes.tile_out)), partial(_index_out, shapes)
    )
    return pl.pallas_call(
        partial(_body, shapes=shapes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(x.shape[0] // tokens, shapes.first_tiles[-1], jnp.maximum(count.max(), 1)),
            in_specs=[
                outputs,
                pl.BlockSpec((tokens, 1), lambda t, o, j, *_: (t, 0)),
                pl.BlockSpec((tokens, x.shape[1]), lambda t, o, j, *_: (t, 0)),
                pl.BlockSpec((together, parts, LANES // together, x.shape[1]), index_a),
                *(
                    pl.BlockSpec(
                        (pl.Element(shapes.tile_out), pl.Element(LANES)),
                        partial(_index_b, shapes, part),
                    )
                    for part in range(parts)
                ),
            ],
            out_specs=outputs,
            scratch_shapes=[
                pltpu.VMEM((shapes.num_units, parts, tokens, LANES), a.dtype),
                pltpu.VMEM((shapes.num_units, 1, LANES), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(y.shape, jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
        ),
        interpret=interpret,
        name="lora",
    )(units, count, y, slots[:, None], x, a, *b)


def _first_row(shapes: _Shapes, part: int, o):
    """The first row of a projection's B for tile o of all tiles: of its first tile before its turn, of its last after
    it. The last tile ends where B does, so it may repeat outputs of the previous one: the result must not alias y.
    """
    row = (o - shapes.first_tiles[part]) * shapes.tile_out
    return pl.multiple_of(jnp.clip(row, 0, shapes.num_outs[part] - shapes.tile_out), LANES)


def _index_b(shapes: _Shapes, part: int, t, o, j, units, count):
    """Outside the projection's turn: the tile that is loaded already or needed next, so that nothing is read twice."""
    begin, end = shapes.first_tiles[part : part + 2]
    turn = jnp.where(o < begin, 0, jnp.where(o < end, j, shapes.num_units - 1))
    column = pl.multiple_of(units[t, turn] * LANES, LANES)
    return _first_row(shapes, part, o), column


def _index_out(shapes: _Shapes, t, o, j, units, count):
    column, offset = jnp.int32(0), 0
    for part, num_out in enumerate(shapes.num_outs):
        is_turn = o >= shapes.first_tiles[part]
        column = jnp.where(is_turn, offset + _first_row(shapes, part, o), column)
        offset += num_out
    return pl.multiple_of(t * shapes.tile_tokens, SUBLANES), pl.multiple_of(column, LANES)


def _body(units, count, y_ref, slot_ref, x_ref, a_ref, *refs, shapes: _Shapes):
    """refs: B of each projection, the result, and scratch: A x of the visited units, and bit masks for the columns of
    slots that a token of the tile uses.
    """
    *b_refs, out_ref, inner_ref, keep_ref = refs
    first = shapes.first_tiles
    t, o, j = (pl.program_id(axis) for axis in range(3))
    is_visited = j < count[t]

    @pl.when(is_visited & (o == 0))
    def _shrink():
        column = units[t, j] * LANES + lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
        own = slot_ref[...] == column // shapes.rank + 1
        is_used = own.astype(jnp.float32).max(axis=0, keepdims=True) > 0.0
        keep_ref[j] = jnp.where(is_used, -1, 0)
        for part in range(len(b_refs)):
            inner = _product(x_ref[...], a_ref[:, part].reshape(LANES, -1))
            inner_ref[j, part] = jnp.where(own, inner, 0.0).astype(inner_ref.dtype)

    @pl.when(j == 0)
    def _begin():
        out_ref[...] = y_ref[...]

    for part, b_ref in enumerate(b_refs):

        @pl.when(is_visited & (first[part] <= o) & (o < first[part + 1]))
        def _expand(part=part, b_ref=b_ref):
            b = pltpu.bitcast(b_ref[...], jnp.int32) & keep_ref[j]
            out_ref[...] += _product(inner_ref[j, part], pltpu.bitcast(b, inner_ref.dtype))


def _product(x, weight):
    """x [T, E] times weight [F, E] transposed; float32 with the highest precision."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return dot_transposed(x, weight, precision=precision)
