"""Ragged paged attention in plain XLA: a chunked online softmax whose trip counts follow the true lengths.

For CPUs, and wherever no Pallas kernel serves. Gathering a row's whole block table copies hundreds of megabytes; a
loop over a few blocks at a time keeps the temporaries at a tile, and `while` loops with a dynamic bound cost what the
longest row needs, not what the table could hold. (Online softmax: Milakov and Gimelshein, arXiv:1805.02867.)

Letters: T packed query tokens, R rows, M blocks per row, N blocks, S block size, H query heads, K KV heads, D head dim,
G = H / K query heads per KV head, Q and B the query and key tile.
"""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.kv_write.xla import from_storage

TILE_KV = 128  # keys a loop turn reads; a few blocks, small enough to stay in the L2 cache
TILE_Q = 64  # queries of a prompt that share a pass over the keys


def paged_attention(
    q: Float[Array, "T H D"],
    pool: Shaped[Array, "N S 2*K D"],
    block_table: Int[Array, "R M"],
    kv_lens: Int[Array, " R"],
    query_starts: Int[Array, " R+1"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    one_query_per_row: bool = False,
) -> Float[Array, "T H D"]:
    """Same contract as `reference.paged_attention`. T = R and query r is row r's if `one_query_per_row`.

    A pool of uint16 holds the bits of K and V in q's dtype (see `kv_write.xla.to_storage`).

    A row with one query (decoding) shares a batched loop with all other such rows; a row with more is cut into query
    tiles, each with a loop of its own. Both kinds mix freely in one call.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = pool.shape[2] // 2
    grouped = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    tile_blocks = max(1, min(TILE_KV // pool.shape[1], block_table.shape[1]))
    # Whole tiles only: a slice that ran over the table's end would be shifted back, onto the wrong positions.
    block_table = jnp.pad(block_table, ((0, 0), (0, -block_table.shape[1] % tile_blocks)))
    attend = partial(
        _attend, pool, tile_blocks=tile_blocks, scale=scale, window=window, soft_cap=soft_cap
    )
    if one_query_per_row:
        out = attend(grouped[:, None], block_table, kv_lens, kv_lens - 1)[:, 0]
        return out.reshape(q.shape).astype(q.dtype)

    query_lens = query_starts[1:] - query_starts[:-1]
    out = _attend_query_tiles(attend, grouped, block_table, kv_lens, query_starts, query_lens)
    first = query_starts[:-1]
    single_lens = jnp.where(query_lens == 1, kv_lens, 0)
    single = attend(
        jnp.take(grouped, first, axis=0, mode="clip")[:, None],
        block_table,
        single_lens,
        single_lens - 1,
    )[:, 0]
    out = out.at[jnp.where(query_lens == 1, first, num_tokens)].set(single, mode="drop")
    return out.reshape(q.shape).astype(q.dtype)


def _attend_query_tiles(attend, q, block_table, kv_lens, query_starts, query_lens):
    """Rows with several queries: one tile of queries after another, each over its own keys. float32[T, K, G, D]."""
    num_tokens = q.shape[0]
    tile_q = min(TILE_Q, num_tokens)
    num_tiles = jnp.where(query_lens > 1, -(-query_lens // tile_q), 0)
    last_tile = jnp.cumsum(num_tiles, dtype=jnp.int32)
    padded = jnp.pad(q, ((0, tile_q), (0, 0), (0, 0), (0, 0)))

    def one_tile(tile, out):
        row = jnp.searchsorted(last_tile, tile, side="right", method="compare_all")
        offset = (tile - (last_tile[row] - num_tiles[row])) * tile_q
        start = query_starts[row] + offset
        queries = lax.dynamic_slice_in_dim(padded, start, tile_q)[None]
        position = kv_lens[row] - query_lens[row] + offset
        values = attend(
            queries,
            lax.dynamic_slice_in_dim(block_table, row, 1),
            jnp.minimum(kv_lens[row], position + tile_q)[None],
            position[None],
        )
        # The tile's tail may run into the next row's tokens; that row's own tiles come later and overwrite it.
        return lax.dynamic_update_slice_in_dim(out, values[0], start, axis=0)

    out = jnp.zeros(padded.shape, jnp.float32)
    return lax.fori_loop(0, last_tile[-1], one_tile, out)[:num_tokens]


def _attend(pool, q, block_table, kv_lens, positions, *, tile_blocks, scale, window, soft_cap):
    """Attention of Q consecutive queries per row, the first at `positions`: q [R, Q, K, G, D] → float32, same shape."""
    num_rows, num_queries, num_kv_heads, group, head_dim = q.shape
    block_size = pool.shape[1]
    tile_kv = tile_blocks * block_size
    query_position = positions[:, None] + jnp.arange(num_queries, dtype=jnp.int32)[None]
    queries = jnp.moveaxis(q, 1, 3)  # [R, K, G, Q, D]
    queries = queries.reshape(num_rows, num_kv_heads, group * num_queries, head_dim)

    def one_tile(tile, carry):
        acc, top, total = carry
        blocks = lax.dynamic_slice_in_dim(block_table, tile * tile_blocks, tile_blocks, axis=1)
        kv = from_storage(pool[blocks], q.dtype)
        kv = kv.reshape(num_rows, tile_kv, num_kv_heads, 2, head_dim)
        key_position = tile * tile_kv + jnp.arange(tile_kv, dtype=jnp.int32)
        valid = key_position[None] < kv_lens[:, None]  # [R, B]
        scores = scale * jnp.einsum(
            "rkqd,rskd->rkqs", queries, kv[:, :, :, 0], preferred_element_type=jnp.float32
        )
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        visible = valid[:, None] & (key_position[None, None] <= query_position[:, :, None])
        if window is not None:
            visible &= key_position[None, None] > query_position[:, :, None] - window
        visible = jnp.tile(visible, (1, group, 1))[:, None]  # [R, 1, G*Q, B]
        scores = jnp.where(visible, scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        # A query that has seen no key yet has top = -inf; 0 stands in, so that exp(-inf - 0) = 0 and never NaN.
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weights = jnp.exp(scores - shift[..., None])
        rescale = jnp.exp(top - shift)
        values = jnp.where(valid[:, :, None, None], kv[:, :, :, 1], 0)  # 0 * NaN would be NaN
        acc = acc * rescale[..., None] + jnp.einsum(
            "rkqs,rskd->rkqd",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return acc, new_top, total * rescale + weights.sum(axis=-1)

    rows = (num_rows, num_kv_heads, group * num_queries)
    carry = (
        jnp.zeros((*rows, head_dim), jnp.float32),
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.float32),
    )
    first_tile = jnp.int32(0)
    if window is not None:
        first_key = jnp.where(kv_lens > 0, positions - window + 1, jnp.iinfo(jnp.int32).max)
        first_tile = jnp.maximum(first_key.min(), 0) // tile_kv
    acc, _, total = lax.fori_loop(first_tile, -(-kv_lens.max() // tile_kv), one_tile, carry)
    out = acc / jnp.where(total == 0.0, 1.0, total)[..., None]
    out = out.reshape(num_rows, num_kv_heads, group, num_queries, head_dim)
    return jnp.moveaxis(out, 3, 1)
