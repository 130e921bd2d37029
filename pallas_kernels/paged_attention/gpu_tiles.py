"""What the Hopper kernels of paged attention share: tiles of a pool in shared memory, the online softmax.

Knows copies, layouts and formats of the pool; must not know who reads which keys for which queries: that is
`gpu_decode.py` and `gpu_prefill.py`. Letters as in `gpu.py`.

Scores are kept in units of log2, and their maximum begins at a finite number, so that no infinity is subtracted from
another. (Online softmax: Milakov and Gimelshein, arXiv:1805.02867.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_write.latents import LatentPool
from pallas_kernels.kv_write.parts import PoolPart
from pallas_kernels.kv_write.quantized import FLOATS, LEVELS, QuantizedPool
from pallas_kernels.kv_write.storage import Pool
from pallas_kernels.paged_attention.gpu_layout import TileSizes
from pallas_kernels.wgmma import filled, load, piece, swizzle_of, tiled

MASKED = -1e30  # where the running maximum begins
LOG2E = math.log2(math.e)
BY_HEAD = plgpu.Layout.WGMMA.reduce(0)  # a value for each column


@dataclass(frozen=True)
class Options:
    """What a call of `gpu.paged_attention` says besides its arrays."""

    scale: float
    window: int | None
    soft_cap: float | None
    sinks: jax.Array | None  # float32[H], in units of log2
    sizes: TileSizes
    interpret: Any


def scores(s, visible, options: Options):
    """Scores from raw products, -inf where not `visible` (None: all are), and what turns them into units of log2."""
    scale, cap, unit = options.scale, options.soft_cap, options.scale * LOG2E
    if cap is not None:  # tanh by way of exp2: the hardware's tanh is good to 11 bits only
        e = jnp.exp2(s * (2 * LOG2E * scale / cap))
        s, unit = (cap * LOG2E) * (1.0 - 2.0 / (1.0 + e)), 1.0
    return (s if visible is None else jnp.where(visible, s, -jnp.inf)), unit


def weights(s, unit: float, m, axis: int):
    """The new maximum over the keys, which lie along `axis`, the factor for the sums so far, and exp(s - maximum).

    `unit` is multiplied once for a row's maximum, and for each score by the instruction that subtracts it.
    """
    m_new = jnp.maximum(m, s.max(axis=axis) * unit)
    return (
        m_new,
        jnp.exp2(m - m_new),
        jnp.exp2(s * unit - lax.broadcast_in_dim(m_new, s.shape, [1 - axis])),
    )


class Sums(NamedTuple):
    """Over some keys of a query for each column, in registers."""

    accs: tuple  # float32[rows, columns] each: weights times V, not divided by their total
    m: Any  # float32[columns]: the maximum score, in units of log2
    total: Any  # float32[columns]: of the weights


def no_sums(heights: Sequence[int], columns: int) -> Sums:
    """Over no key. heights: rows of each of `accs`."""
    return Sums(
        accs=tuple(filled((rows, columns), 0.0, plgpu.Layout.WGMMA) for rows in heights),
        m=filled((columns,), MASKED, BY_HEAD),
        total=filled((columns,), 0.0, BY_HEAD),
    )


def added(one: Sums, other: Sums) -> Sums:
    """Over the keys of both. Exactly `other` if `one` is over none.

    Kernels that add up the same parts in the same order get the same bits.
    """
    m = jnp.maximum(one.m, other.m)
    old, new = jnp.exp2(one.m - m), jnp.exp2(other.m - m)
    accs = tuple(
        a * lax.broadcast_in_dim(old, a.shape, [1]) + b * lax.broadcast_in_dim(new, b.shape, [1])
        for a, b in zip(one.accs, other.accs, strict=True)
    )
    return Sums(accs, m, one.total * old + other.total * new)


def normalised(acc, m, total, sink, axis: int):
    """acc / total, which includes the logits `sink`, if any; zeros where nothing was visible. m lies along `axis`."""
    if sink is not None:
        top = jnp.maximum(m, sink)
        rescale = jnp.exp2(m - top)
        acc = acc * lax.broadcast_in_dim(rescale, acc.shape, [axis])
        total = total * rescale + jnp.exp2(sink - top)
    share = 1.0 / jnp.where(total > 0.0, total, 1.0)
    return acc * lax.broadcast_in_dim(share, acc.shape, [axis])


def without_zeros(acc, zeros, boost: float, axis: int):
    """Sums of weights times V from those of a pool with scales: times its integers, and times its zeros."""
    acc = acc - lax.broadcast_in_dim(zeros, acc.shape, [axis])
    return acc if boost == 1.0 else acc * (1.0 / boost)


class PoolArrays(NamedTuple):
    """A pool as the kernels read it, or in a kernel refs: a row for each slot, K and V of a head side by side."""

    data: Any  # [N * S, 2 * K * width], of latents [N * S, width]; in the dtype of q, int8 or fp8
    scale_zero: Any = None  # [N * S, 4 * K], bfloat16 or float16: only of int8 and int4


class Stages(NamedTuple):
    """Tiles of K, or of V, in shared memory: types, or in a kernel refs."""

    data: Any  # [stages, tile, width], in wgmma's layout
    scale_zero: Any  # [stages, tile, 8], of K and V of two heads; None like the pool's
    ready: Any  # a barrier per stage: the tile has arrived


def stage_of(i, num_stages: int):
    """Where tile i stands."""
    return hidden_zero(i) if num_stages == 1 else lax.rem(i, jnp.int32(num_stages))


def hidden_zero(i):
    """0 for the number of a tile, which the compiler does not know.

    Where heads are wide it would compute the addresses of all products before a loop over tiles, and there are more
    than registers.
    """
    return jnp.minimum(i, 0)


@dataclass(frozen=True)
class Source:
    """The pool of a call."""

    arrays: PoolArrays
    format: str | None
    block_size: int
    width: int  # columns of a head's K: D, or D / 2 bytes of int4
    value_dim: int | None = None  # of latents: the first columns of K that are V
    before: int = 0  # heads of such a width before the layer's own, K and V counted apart

    @classmethod
    def of(cls, pool: Pool | PoolPart | LatentPool) -> Source:
        num_blocks, block_size, heads, width = pool.shape
        slots = num_blocks * block_size
        if isinstance(pool, LatentPool):
            assert not isinstance(pool.pool, QuantizedPool)
            arrays = PoolArrays(pool.pool.reshape(slots, width))
            return cls(arrays, None, block_size, width, value_dim=pool.value_dim)
        if isinstance(pool, PoolPart):
            assert not isinstance(pool.pool, QuantizedPool)
            arrays = PoolArrays(pool.pool.reshape(slots, -1))
            return cls(arrays, None, block_size, width, before=pool.index * heads)
        if not isinstance(pool, QuantizedPool):
            return cls(PoolArrays(pool.reshape(slots, -1)), None, block_size, width)
        data, scale_zero = pool.data.reshape(slots, -1), pool.scale_zero
        if pool.format in FLOATS:
            data = lax.bitcast_convert_type(data, FLOATS[pool.format])
        if scale_zero is None:
            return cls(PoolArrays(data), pool.format, block_size, width)
        if scale_zero.dtype == jnp.uint16:
            scale_zero = lax.bitcast_convert_type(scale_zero, jnp.bfloat16)
        arrays = PoolArrays(data, scale_zero.reshape(slots, 2 * heads))
        return cls(arrays, pool.format, block_size, width)

    @property
    def has_scales(self) -> bool:
        return self.arrays.scale_zero is not None

    @property
    def is_of_latents(self) -> bool:
        return self.value_dim is not None

    def boost(self, dtype) -> float:
        """What the scales of V are multiplied with, and sums divided by in the end (`without_zeros`).

        A weight times a scale is often below 6e-5, where float16 has ever fewer bits. Boosted it is still below 65,504:
        weights are at most 1, and scales 2 * 65,504 / levels.
        """
        if self.format not in LEVELS or dtype != jnp.float16:
            return 1.0
        return (LEVELS[self.format] + 1) / 4

    def stages(self, num_stages: int, tile: int) -> Stages:
        """The types of as many stages."""
        dtype = self.arrays.data.dtype
        swizzle = swizzle_of(self.width * dtype.itemsize)
        data = tiled(num_stages, tile, self.width, dtype=dtype, swizzle=swizzle)
        scale_zero, arrivals = None, tile // self.rows(tile)  # one for each copy
        if self.has_scales:
            scale_zero = plgpu.SMEM((num_stages, tile, 8), self.arrays.scale_zero.dtype)
            arrivals *= 2
        return Stages(
            data, scale_zero, plgpu.Barrier(num_arrivals=arrivals, num_barriers=num_stages)
        )

    def bytes_per_key(self) -> int:
        """Bytes of shared memory that a key takes, for K or V in one stage."""
        data = self.width * self.arrays.data.dtype.itemsize
        return data + 8 * self.arrays.scale_zero.dtype.itemsize if self.has_scales else data

    def rows(self, tile: int) -> int:
        """How many rows of a tile lie together in the pool."""
        return min(self.block_size, tile)

    def slot(self, block_of, tile: int, start, row: int):
        """Where those begin that hold position `start + row` and what follows."""
        slot = lax.rem(start + row, jnp.int32(self.block_size))
        return pl.multiple_of(block_of(start + row) * self.block_size + slot, self.rows(tile))

    def fetch(self, refs: PoolArrays, slot_of, column, stages: Stages, stage):
        """Copy a tile whose row i stands in slot `slot_of(i)`. `column`: 2 * head for K, 2 * head + 1 for V."""
        column = column + self.before
        tile, ready = stages.data.shape[1], stages.ready.at[stage]
        rows = self.rows(tile)
        of_head = piece(column, self.width)
        # Scales and zeros of two heads are the 16 bytes that TMA copies at least.
        of_heads = piece(lax.div(column, jnp.int32(4)), 8)
        for row in range(0, tile, rows):
            slots, into = pl.ds(slot_of(row), rows), pl.ds(row, rows)
            data = stages.data.at[stage, into]
            plgpu.copy_gmem_to_smem(refs.data.at[slots, of_head], data, ready)
            if self.has_scales:
                scale_zero = stages.scale_zero.at[stage, into]
                plgpu.copy_gmem_to_smem(refs.scale_zero.at[slots, of_heads], scale_zero, ready)

    def widen(self, stages: Stages, stage, into, start, inside):
        """A stage into `into` [tile, D]; of int8 and int4 the integers n - 128 or n - 8, whose `factors` come later.

        Of fp8 zeros where positions, from `start` on, are not `inside`, a pair of bounds or None: what is no key may be
        NaN. Integers are finite, and their weights are 0.
        """
        columns = plgpu.Layout.WGMMA_UPCAST_2X
        step = swizzle_of(self.width)  # columns are bytes
        for row in range(0, into.shape[0], 64):
            some, kept = pl.ds(row, 64), None
            if inside is not None and not self.has_scales:
                kept = _inside(start + row, inside)
            for first in range(0, self.width, step):
                stored = load(stages.data.at[stage, some, pl.ds(first, step)], layout=columns)
                for i, x in enumerate(self._values(stored)):
                    if kept is not None:
                        x = x.astype(jnp.float32)
                        x = jnp.where(lax.broadcast_in_dim(kept, x.shape, [0]), x, 0.0)
                    into[some, pl.ds(i * self.width + first, step)] = x.astype(into.dtype)

    def _values(self, x) -> list:
        """Stored bytes, as they are loaded, in 16 bits and wgmma's layout; of int4 the lower halves, then the upper."""
        if self.format in FLOATS:
            # Exact in 16 bits, and only those change their layout at no great cost.
            return [plgpu.layout_cast(x.astype(jnp.float16), plgpu.Layout.WGMMA)]

        def wide(x):  # only signed bytes become bfloat16 at no great cost
            return plgpu.layout_cast(x.astype(jnp.int8), plgpu.Layout.WGMMA).astype(jnp.bfloat16)

        if self.format == "int8":
            return [wide(x ^ jnp.uint8(128))]
        upper = wide((x & jnp.uint8(0xF0)) ^ jnp.uint8(128))  # 16 n - 128
        return [wide(x & jnp.uint8(15)) - jnp.bfloat16(8), upper * jnp.bfloat16(1 / 16)]

    def factors(self, stages: Stages, stage, row: int, column, start, inside, boost: float = 1.0):
        """Scale and zero, float32[64] each, of what `widen` left from `row` on; 0 for what is not `inside`."""
        # wgmma's layout has sums, but no columns.
        table = load(
            stages.scale_zero.at[stage, pl.ds(row, 64)], layout=plgpu.Layout.WGMMA, optimized=False
        ).astype(jnp.float32)
        at = plgpu.broadcasted_iota(jnp.int32, table.shape, 1, layout=plgpu.Layout.WGMMA)
        first = lax.rem(column, jnp.int32(4)) * 2
        scale, zero = (jnp.where(at == first + i, table, 0.0).sum(axis=1) for i in (0, 1))
        kept, offset = _inside(start + row, inside), 128.0 if self.format == "int8" else 8.0
        scale = scale if boost == 1.0 else scale * boost
        return jnp.where(kept, scale, 0.0), jnp.where(kept, zero - offset, 0.0)


def _inside(start, bounds: tuple):
    """bool[64]: which positions from `start` on are in [bounds[0], bounds[1])."""
    position = plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
    position = position + start
    return (position >= bounds[0]) & (position < bounds[1])


def clear_outside(v_smem, start, low, high):
    """Zeros in the rows of a tile of V, whose first is position `start`, that are not in [low, high)."""
    columns = v_smem.shape[1]
    step = columns if columns <= 256 else 64  # registers have no room for more
    for first in range(0, columns, step):
        part = v_smem if step == columns else v_smem.at[:, pl.ds(first, step)]
        v = load(part, layout=plgpu.Layout.WGMMA)
        position = start + plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA)
        inside = (position >= low) & (position < high)
        part[...] = jnp.where(inside, v, jnp.zeros_like(v))
