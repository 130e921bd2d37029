"""Low-rank adapters for Hopper GPUs (sm_90a) in Mosaic GPU: reads only the slots that the batch uses.

Shrink and expand are one kernel, launched twice. A program keeps TOKENS rows of its left operand in shared memory. The
tiles of the weight in the slots that these rows use arrive by TMA, several in flight; wgmma multiplies all rows with
each of them, and a row takes the product with its own slot. So other rows and slots have no effect on its result, NaN
or not.

Shrinking has many inputs and few outputs. To occupy the GPU, a program takes a part of the inputs; XLA adds the parts
in order and rounds the sum. The number of parts depends only on the number of inputs. That is why there are two
launches, and not one as on a TPU: the programs of a launch have no order in which one could wait for another.

Letters: T tokens, E inputs, S slots, r rank, P projections, F outputs of all of them; L, N: columns of the left operand
and of the products of a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.hopper import unsupported_jax
from pallas_kernels.wgmma import load, product, tiled

TOKENS = 64  # of a tile: the rows of wgmma
ALIGNED = 8  # rows of a copy: those of a tile in shared memory
STAGES = 4  # tiles of weights in flight
# Inputs of a program that shrinks: the most that leave FEW_PARTS.
DEPTHS = (512, 256, 128, 64)
FEW_PARTS = 12
STAGE_VALUES = 32 * 256  # of a tile of A: 16 KB
COLUMNS = 64  # outputs of a program that expands
RANKS = 16  # the inputs of one wgmma
MOST_RANK = 256


class _Used(NamedTuple):
    """The slots of tokens, and which slots each tile of tokens uses."""

    slots: jax.Array  # int32[tiles, TOKENS], 0 for padding
    used: jax.Array  # int32[tiles, S]: from 0, those in use first
    count: jax.Array  # int32[tiles]: of those in use


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """How the products of a launch are divided into programs; column: the index of a program's columns.

    left: (part, column) -> the program's first column of the left operand. weight: (slot, part, column) -> for each
    weight whether the program reads it, then the first row and column of its tile.
    """

    num_parts: int
    num_outputs: int
    depth: int  # inputs of a program
    columns: int  # outputs of a program
    left: Callable[..., Any]
    weight: Callable[..., list[tuple[Any, Any, Any]]]


def unsupported_reason(
    a: jax.ShapeDtypeStruct | jax.Array,
    b: Sequence[jax.ShapeDtypeStruct | jax.Array],
    *,
    num_slots: int,
) -> str | None:
    """Why the kernel does not support such adapters, in one line; None if it does. Needs only shapes and dtypes."""
    if reason := unsupported_jax():
        return reason
    if a.dtype not in (jnp.bfloat16, jnp.float16):
        return f"adapters are {a.dtype}; the kernel reads bfloat16 and float16"
    rank = b[0].shape[1] // num_slots
    if rank % RANKS or rank > MOST_RANK:
        return f"rank {rank} is no multiple of {RANKS} up to {MOST_RANK}"
    if a.shape[1] % DEPTHS[-1]:
        return f"{a.shape[1]} inputs are no multiple of {DEPTHS[-1]}"
    if odd := [each.shape[0] for each in b if each.shape[0] % COLUMNS]:
        return f"{odd[0]} outputs are no multiple of {COLUMNS}"
    return None


def lora(
    y: Float32[Array, "T F"],
    x: Float[Array, "T E"],
    a: Float[Array, "S*P*r E"],
    b: Sequence[Float[Array, "_ S*r"]],
    slots: Int[Array, " T"],
    *,
    num_slots: int,
    interpret: Any = None,
) -> Float32[Array, "T F"]:
    """Same contract as `reference.lora`. Raises NotImplementedError with the reason.

    `interpret`: `plgpu.InterpretGPUParams` (jax >= 0.11.2), or None to compile.
    """
    if reason := unsupported_reason(a, b, num_slots=num_slots):
        raise NotImplementedError(reason)
    num_tokens = x.shape[0]
    rows = min(pl.cdiv(num_tokens, ALIGNED) * ALIGNED, TOKENS)
    padding = ((0, -num_tokens % rows), (0, 0))
    used = _used(slots, num_slots)
    x = jnp.pad(x.astype(a.dtype), padding)
    first, *rest = _multiply(_shrink(a, num_slots), x, [a], used, None, interpret)
    for part in rest:
        first = first + part
    inner = first.astype(a.dtype)
    launch = _expand(b, num_slots)
    return _multiply(launch, inner, b, used, jnp.pad(y, padding), interpret)[0, :num_tokens]


def _used(slots: jax.Array, num_slots: int) -> _Used:
    slots = jnp.pad(slots, (0, -slots.shape[0] % TOKENS)).reshape(-1, TOKENS)
    is_used = jax.nn.one_hot(slots - 1, num_slots, dtype=jnp.bool_).any(axis=1)
    used = jnp.argsort(~is_used, axis=1, stable=True).astype(jnp.int32)
    return _Used(slots, used, is_used.sum(axis=1, dtype=jnp.int32))


def _shrink(a: jax.Array, num_slots: int) -> _Launch:
    """x [T, E] times A -> [parts, T, P*r]."""
    num_rows, num_inputs = a.shape[0] // num_slots, a.shape[1]
    depths = [depth for depth in DEPTHS if num_inputs % depth == 0]
    depth = next((n for n in depths if n * FEW_PARTS <= num_inputs), depths[-1])
    columns = next(n for n in (32, 16) if num_rows % n == 0 and n * depth <= STAGE_VALUES)
    return _Launch(
        num_parts=num_inputs // depth,
        num_outputs=num_rows,
        depth=depth,
        columns=columns,
        left=lambda part, column: part * depth,
        weight=lambda slot, part, column: [
            (True, slot * num_rows + column * columns, part * depth)
        ],
    )


def _expand(b: Sequence[jax.Array], num_slots: int) -> _Launch:
    """A x [T, P*r] times B -> [1, T, F]."""
    rank = b[0].shape[1] // num_slots
    firsts = list(accumulate((each.shape[0] // COLUMNS for each in b), initial=0))

    def left(part, column):
        projection = jnp.int32(0)
        for first in firsts[1:-1]:
            projection += (column >= first).astype(jnp.int32)
        return projection * rank

    def weight(slot, part, column):
        return [
            ((first <= column) & (column < end), (column - first) * COLUMNS, slot * rank)
            for first, end in zip(firsts, firsts[1:], strict=False)
        ]

    return _Launch(
        num_parts=1,
        num_outputs=firsts[-1] * COLUMNS,
        depth=rank,
        columns=COLUMNS,
        left=left,
        weight=weight,
    )


def _multiply(
    launch: _Launch,
    left: jax.Array,
    weights: Sequence[jax.Array],
    used: _Used,
    y: jax.Array | None,
    interpret: Any,
) -> jax.Array:
    """float32[parts, T, N]: each row of left [T, L] times its slot's weight, plus y [T, N] unless that is None."""
    num_tiles, num_slots = used.used.shape
    rows, depth, width = left.shape[0] // num_tiles, launch.depth, launch.columns
    num_stages = min(STAGES, num_slots)

    def lora_multiply(left_ref, slots_ref, used_ref, count_ref, *refs):
        *refs, out_ref, left_smem, weight_smem, out_smem, begun, ready = refs
        weight_refs, y_refs = refs[: len(weights)], refs[len(weights) :]
        part, column, tile = (lax.axis_index(name) for name in ("part", "column", "tile"))
        tokens, columns = _slice(tile * rows, rows), _slice(column * width, width)
        inputs = _slice(launch.left(part, column), depth, RANKS)
        own, count = pl.ds(0, rows), count_ref[tile]

        def fetch(turn, stage):
            places = launch.weight(used_ref[tile, turn], part, column)
            for ref, (is_read, row, first) in zip(weight_refs, places, strict=True):
                source = ref.at[_slice(row, width), _slice(first, depth, RANKS)]
                to = weight_smem.at[stage], ready.at[stage]
                pl.when(is_read)(partial(plgpu.copy_gmem_to_smem, source, *to))

        def step(turn, acc):
            stage = lax.rem(turn, jnp.int32(num_stages))
            is_own = slots == used_ref[tile, turn] + 1
            plgpu.barrier_wait(ready.at[stage])
            found = product(left_smem, weight_smem.at[stage].transpose((1, 0)))
            plgpu.commit_smem()  # all threads have read the stage
            pl.when(turn + num_stages < count)(lambda: fetch(turn + num_stages, stage))
            return jnp.where(lax.broadcast_in_dim(is_own, found.shape, [0]), found, acc)

        # Rows of shared memory beyond these are uninitialized, and so are their products, which are not stored.
        plgpu.copy_gmem_to_smem(left_ref.at[tokens, inputs], left_smem.at[own], begun)
        for ref in y_refs:
            plgpu.copy_gmem_to_smem(ref.at[tokens, columns], out_smem.at[own], begun)
        for stage in range(num_stages):
            pl.when(stage < count)(partial(fetch, jnp.int32(stage), stage))
        slots = load(slots_ref.at[tile], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        plgpu.barrier_wait(begun)
        zeros = plgpu.layout_cast(jnp.zeros((TOKENS, width), jnp.float32), plgpu.Layout.WGMMA)
        out = lax.fori_loop(0, count, step, zeros)
        if y_refs:
            out = out + load(out_smem, layout=plgpu.Layout.WGMMA)
        out_smem[...] = out
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[own], out_ref.at[part, tokens, columns])
        plgpu.wait_smem_to_gmem(0)

    as_wgmma = partial(tiled, dtype=left.dtype, swizzle=_swizzle(depth * left.dtype.itemsize))
    more = () if y is None else (y,)
    kernel = plgpu.kernel(
        lora_multiply,
        out_type=jax.ShapeDtypeStruct(
            (launch.num_parts, left.shape[0], launch.num_outputs), jnp.float32
        ),
        # Programs with the same weights run at about the same time: the second reads them from L2.
        grid=(launch.num_parts, launch.num_outputs // width, num_tiles),
        grid_names=("part", "column", "tile"),
        scratch_types=(
            as_wgmma(TOKENS, depth),
            as_wgmma(num_stages, width, depth),
            plgpu.SMEM((TOKENS, width), jnp.float32),
            plgpu.Barrier(num_arrivals=1 + len(more)),
            plgpu.Barrier(num_barriers=num_stages),
        ),
        interpret=interpret,
    )
    return kernel(left, *used, *weights, *more)


def _slice(first: Any, size: int, multiple: int | None = None) -> Any:
    """`size` rows or columns from `first` on, a multiple of `multiple` (None: of `size`)."""
    return pl.ds(pl.multiple_of(first, multiple or size), size)


def _swizzle(num_bytes: int) -> int:
    """The widest whose tiles fit into rows of `num_bytes`."""
    return next(swizzle for swizzle in (128, 64, 32) if num_bytes % swizzle == 0)
