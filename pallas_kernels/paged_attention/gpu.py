"""Ragged paged attention for Hopper GPUs (sm_90a) in Mosaic GPU. Knows nothing of engines, and chooses nothing.

Two kernels share the contract of `reference.paged_attention`:

- **Rows with one query** (`gpu_decode.py`) are bound by the pool's bytes. Into which parts a row's keys are cut, and in
  which order these are added up, depends on the row's length alone, so its result never depends on the batch. How many
  parts a program takes depends on the batch; a third kernel adds up what different programs computed
  (`gpu_combine.py`).
- **Rows with more queries** (`gpu_prefill.py`) are bound by the tensor cores. There a tile of queries times heads is
  the rows of wgmma, and as many programs as there are SMs walk a list of tiles. Few queries over many keys are too few
  tiles for that: their keys are cut too, by the row's lengths, in a launch of their own, and the third kernel adds up.

Of latents (`kv_write/latents.py`) the first kernel serves rows with one query, a tile of keys being that of values too.
Rows with more queries have no kernel: plain XLA computes them, in the same call.

Blocks come by TMA straight from the pool, found through the block table (`gpu_tiles.py`). What is no key of the row
(slots beyond its length, blocks that a tile has no use for) is masked out of the scores and overwritten by zeros in V,
since 0 x NaN is NaN. Quantised blocks are copied as they are; a program widens a tile in registers and leaves it for
wgmma in shared memory. Products are of the stored integers: scales and zeros go into scores and weights.

Under `interpret` the probabilities of prompts go through shared memory and products are added (`wgmma.py` says why).
All else, every copy, barrier and mask, is the same.

Letters: T packed query tokens, R rows, M blocks per row, N blocks, S block size, H query heads, K KV heads, D head dim,
G = H / K query heads per KV head.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_write.latents import LatentPool
from pallas_kernels.kv_write.parts import PoolPart
from pallas_kernels.kv_write.storage import Pool
from pallas_kernels.lists import distinct
from pallas_kernels.paged_attention import gpu_layout, xla
from pallas_kernels.paged_attention.gpu_decode import decode
from pallas_kernels.paged_attention.gpu_layout import TileSizes
from pallas_kernels.paged_attention.gpu_prompts import prefill
from pallas_kernels.paged_attention.gpu_tiles import LOG2E, Options

DEFAULT = TileSizes()


def paged_attention(
    q: Float[Array, "T H D"],
    pool: Pool | PoolPart | LatentPool,
    block_table: Int[Array, "R M"],
    kv_lens: Int[Array, " R"],
    query_starts: Int[Array, " R+1"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    one_query_per_row: bool = False,
    sizes: TileSizes = DEFAULT,
    interpret: Any = None,
) -> Float[Array, "T H V"]:
    """Same contract as `reference.paged_attention`. T = R and query r is row r's if `one_query_per_row`.

    q and the pool are both bfloat16 or both float16, or the pool is quantised: wgmma reads its stored values in q's
    dtype, which is exact. Products are summed in float32. `sinks` are logits that take part in the softmax of
    each head and have no value. `scale` is positive. `sizes` are the device's, the same in all calls of an engine.
    Raises NotImplementedError with the reason of `gpu_layout.unsupported_reason`. `interpret` takes
    `plgpu.InterpretGPUParams` (jax >= 0.11.2), None compiles.
    """
    if reason := gpu_layout.unsupported_reason(q, pool):
        raise NotImplementedError(reason)
    is_of_latents = isinstance(pool, LatentPool)
    if is_of_latents:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, pool.shape[3] - q.shape[2])))
    in_log2 = None if sinks is None else sinks.astype(jnp.float32) * LOG2E
    options = Options(scale, window, soft_cap, in_log2, sizes, interpret)
    if one_query_per_row:
        return decode(q, pool, block_table, kv_lens, options)

    num_tokens, num_rows = q.shape[0], kv_lens.shape[0]
    single = query_starts[1:] - query_starts[:-1] == 1
    if is_of_latents:
        others = jnp.where(single, 0, kv_lens)
        rows = (q, pool, block_table, others, query_starts)
        out = xla.paged_attention(*rows, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
    else:
        out = prefill(q, pool, block_table, kv_lens, query_starts, options)
    lens = jnp.where(single, kv_lens, 0)
    first = jnp.where(single, query_starts[:-1], num_tokens)
    if num_tokens < num_rows:  # no more than so many rows have a query
        (rows,) = jnp.nonzero(single, size=num_tokens, fill_value=num_rows)
        lens = lens.at[rows].get(mode="fill", fill_value=0)
        first = first.at[rows].get(mode="fill", fill_value=num_tokens)
        block_table = block_table.at[rows].get(mode="clip")
    queries, is_single = q.at[first].get(mode="clip"), first < num_tokens
    singles = decode(queries, pool, block_table, lens, options, wanted=is_single)
    first = distinct(first, ~is_single, num_tokens)
    return out.at[first].set(singles, mode="drop", unique_indices=True)
