"""The grouped product on TPUs (Mosaic).

(Gale et al., MegaBlocks, arXiv:2211.15841.) A grid of (tile of outputs, visit): a visit multiplies a tile of rows with
the expert of some of them, and stores those. Visits are in the order of rows, and a tile of weights has all inputs: so
it is read once for all tiles of its expert, and a tile of rows once for all experts in it. With few rows in a tile, few
are multiplied in vain.

Quantized weights are read as they are stored, and multiplied by `quant_matmul/tpu_tile.py`. Whether a tile has few rows
or many depends on what shares the batch, so what is scaled depends on the groups alone: the sums of groups of LANES
inputs, and the weights of smaller ones, whose sums would be too many.

JAX's megablox, the origin of this, divides inputs over the grid as well: each visit reads its weights again.

Letters: T rows, G groups (experts), E inputs, F outputs, V visits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Real

from pallas_kernels.mosaic_tpu import LANES, dot_transposed, in_chunks
from pallas_kernels.quant_matmul.quantized import QuantizedWeight, not_for_rounded_rows, padded
from pallas_kernels.quant_matmul.tpu_tile import (
    Operands,
    Scratch,
    product,
    scratch_of,
    unsupported_weight,
)

CHUNK = 8192  # bytes of inputs multiplied at once. Sums are divided there, so it is never tuned
X_BYTES = 8 << 20  # per tile of rows, at most
TILE_BYTES = 8 << 20  # per tile of weights, at most; two of both and of the result: at most 44 MB
VMEM_BYTES = 48 << 20  # of at least 64 MB


@dataclass(frozen=True, kw_only=True)
class TileSizes:
    """What may depend on the kind of device (`tune.py`); no result depends on it.

    least_tile, most_tile: rows of a tile, powers of two, at least 32. Between them a tile has as many as a group has on
    average. outputs: most outputs in a tile of weights.
    """

    least_tile: int = 32
    most_tile: int = 256
    outputs: int = 1024


DEFAULT = TileSizes()


def unsupported_reason(x: jax.Array, weights: jax.Array | QuantizedWeight) -> str | None:
    """Why the kernel does not support these arguments, in one line; None if it does. Needs only shapes and dtypes."""
    if isinstance(weights, QuantizedWeight):
        is_rounded = x.dtype == jnp.int8
        return not_for_rounded_rows(weights) if is_rounded else unsupported_weight(x.dtype, weights)
    if x.dtype not in (jnp.bfloat16, jnp.float32) or weights.dtype != x.dtype:
        return f"x is {x.dtype} and the weights {weights.dtype}; they must be bfloat16 or float32, and the same"
    return None


def grouped_matmul(
    x: Real[Array, "T E"],
    weights: Real[Array, "G F E"] | QuantizedWeight,
    group_sizes: Int[Array, " G"],
    *,
    row_scale: Float[Array, "T 1"] | None = None,
    sizes: TileSizes = DEFAULT,
    interpret: pltpu.InterpretParams | bool = False,
) -> Float[Array, "T F"]:
    """`reference.grouped_matmul`; sums in float32, or of integers in int32. Products of float32 have the precision of
    `jax.default_matmul_precision`. Raises NotImplementedError with `unsupported_reason`'s reason.
    """
    if reason := unsupported_reason(x, weights):
        raise NotImplementedError(reason)
    num_rows = x.shape[0]
    if isinstance(weights, QuantizedWeight):
        x = padded(x, weights)
    tile, num_columns = tiles_of(x, weights, sizes)
    padding = ((0, -num_rows % tile), (0, 0))
    x, group_size, by_input = jnp.pad(x, padding), None, _lies_by_input(x, weights)
    operands = Operands(x=x, data=weights, scale=None)
    if isinstance(weights, QuantizedWeight):
        num_groups, num_outputs, _ = weights.shape
        group_size = weights.group_size if weights.has_groups else None
        operands = Operands(
            x=x,
            data=weights.data,
            scale=weights.scale.reshape(num_groups, -1, num_outputs),
            row_scale=None if row_scale is None else jnp.pad(row_scale, padding),
            zero=weights.zero,
        )
    if by_input:
        operands = operands._replace(data=jnp.swapaxes(operands.data, 1, 2))
    visits, num_visits = _visits(group_sizes, x.shape[0] // tile, tile)
    body = partial(_body, group_size=group_size, by_input=by_input)
    tiles = tile, num_columns
    return _call(body, operands, visits, num_visits, tiles, by_input, interpret)[:num_rows]


def _lies_by_input(x: jax.Array, weights: jax.Array | QuantizedWeight) -> bool:
    """Whether XLA lays weights out by their inputs, with outputs in lanes, because inputs would have to be padded.

    The kernel then reads them as [G, E, F]. As [G, F, E] all of them would be copied first, in each step.
    """
    _, num_outputs, num_inputs = weights.shape
    is_multiplied_as_stored = not isinstance(weights, QuantizedWeight) or x.dtype == jnp.int8
    return is_multiplied_as_stored and num_outputs % LANES == 0 and num_inputs % LANES > 0


def tiles_of(
    x: jax.Array, weights: jax.Array | QuantizedWeight, sizes: TileSizes
) -> tuple[int, int]:
    """Rows and outputs of a tile."""
    num_rows, (num_groups, num_outputs, num_inputs) = x.shape[0], weights.shape
    tile = sizes.least_tile
    while tile < sizes.most_tile and tile * num_groups < num_rows:
        tile *= 2
    while tile > 32 and tile * num_inputs * x.dtype.itemsize > X_BYTES:
        tile //= 2
    data = weights.data if isinstance(weights, QuantizedWeight) else weights
    fitting = TILE_BYTES // (data.shape[2] * data.dtype.itemsize)
    most = max(LANES, min(sizes.outputs, fitting) // LANES * LANES)
    num_tiles = -(-num_outputs // most)
    return tile, -(-num_outputs // (num_tiles * LANES)) * LANES


class _Visits(NamedTuple):
    """int32[V] each, in a kernel refs. Every tile has one or more, also those without a group."""

    group: jax.Array
    tile: jax.Array
    first: jax.Array  # the rows of the tile that belong to the group, from here
    end: jax.Array  # to before here; none: not more than `first`


def _visits(group_sizes: jax.Array, num_tiles: int, tile: int) -> tuple[_Visits, jax.Array]:
    """And how many there are. Masked sums, because XLA fuses them; each gather or cumsum would be an operation of its
    own, which takes longer than such arithmetic.
    """
    num_groups = group_sizes.shape[0]
    groups = jnp.arange(num_groups, dtype=jnp.int32)
    index = jnp.arange(num_tiles + num_groups - 1, dtype=jnp.int32)

    def up_to(values):
        return jnp.where(groups[None] <= groups[:, None], values[None], 0).sum(1, dtype=jnp.int32)

    ends = up_to(group_sizes)
    firsts = ends - group_sizes
    counts = jnp.where(group_sizes > 0, pl.cdiv(ends, tile) - firsts // tile, 0)
    visit_ends = up_to(counts)
    of_group = (index[:, None] >= (visit_ends - counts)[None]) & (index[:, None] < visit_ends[None])

    def of_visit(values):
        return jnp.where(of_group, values[None], 0).sum(1, dtype=jnp.int32)

    # After the last row come tiles without a group: for these no other weights are read.
    rest = index - counts.sum(dtype=jnp.int32)
    num_used = pl.cdiv(group_sizes.sum(dtype=jnp.int32), tile)
    last = jnp.where(group_sizes > 0, groups, 0).max()
    at = of_visit(firsts // tile - (visit_ends - counts)) + index
    at = jnp.minimum(jnp.where(rest < 0, at, num_used + rest), num_tiles - 1)
    visits = _Visits(
        group=jnp.where(rest < 0, of_visit(groups), last),
        tile=at,
        first=of_visit(firsts) - at * tile,
        end=of_visit(ends) - at * tile,
    )
    return visits, counts.sum(dtype=jnp.int32) + num_tiles - num_used


def _call(
    body: Callable[..., None],
    operands: Operands,
    visits: _Visits,
    num_visits,
    tile: tuple[int, int],
    by_input: bool,
    interpret,
) -> jax.Array:
    """operands: the number of rows is a multiple of the tile's. by_input: weights are [G, E, F]."""
    (num_rows, num_columns), num_outputs = tile, operands.data.shape[2 if by_input else 1]

    def of_rows(array):
        if array is not None:
            return pl.BlockSpec(
                (num_rows, array.shape[1]), lambda o, v, visits: (visits.tile[v], 0)
            )

    def of_outputs(array):
        if array is not None:
            return pl.BlockSpec(
                (None, array.shape[1], num_columns), lambda o, v, visits: (visits.group[v], 0, o)
            )

    weights = pl.BlockSpec(
        (None, num_columns, operands.data.shape[2]), lambda o, v, visits: (visits.group[v], o, 0)
    )
    specs = Operands(
        x=of_rows(operands.x),
        data=of_outputs(operands.data) if by_input else weights,
        scale=of_outputs(operands.scale),
        row_scale=of_rows(operands.row_scale),
        zero=of_outputs(operands.zero),
    )
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(num_outputs, num_columns), num_visits),
            in_specs=(specs,),
            out_specs=pl.BlockSpec(tile, lambda o, v, visits: (visits.tile[v], o)),
            scratch_shapes=[scratch_of(operands, tile)],
        ),
        out_shape=jax.ShapeDtypeStruct((operands.x.shape[0], num_outputs), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="grouped_matmul",
    )(visits, operands)


def _body(
    visits: _Visits,
    refs: Operands,
    out_ref,
    scratch: Scratch,
    *,
    group_size: int | None,
    by_input: bool,
) -> None:
    """group_size: None without groups."""
    visit = pl.program_id(1)
    first, end = visits.first[visit], visits.end[visit]

    @pl.when((visit == 0) | (visits.tile[visit] != visits.tile[jnp.maximum(visit - 1, 0)]))
    def _():
        out_ref[...] = jnp.zeros(out_ref.shape, out_ref.dtype)

    @pl.when(first < end)
    def _():
        if refs.scale is None:
            out = _product(refs, scratch.sums, by_input)
        elif by_input:
            out = _product(refs, scratch.sums, by_input).astype(jnp.float32)
            out = out * refs.row_scale[...] * refs.scale[...]
        else:
            scales = group_size is not None and group_size < LANES
            out = product(refs, scratch, group_size=group_size, scales=scales)
        row = lax.broadcasted_iota(jnp.int32, out_ref.shape, 0)
        own = (row >= first) & (row < end)
        out_ref[...] = jnp.where(own, out, out_ref[...])


def _product(refs: Operands, sums, by_input: bool) -> jax.Array:
    """Of weights that are multiplied as they are stored, over chunks of inputs, in order."""
    sums[...] = jnp.zeros(sums.shape, sums.dtype)

    def add(chunk):
        x = refs.x[:, chunk]
        if by_input:
            sums[...] += jnp.dot(x, refs.data[chunk], preferred_element_type=sums.dtype)
        else:
            sums[...] += dot_transposed(x, refs.data[:, chunk], sums.dtype)

    in_chunks(refs.x.shape[1], CHUNK // refs.x.dtype.itemsize, add)
    return sums[...]
