"""How a TPU keeps the pool, and how the packed tokens of a step are brought to the paged attention kernel.

Plain jnp around the kernel of `tpu.py`, whose letters it shares: layouts, and what the kernel cannot do.
Knows nothing of copies and of what is computed.

A slot of the pool is one row of lanes, head after head, K before V. With K and V on an axis of their own, as elsewhere,
XLA would transpose the layout for any head_dim but 128 and 256, so that nothing is padded, and copy the whole pool back
for the kernel. As lanes nothing is padded either, and a head is a slice of lanes, not every (2K)-th row.
A head whose lanes begin or end within a register is read with its neighbours': queries are 0 there, and of the result
only the head's own lanes are taken. `scale_zero` has the slots as lanes, because scores have their keys there; of each
head a scale and a zero for K, then for V.

A slot of latents (`kv_write/latents.py`) is the key of one head, in whole registers, which is read once and multiplied
as K and as V.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.kv_write.latents import LatentPool
from pallas_kernels.kv_write.parts import PoolPart, whole
from pallas_kernels.kv_write.quantized import LEVELS, QuantizedPool, quantize
from pallas_kernels.mosaic_tpu import LANES
from pallas_kernels.paged_attention.tpu_choose import shape_of
from pallas_kernels.paged_attention.tpu_fp8 import stored_bits
from pallas_kernels.paged_attention.tpu_shape import (
    VMEM_BYTES,
    Pool,
    Shape,
    TileSizes,
    data,
    scale_rows,
    slots_of_register,
    write_sizes,
    write_window,
)

MOST_BLOCKS = 1 << 16  # whose ids have 2 bytes
# Of a block table and the lists of `tpu_work.py`. A core has 1 MB; the rest is for the compiler, and for the lists of
# prompts, which are longer by some bytes for each 16 tokens.
SMEM_BYTES = 15 << 16
BLOCK_BYTES = 4 << 20  # two are in VMEM at once


def to_tpu(pool: Array | QuantizedPool) -> Pool:
    """A pool as other platforms have it, `[N, S, 2*K, D]`, as this kernel wants it: `[N, S, 2*K*D]`.

    Beside it, for int8 and int4, `scale_zero` [N, S, 2*K, 2] as `[N, scale_rows(K) * K, S]`. For tests; an engine
    allocates it so.
    """
    if isinstance(pool, QuantizedPool):
        scale_zero = pool.scale_zero
        if scale_zero is not None:
            flat = _scales_of_slots(scale_zero, scale_rows(pool.shape[2] // 2))
            scale_zero = jnp.swapaxes(flat, 1, 2)
        return replace(pool, data=to_tpu(pool.data), scale_zero=scale_zero)
    return pool.reshape(*pool.shape[:2], -1)


def _scales_of_slots(scale_zero: jax.Array, rows: int) -> jax.Array:
    """[..., 2*K, 2] → [..., rows * K]."""
    of_heads = scale_zero.reshape(*scale_zero.shape[:-2], -1, 4)
    widths = [(0, 0)] * (of_heads.ndim - 1) + [(0, rows - 4)]
    return jnp.pad(of_heads, widths).reshape(*scale_zero.shape[:-2], -1)


def unsupported_reason(
    q: jax.Array | jax.ShapeDtypeStruct,
    pool: Pool | PoolPart | LatentPool,
    num_kv_heads: int,
    table: tuple[int, ...],
    sizes: TileSizes | None = None,
) -> str | None:
    """The reason why the kernel cannot serve, None if it can.

    q: [T, H, D], of the dtype of keys too; table: the shape of the block table. Shapes and dtypes suffice. All of one
    device's share, if several share the heads.
    """
    given, pool = pool, whole(pool)
    stored, head_dim = data(pool).dtype, q.shape[2]
    format = pool.format if isinstance(pool, QuantizedPool) else None
    if q.dtype not in (jnp.bfloat16, jnp.float32) or (format is None and stored != q.dtype):
        return (
            f"the TPU kernel computes in bfloat16 or float32 and reads a pool of the same dtype or a quantised one; "
            f"queries are {q.dtype}, the pool is {stored}"
        )
    width = 2 * num_kv_heads * head_dim // (2 if format == "int4" else 1)
    if isinstance(given, PoolPart):
        if reason := _why_no_part(given, width):
            return reason
    elif isinstance(given, LatentPool):
        if reason := _why_no_latents(pool, num_kv_heads):
            return reason
        width = pool.shape[2]
    elif len(pool.shape) != 3 or pool.shape[2] != width or width % LANES:
        return (
            f"the TPU kernel reads a pool [num_blocks, block_size, {width}] for {num_kv_heads} KV heads of {head_dim}, "
            f"where the last axis must be a multiple of {LANES}; the pool is {list(pool.shape)}"
        )
    block_size, least = pool.shape[1], LANES if format in LEVELS else slots_of_register(stored)
    if block_size < least or block_size & (block_size - 1):
        return (
            f"the TPU kernel needs a block_size that is a power of two and at least {least} for this pool, "
            f"not {block_size}"
        )
    if (num_bytes := block_size * width * stored.itemsize) > BLOCK_BYTES:
        return (
            f"the TPU kernel takes two blocks of at most {BLOCK_BYTES} bytes at once, and one has {num_bytes}; "
            f"lower block_size (it is {block_size})"
        )
    return _why_no_memory(q, given, num_kv_heads, table, sizes or TileSizes())


def _why_no_part(part: PoolPart, width: int) -> str | None:
    """The same, of a layer that has `width` lanes of each slot."""
    pool = part.pool
    if isinstance(pool, QuantizedPool) and pool.scale_zero is not None:
        return (
            f"where layers differ in their KV heads, the TPU kernel reads no {pool.format} pool; fp8_e4m3 and fp8_e5m2 "
            "have no scales"
        )
    if len(pool.shape) != 3 or width % LANES or (part.index + 1) * width > pool.shape[2]:
        return (
            f"the TPU kernel reads part {part.index} of {width} lanes, which must be a multiple of {LANES}, of a pool "
            f"[num_blocks, block_size, lanes]; the pool is {list(pool.shape)}"
        )
    return None


def _why_no_latents(pool: Pool, num_kv_heads: int) -> str | None:
    """The same, of latents."""
    if isinstance(pool, QuantizedPool) and pool.scale_zero is not None:
        return f"the TPU kernel reads no latents in {pool.format}; fp8_e4m3 and fp8_e5m2 have no scales"
    if pool.shape[2] % LANES or num_kv_heads != 1:
        return (
            f"the TPU kernel reads latents as one KV head and in multiples of {LANES} lanes; there are "
            f"{num_kv_heads} KV heads, and the pool is {list(pool.shape)}"
        )
    return None


def _why_no_memory(
    q, pool: Pool | PoolPart | LatentPool, num_kv_heads: int, table, sizes: TileSizes
) -> str | None:
    """The same, of what has to fit into the scalar memory and into VMEM."""
    num_blocks, block_size = whole(pool).shape[:2]
    if num_blocks > MOST_BLOCKS:
        return (
            f"the TPU kernel keeps ids of blocks in 2 bytes, and there are {num_blocks} blocks; raise block_size "
            f"(it is {block_size})"
        )
    kinds = [
        shape_of(q, pool, num_kv_heads, table[1], sizes=sizes, one_query_per_row=one)
        for one in (True, False)
    ]
    if (num_bytes := _scalar_bytes(kinds[0], table)) > SMEM_BYTES:
        return (
            f"a block table of {table[0]} rows and {table[1]} blocks takes {num_bytes} bytes of the scalar memory "
            f"with the lists of a step, and the TPU kernel gives them {SMEM_BYTES}; raise block_size (it is "
            f"{block_size}), or lower max_num_seqs or max_model_len"
        )
    if (num_bytes := max(shape.vmem_bytes for shape in kinds)) > VMEM_BYTES:
        heads = f"{num_kv_heads} KV heads of {q.shape[2]} and blocks of {block_size}"
        change = "lower block_size, or raise tensor_parallel_size"
        if isinstance(pool, LatentPool):
            heads = f"{q.shape[1]} query heads of {q.shape[2]} that read one latent"
            change = "raise tensor_parallel_size"
        return (
            f"with {heads} the TPU kernel needs {num_bytes} bytes of VMEM, of which it may have "
            f"{VMEM_BYTES}; {change}"
        )
    return None


def _scalar_bytes(shape: Shape, table: tuple[int, ...]) -> int:
    """Bytes of the block table, and of the rows, units and chunks of a step in which every row has one query."""
    num_rows, num_blocks = table
    of_units = 5 * (-(-num_rows // shape.tile_tokens) + num_rows)
    of_chunks = sum(2 * (num_rows // size + 2 * num_rows) for size in write_sizes(shape))
    return 4 * (num_rows * -(-num_blocks // 2) + 2 * num_rows + of_units + of_chunks)


def new_rows(shape: Shape, k: jax.Array, v: jax.Array, pool: Pool) -> list[tuple[jax.Array, ...]]:
    """The new tokens: K alone if there are no values; K and V apart, [.., K*D] each, if those are whole registers and
    not quantised, which `tpu_write` puts side by side; else [.., 2*K*D] as they stand in the pool. And
    [scale_rows*K, ..] of a pool with scales.

    Padded to whole registers, and to as many as `tpu_write` fetches at once.
    """
    num_tokens = k.shape[0]
    is_quantized = isinstance(pool, QuantizedPool)
    if shape.is_of_latents:
        new = [tuple(_quantized(shape, k, pool) if is_quantized else [k.reshape(num_tokens, -1)])]
    elif k[0].size % LANES == 0 and not is_quantized:
        new = [(k.reshape(num_tokens, -1), v.reshape(num_tokens, -1))]
    else:
        kv = jnp.stack([k, v], axis=2)  # [T, K, 2, D]; of [T, 2*K, D] XLA would keep float32 copies
        rows = _quantized(shape, kv, pool) if is_quantized else [kv.reshape(num_tokens, -1)]
        new = [(x,) for x in rows]

    def pad(x, axis, size):
        wanted = max(-(-num_tokens // size) * size, write_window(shape, size))
        widths = [(0, 0), (0, 0)]
        widths[axis] = (0, wanted - num_tokens)
        return jnp.pad(x, widths)

    return [
        tuple(pad(x, axis, size) for x in parts)
        for axis, (parts, size) in enumerate(zip(new, write_sizes(shape), strict=True))
    ]


def _quantized(shape: Shape, kv: jax.Array, pool: QuantizedPool) -> list[jax.Array]:
    """[T, K, 2, D], or latents [T, 1, D], as a quantised pool stores them: [T, width], and [scale_rows*K, T] if it has
    scales.
    """
    stored = None if pool.scale_zero is None else pool.scale_zero.dtype
    data, scale_zero = quantize(kv, pool.format, stored)
    assert shape.format is not None
    new = [stored_bits(data, shape.format).reshape(kv.shape[0], -1)]
    if scale_zero is not None:
        of_heads = scale_zero.reshape(kv.shape[0], -1, 2)
        new.append(_scales_of_slots(of_heads, shape.scale_rows).T)
    return new


def to_tiles(shape: Shape, q: jax.Array) -> jax.Array | tuple[jax.Array, ...]:
    """[T, H, D] → [Q, K', P, A, W]: tiles of queries, head by head, in the lanes where the head's keys lie. If
    `one_tile_per_row` token by token.

    Of stacks of n heads K' = K / n. If `is_flat`: [Q * tile_tokens, H * D]; if `comes_by_head`:
    [H, Q * tile_tokens, W]. Of latents a tuple of the same for each of `query_parts`, with its lanes.
    """
    tile_q, group, period = shape.tile_q, shape.group, shape.period
    if shape.is_of_latents:
        return tuple(_of_latents(shape, q[:, :, a:b], b - a) for a, b in shape.query_parts)
    q = jnp.pad(q, ((0, -q.shape[0] % shape.tile_tokens), (0, 0), (0, 0)))
    if shape.is_flat:
        return q.reshape(q.shape[0], -1)
    q = q.reshape(-1, tile_q, shape.num_kv_heads, group, shape.num_planes, shape.head_lanes)
    order = (0, 2, 4, 1, 3, 5) if shape.one_tile_per_row else (0, 2, 4, 3, 1, 5)
    q = q.transpose(order).reshape(
        q.shape[0], -1, period, shape.num_planes, group * tile_q, shape.head_lanes
    )

    def place(in_period):
        _, before = shape.lanes(in_period, False)
        after = shape.read_lanes - before - shape.head_lanes
        widths = [(0, 0)] * 4 + [(before, after)]
        return jnp.pad(q[:, :, in_period], widths)

    tiles = jnp.stack([place(in_period) for in_period in range(period)], axis=2)
    stack, planes, lanes = shape.stack, shape.num_planes, shape.read_lanes
    tiles = tiles.reshape(-1, shape.num_stacks, stack, planes, group * tile_q, lanes)
    tiles = jnp.swapaxes(tiles, 2, 3).reshape(
        -1, shape.num_stacks, planes, stack * group * tile_q, lanes
    )
    rows = (0, shape.rows - tiles.shape[3])
    return jnp.pad(tiles, ((0, 0), (0, 0), (0, 0), rows, (0, 0)))


def _of_latents(shape: Shape, q: jax.Array, width: int) -> jax.Array:
    """A part of queries that latents are multiplied with, [T, H, ..], with zeros up to the width."""
    tokens = -q.shape[0] % shape.tile_tokens
    q = jnp.pad(q, ((0, tokens), (0, 0), (0, width - q.shape[2])))
    if shape.comes_by_head:
        return jnp.swapaxes(q, 0, 1)
    # One share of heads: the rows of a tile are those of its tokens, one after the other.
    rows = q.reshape(-1, 1, 1, shape.group * shape.tile_q, width)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, shape.rows - rows.shape[3]), (0, 0)))


def shape_of_results(shape: Shape, tiles: tuple[int, ...]) -> tuple[int, ...]:
    """Of queries as `to_tiles` makes them."""
    if shape.comes_by_head:
        return tiles[1], tiles[0] * shape.value_lanes
    return tiles if shape.is_flat else (*tiles[:-1], shape.value_lanes)


def from_tiles(shape: Shape, out: jax.Array, num_tokens: int) -> jax.Array:
    """Results as `shape_of_results` → [T, H, D], from the lanes of the head's values. Of latents D is those lanes."""
    if shape.is_flat or shape.comes_by_head:
        return out[:num_tokens].reshape(num_tokens, shape.num_heads, -1)
    tile_q, group, period = shape.tile_q, shape.group, shape.period
    rows = group * tile_q
    out = out[:, :, :, : shape.stack * rows].reshape(
        -1, shape.num_stacks, shape.num_planes, shape.stack, rows, shape.value_lanes
    )
    out = jnp.swapaxes(out, 2, 3)
    out = out.reshape(out.shape[0], -1, period, shape.num_planes, rows, shape.value_lanes)
    lanes = shape.value_lanes if shape.is_of_latents else shape.head_lanes

    def take(in_period):
        _, first = shape.lanes(in_period, True)
        return out[:, :, in_period, :, :, first : first + lanes]

    out = jnp.stack([take(in_period) for in_period in range(period)], axis=2)
    of_rows, order = (group, tile_q), (0, 4, 1, 3, 2, 5)
    if shape.one_tile_per_row:
        of_rows, order = (tile_q, group), (0, 3, 1, 4, 2, 5)
    out = out.reshape(-1, shape.num_kv_heads, shape.num_planes, *of_rows, lanes)
    out = out.transpose(order)
    return out.reshape(-1, shape.num_heads, shape.num_planes * lanes)[:num_tokens]
