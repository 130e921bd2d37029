"""Chooses the shapes of the launches of a call: for rows with several queries, with one, and with drafts.

Letters as in `tpu.py`. Knows no arrays but by shape and dtype.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write.latents import LatentPool
from pallas_kernels.kv_write.parts import PoolPart, whole
from pallas_kernels.kv_write.quantized import QuantizedPool
from pallas_kernels.paged_attention.tpu_fp8 import format_of
from pallas_kernels.paged_attention.tpu_shape import (
    VMEM_BYTES,
    Pool,
    Shape,
    TileSizes,
    data,
    scale_rows,
)

MOST_WITH_DRAFTS = 8  # queries of a row that has a tile of its own


def shape_of(
    q: jax.Array | jax.ShapeDtypeStruct,
    pool: Pool | PoolPart | LatentPool,
    num_kv_heads: int,
    blocks_per_row: int,
    *,
    sizes: TileSizes,
    mask: tuple[float, int | None, float | None] = (1.0, None, None),
    one_query_per_row: bool = False,
) -> Shape:
    """The shape of the kernel for such arguments. `tile_q`: a power of two up to 128, the same for all programs with
    prompts; 1 where rows have one query. Of a `LatentPool` heads are as wide as its slots.
    """
    part = pool.index if isinstance(pool, PoolPart) else None
    head_dim, value_dim = q.shape[2], None
    least_tile_q = 2  # 1 would mean that every row has one query
    group = q.shape[1] // num_kv_heads
    rows = min(sizes.tile_rows, sizes.head_rows // num_kv_heads)
    tile_q = 1 << (min(128, max(16, rows // group)).bit_length() - 1)
    if isinstance(pool, LatentPool):
        # With fewer a head's queries in a tile would be no whole registers, see `Scratch.queries`.
        head_dim, value_dim, least_tile_q = pool.shape[3], pool.value_dim, 16
        if not one_query_per_row:
            # Two shares or more: products of one fill the waits for the weights of another.
            tile_q = 1 << (min(128, max(16, 2 * rows // group)).bit_length() - 1)
            fitting = range(1, max(1, rows // tile_q) + 1)
            group = max(n for n in fitting if q.shape[1] % n == 0)
            num_kv_heads = q.shape[1] // group
    pool = whole(pool)
    has_scales = isinstance(pool, QuantizedPool) and pool.scale_zero is not None
    shape = Shape(
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=pool.shape[1],
        blocks_per_row=blocks_per_row,
        tile_q=1 if one_query_per_row else tile_q,
        dtype=jnp.dtype(q.dtype),
        pool_dtype=data(pool).dtype,
        format=format_of(pool),
        scale_rows=scale_rows(num_kv_heads) if has_scales else 0,
        mask=mask,
        sizes=sizes,
        value_dim=value_dim,
    )
    if part is not None and shape.width < pool.shape[2]:
        shape = replace(shape, first_lane=part * shape.width)
    while shape.tile_q > least_tile_q and shape.vmem_bytes > VMEM_BYTES:
        shape = replace(shape, tile_q=shape.tile_q // 2)
    return shape


def shape_with_drafts(shape: Shape, num_drafts: int) -> Shape | None:
    """The shape for rows with 2 to 1 + num_drafts queries, given that for rows with several; None if those have the
    latter too: without drafts, with so many that its tiles are no larger, and where VMEM does not hold a row's. Of
    latents the heads have one share, as with one query per row.
    """
    tile_q = 1 << num_drafts.bit_length()
    if num_drafts < 1 or tile_q >= shape.tile_q or tile_q > MOST_WITH_DRAFTS:
        return None
    found = replace(shape, tile_q=tile_q, one_tile_per_row=True)
    if shape.is_of_latents:
        found = replace(found, num_kv_heads=1, group=shape.num_heads)
    return found if found.vmem_bytes <= VMEM_BYTES else None
