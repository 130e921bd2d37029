"""How a TPU keeps the pool, and how the packed tokens of a step are brought to the paged attention kernel.

Plain jnp around the kernel of `tpu.py`, whose letters it shares: layouts, tile sizes, lists of what there is to do, and
what the kernel cannot do. Knows nothing of copies and of what is computed.

A slot of the pool is one row of lanes, head after head, K before V. With K and V on an axis of their own, as elsewhere,
XLA turns the layout of any head_dim but 128 and 256 around, so that nothing is padded, and copies the whole pool to
turn it back for a kernel. As lanes nothing is padded either, and a head is a slice of lanes, not every (2K)-th row.
A head whose lanes begin or end within a register is read with its neighbours': queries are 0 there, and of the result
only the head's own lanes are taken. `scale_zero` has the slots as lanes, because scores have their keys there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from pallas_kernels.kv_write.quantized import LEVELS, QuantizedPool, quantize

Pool = Shaped[Array, "N S 2*K*D"] | QuantizedPool  # see `to_tpu`

LANES = 128
# A: flops that pay for reading a byte of KV. By their data sheets v5e does 240 meanwhile, TPU7x 310, v6e 560.
TILE_ROWS = 256
HEAD_ROWS = 4096  # K * A at most, for VMEM's sake
TILE_KV = 512
TILE_BYTES = 2 << 20
MOST_BLOCKS = 1 << 16  # whose ids have 2 bytes
SMEM_BYTES = 3 << 18  # of a block table; a core has 1 MB


def to_tpu(pool: Array | QuantizedPool) -> Pool:
    """A pool as other platforms have it, `[N, S, 2*K, D]`, as this kernel wants it: `[N, S, 2*K*D]`.

    Beside it, for int8 and int4, `scale_zero` [N, S, 2*K, 2] as `[N, 2*K*2, S]`. For tests; an engine allocates it so.
    """
    if isinstance(pool, QuantizedPool):
        scale_zero = pool.scale_zero
        if scale_zero is not None:
            flat = scale_zero.reshape(*scale_zero.shape[:2], -1)
            scale_zero = jnp.swapaxes(flat, 1, 2)
        return replace(pool, data=to_tpu(pool.data), scale_zero=scale_zero)
    return pool.reshape(*pool.shape[:2], -1)


def why_not(
    dtype: DTypeLike, pool: Pool, num_kv_heads: int, head_dim: int, table: tuple[int, ...]
) -> str | None:
    """The reason why the kernel cannot serve, None if it can.

    dtype: of queries and keys; pool: arrays or `jax.ShapeDtypeStruct`s; table: the shape of the block table. All of one
    device's share, if several share the heads.
    """
    dtype, stored = jnp.dtype(dtype), data(pool).dtype
    format = pool.format if isinstance(pool, QuantizedPool) else None
    if dtype not in (jnp.bfloat16, jnp.float32) or (format is None and stored != dtype):
        return (
            f"the TPU kernel computes in bfloat16 or float32 and reads a pool of the same dtype or a quantised one; "
            f"queries are {dtype}, the pool is {stored}"
        )
    width = 2 * num_kv_heads * head_dim // (2 if format == "int4" else 1)
    if len(pool.shape) != 3 or pool.shape[2] != width or width % LANES:
        return (
            f"the TPU kernel reads a pool [num_blocks, block_size, {width}] for {num_kv_heads} KV heads of {head_dim}, "
            f"where the last axis must be a multiple of {LANES}; the pool is {list(pool.shape)}"
        )
    block_size, least = pool.shape[1], LANES if format in LEVELS else _chunk(stored)
    if block_size < least or block_size & (block_size - 1):
        return (
            f"the TPU kernel needs a block_size that is a power of two and at least {least} for this pool, "
            f"not {block_size}"
        )
    if (num_bytes := block_size * width * stored.itemsize) > 2 * TILE_BYTES:
        return (
            f"the TPU kernel takes two blocks of at most {2 * TILE_BYTES} bytes at once, and one has {num_bytes}; "
            f"lower block_size (it is {block_size})"
        )
    if pool.shape[0] > MOST_BLOCKS:
        return (
            f"the TPU kernel keeps ids of blocks in 2 bytes, and there are {pool.shape[0]} blocks; raise block_size "
            f"(it is {block_size})"
        )
    if (num_bytes := 2 * math.prod(table)) > SMEM_BYTES:
        return (
            f"a block table of {table[0]} rows and {table[1]} blocks takes {num_bytes} bytes of the scalar memory, of "
            f"which the TPU kernel gives it {SMEM_BYTES}; raise block_size (it is {block_size}), or lower max_num_seqs "
            f"or max_model_len"
        )
    return None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a kernel is specialised for."""

    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    blocks_per_row: int
    tile_q: int
    dtype: jnp.dtype  # of q and of the result
    pool_dtype: jnp.dtype
    format: str | None
    mask: tuple[float, int | None, float | None]  # scale, window, soft_cap

    @property
    def num_planes(self) -> int:
        return 2 if self.format == "int4" else 1

    @property
    def head_lanes(self) -> int:
        """Lanes that hold a head's K, or its V."""
        return self.head_dim // self.num_planes

    @property
    def width(self) -> int:
        """Lanes of a slot."""
        return 2 * self.num_kv_heads * self.head_lanes

    @property
    def period(self) -> int:
        """After this many heads lanes begin at the start of a register again."""
        return LANES // math.gcd(2 * self.head_lanes, LANES)

    @property
    def read_lanes(self) -> int:
        """W: whole registers, as many as any head's K or V lies in."""
        starts = range(0, 2 * self.period * self.head_lanes, self.head_lanes)
        widest = max(start % LANES + self.head_lanes for start in starts)
        return -(-widest // LANES) * LANES

    def lanes(self, head: int, value: bool) -> tuple[int, int]:
        """The first of the W lanes around a head's K or V, counted from its period; and where it begins among them."""
        start = (2 * (head % self.period) + value) * self.head_lanes
        last = 2 * self.period * self.head_lanes - self.read_lanes
        first = min(start // LANES * LANES, last)
        return first, start - first

    @property
    def rows(self) -> int:
        """A: queries times heads of a group, padded to whole registers."""
        return -(-self.group * self.tile_q // 8) * 8

    @property
    def tile_kv(self) -> int:
        """Whole blocks, 2 MB at most; the same for all programs of an engine."""
        fitting = max(LANES, min(TILE_KV, TILE_BYTES // (self.width * self.pool_dtype.itemsize)))
        return max(self.block_size, 1 << (fitting.bit_length() - 1))


def data(pool: Pool) -> jax.Array:
    """The array with the slots, in which a quantised pool is bytes."""
    return pool.data if isinstance(pool, QuantizedPool) else pool


def _chunk(dtype: jnp.dtype) -> int:
    """Slots of a register."""
    return 32 // jnp.dtype(dtype).itemsize


def tile_q(group: int, num_kv_heads: int) -> int:
    """A power of two from 16 to 128. The same for all programs with prompts."""
    rows = min(TILE_ROWS, HEAD_ROWS // num_kv_heads)
    return 1 << (min(128, max(16, rows // group)).bit_length() - 1)


def pack_table(table: jax.Array) -> jax.Array:
    """[R, M] → int32[R * ceil(M / 2)] of two ids each, the first in the low half: scalar memory is small."""
    table = jnp.pad(table, ((0, 0), (0, table.shape[1] % 2)))
    return (table[:, ::2] | (table[:, 1::2] << 16)).reshape(-1)


def _expand(counts: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Row r, counts[r] times: [2, 0, 3] → rows [0, 0, 2, 2, 2, ..], numbers [0, 1, 0, 1, 2, ..] and how many, [5]."""
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    index = jnp.arange(size, dtype=jnp.int32)
    row = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, counts.shape[0] - 1)
    return row, index - (ends - counts)[row], ends[-1:]


def work(
    shape: Shape,
    kv_lens: jax.Array,
    query_starts: jax.Array,
    query_lens: jax.Array,
    num_tokens: int,
) -> list[jax.Array]:
    """What there is to do, in the order of doing it; XLA computes it once for all layers.

    Chunks that get new tokens: row, first position; number of them. The same for blocks, if they have scales.
    Units: row, query tile, which in the order of visits that tile is; number of them.
    """
    most_rows = min(kv_lens.shape[0], num_tokens)  # that have tokens
    scalars = []
    for size in write_sizes(shape):
        first = (kv_lens - query_lens) // size
        counts = jnp.where(query_lens > 0, -(-kv_lens // size) - first, 0)
        row, number, total = _expand(counts, num_tokens // size + 2 * most_rows)
        scalars += [row, (first[row] + number) * size, total]
    first = query_starts[:-1] // shape.tile_q
    counts = jnp.where(query_lens > 0, -(-query_starts[1:] // shape.tile_q) - first, 0)
    row, number, total = _expand(counts, -(-num_tokens // shape.tile_q) + most_rows)
    tile = first[row] + number
    moved = jnp.concatenate([jnp.zeros(1, jnp.int32), (tile[1:] != tile[:-1]).astype(jnp.int32)])
    return [*scalars, row, tile, jnp.cumsum(moved, dtype=jnp.int32), total]


def write_sizes(shape: Shape) -> list[int]:
    """Slots that are fetched, merged and put back at once: of the data, and of scales and zeros."""
    sizes = [_chunk(shape.pool_dtype)]
    return [*sizes, shape.block_size] if shape.format in LEVELS else sizes


def new_rows(shape: Shape, k: jax.Array, v: jax.Array, pool: Pool) -> list[jax.Array]:
    """The new tokens as they stand in the pool, with room before and after them: [.., 2*K*D], and [4*K, ..]."""
    kv = jnp.stack([k, v], axis=2)  # [T, K, 2, D]
    if isinstance(pool, QuantizedPool):
        stored = None if pool.scale_zero is None else pool.scale_zero.dtype
        data, scale_zero = quantize(kv, pool.format, stored)
        new = [data.reshape(k.shape[0], -1)]
        if scale_zero is not None:
            new.append(scale_zero.reshape(k.shape[0], -1).T)
    else:
        new = [kv.reshape(k.shape[0], -1)]

    def pad(x, axis, size):
        widths = [(0, 0), (0, 0)]
        widths[axis] = (size, 2 * size - x.shape[axis] % -size)
        return jnp.pad(x, widths)

    return [
        pad(x, axis, size)
        for axis, (x, size) in enumerate(zip(new, write_sizes(shape), strict=True))
    ]


def to_tiles(shape: Shape, q: jax.Array) -> jax.Array:
    """[T, H, D] → [Q, K, P, A, W]: tiles of queries, head by head, in the lanes where the head's keys lie."""
    tile_q, group, period = shape.tile_q, shape.group, shape.period
    q = jnp.pad(q, ((0, -q.shape[0] % tile_q), (0, 0), (0, 0)))
    q = q.reshape(-1, tile_q, shape.num_kv_heads, group, shape.num_planes, shape.head_lanes)
    q = q.transpose(0, 2, 4, 3, 1, 5).reshape(
        q.shape[0], -1, period, shape.num_planes, group * tile_q, shape.head_lanes
    )

    def place(in_period):
        _, before = shape.lanes(in_period, False)
        after = shape.read_lanes - before - shape.head_lanes
        rows, lanes = (0, shape.rows - group * tile_q), (before, after)
        return jnp.pad(q[:, :, in_period], ((0, 0), (0, 0), (0, 0), rows, lanes))

    tiles = jnp.stack([place(in_period) for in_period in range(period)], axis=2)
    return tiles.reshape(tiles.shape[0], shape.num_kv_heads, *tiles.shape[3:])


def from_tiles(shape: Shape, out: jax.Array, num_tokens: int) -> jax.Array:
    """The inverse, from the lanes where the head's values lie."""
    tile_q, group, period = shape.tile_q, shape.group, shape.period
    out = out.reshape(out.shape[0], -1, period, *out.shape[2:])

    def take(in_period):
        _, first = shape.lanes(in_period, True)
        return out[:, :, in_period, :, : group * tile_q, first : first + shape.head_lanes]

    out = jnp.stack([take(in_period) for in_period in range(period)], axis=2)
    out = out.reshape(-1, shape.num_kv_heads, shape.num_planes, group, tile_q, shape.head_lanes)
    out = out.transpose(0, 4, 1, 3, 2, 5)
    return out.reshape(-1, shape.num_kv_heads * group, shape.head_dim)[:num_tokens]
