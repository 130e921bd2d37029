"""Ragged paged attention in plain XLA: a chunked online softmax whose trip counts follow the true lengths.

For CPUs, and wherever no Pallas kernel serves. Gathering a row's whole block table copies hundreds of megabytes; a
loop over a few blocks at a time keeps the temporaries at a tile, and `while` loops with a dynamic bound cost what the
longest row needs, not what the table could hold. (Online softmax: Milakov and Gimelshein, arXiv:1805.02867.)

Letters: T packed query tokens, R rows, M blocks per row, N blocks, S block size, H query heads, K KV heads, D head dim,
G = H / K query heads per KV head, Q and B the query and key tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_write.latents import LatentPool
from pallas_kernels.kv_write.parts import PoolPart, whole
from pallas_kernels.kv_write.quantized import QuantizedPool
from pallas_kernels.kv_write.storage import Pool, from_storage
from pallas_kernels.paged_attention.queries import Queries, parts

# Measured on 2 cores, 14 query and 2 KV heads of 64: 64 keys suit decoding best; prompts took 1.4 times as long.
TILE_KV_ONE = 64  # keys a loop turn reads of each row with one query
TILE_KV = 128  # keys a loop turn reads for a tile of queries
TILE_Q = 128  # queries of a prompt that share a pass over the keys
GROUP = 8  # rows with one query share a loop that is as long as the longest of them


def paged_attention(
    q: Float[Array, "T H D"],
    pool: Pool | PoolPart | LatentPool,
    block_table: Int[Array, "R M"],
    kv_lens: Int[Array, " R"],
    query_starts: Queries,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    one_query_per_row: bool = False,
) -> Float[Array, "T H V"]:
    """Same contract as `reference.paged_attention`. T = R and query r is row r's if `one_query_per_row`.

    A pool of uint16 holds the bits of K and V in q's dtype (see `kv_write.xla.to_storage`). A quantised one is
    dequantised tile by tile, to float32.

    Rows with one query (decoding) share batched loops with others about as long; a row with more is cut into query
    tiles, each with a loop of its own. Both kinds mix freely in one call.
    """
    num_tokens, num_heads, head_dim = q.shape
    value_dim = pool.value_dim if isinstance(pool, LatentPool) else head_dim
    width = num_heads * value_dim  # of a token's results
    grouped = (pool.shape[2] // 2, num_heads // (pool.shape[2] // 2), head_dim)  # K, G, D
    mask = _Mask(scale, window, soft_cap, sinks)

    def attend(queries, tile_kv, *of_rows):
        """queries: the bits of [R, Q, H * D]; of_rows: block table [R, M], kv_lens, positions [R], and last keys
        [R, Q] if there are any.
        """
        values = from_storage(queries, q.dtype).reshape(*queries.shape[:2], *grouped)
        if isinstance(whole(pool), QuantizedPool):
            values = values.astype(jnp.float32)  # rounding tiles to bf16 costs more than it saves
        out = _attend(pool, values, *of_rows, tile_kv=tile_kv, mask=mask)
        if value_dim < head_dim:  # a slice of each tile's values would be a copy
            out = out[..., :value_dim]
        return _bits(out.reshape(*queries.shape[:2], width).astype(q.dtype))

    flat = _bits(q.reshape(num_tokens, -1))
    if one_query_per_row:
        out = _attend_groups(attend, flat, width, block_table, kv_lens)
        return from_storage(out, q.dtype).reshape(num_tokens, num_heads, value_dim)

    starts, last_keys = parts(query_starts)
    query_lens = starts[1:] - starts[:-1]
    rows = (block_table, kv_lens, starts, query_lens, last_keys)
    out = _attend_query_tiles(attend, flat, width, *rows)
    # One that is alone is the last of its row: there is nothing ahead that it could see.
    is_single = query_lens == 1
    first = starts[:-1]
    single_lens = jnp.where(is_single, kv_lens, 0)
    queries = jnp.take(flat, first, axis=0, mode="clip")
    single = _attend_groups(attend, queries, width, block_table, single_lens)
    out = out.at[jnp.where(is_single, first, num_tokens)].set(single, mode="drop")
    return from_storage(out, q.dtype).reshape(num_tokens, num_heads, value_dim)


@dataclass(frozen=True)
class _Mask:
    """What becomes of a score, and of the softmax over them."""

    scale: float
    window: int | None
    soft_cap: float | None
    sinks: jax.Array | None  # [H]


def _bits(x):
    """2-byte floats as uint16: XLA:CPU updates a slice of those in place, and of bf16 by converting all of it."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def _attend_groups(attend, q, width, block_table, kv_lens):
    """Rows with one query, a group at a time, so that short rows do not wait for the longest one. [R, width]."""
    num_rows = q.shape[0]
    # Fewer, larger groups: each turn of a loop costs the same to start.
    group = max(GROUP, num_rows // 4)
    if num_rows <= group or num_rows % group:
        return attend(q[:, None], TILE_KV_ONE, block_table, kv_lens, kv_lens - 1)[:, 0]
    order = jnp.argsort(kv_lens)  # the same in all layers: XLA computes it once

    def one_group(index, out):
        rows = lax.dynamic_slice_in_dim(order, index * group, group)
        lens = kv_lens[rows]
        values = attend(q[rows][:, None], TILE_KV_ONE, block_table[rows], lens, lens - 1)
        return out.at[rows].set(values[:, 0], unique_indices=True)

    return lax.fori_loop(0, num_rows // group, one_group, jnp.zeros((num_rows, width), q.dtype))


def _attend_query_tiles(
    attend, q, width, block_table, kv_lens, query_starts, query_lens, last_keys
):
    """Rows with several queries: one tile of queries after another, each over its own keys. [T, width]."""
    num_tokens = q.shape[0]
    tile_q = min(TILE_Q, num_tokens)
    num_tiles = jnp.where(query_lens > 1, -(-query_lens // tile_q), 0)
    last_tile = jnp.cumsum(num_tiles, dtype=jnp.int32)
    padded = jnp.concatenate([q, jnp.zeros((tile_q, q.shape[1]), q.dtype)])
    padded_last_keys = None if last_keys is None else jnp.pad(last_keys, (0, tile_q))

    def one_tile(tile, out):
        # Tied to the index, the queries are no loop invariant, of which XLA would keep a float32 copy.
        queries, tile = lax.optimization_barrier((padded, tile))
        row = jnp.searchsorted(last_tile, tile, side="right", method="compare_all")
        offset = (tile - (last_tile[row] - num_tiles[row])) * tile_q
        start = query_starts[row] + offset
        position = kv_lens[row] - query_lens[row] + offset
        ahead = ()
        if padded_last_keys is not None:
            ahead = (lax.dynamic_slice_in_dim(padded_last_keys, start, tile_q)[None],)
        values = attend(
            lax.dynamic_slice_in_dim(queries, start, tile_q)[None],
            TILE_KV,
            lax.dynamic_slice_in_dim(block_table, row, 1),
            jnp.minimum(kv_lens[row], _end_of_keys(position + tile_q, *ahead))[None],
            position[None],
            *ahead,
        )
        # The tile's tail may run into the next row's tokens; that row's own tiles come later and overwrite it.
        return lax.dynamic_update_slice_in_dim(out, values[0], start, axis=0)

    last = last_tile[-1]
    empty = jnp.zeros((len(padded), width), q.dtype)
    return lax.fori_loop(0, last, one_tile, empty)[:num_tokens]


def _end_of_keys(end_of_queries, last_keys=None):
    """Behind the last key that a tile of queries sees."""
    if last_keys is None:
        return end_of_queries
    return jnp.maximum(end_of_queries, last_keys.max() + 1)


def _attend(pool, q, block_table, kv_lens, positions, last_keys=None, *, tile_kv: int, mask: _Mask):
    """Attention of Q consecutive queries per row, the first at `positions`: q [R, Q, K, G, D] → float32, same shape.

    They are causal, or see up to `last_keys` [R, Q].
    """
    num_rows, num_queries, num_kv_heads, group, head_dim = q.shape
    window, soft_cap = mask.window, mask.soft_cap
    tile_blocks = max(1, min(tile_kv // pool.shape[1], block_table.shape[1]))
    tile_kv = tile_blocks * pool.shape[1]
    # Whole tiles only: a slice that ran over the table's end would be shifted back, onto the wrong positions.
    block_table = jnp.pad(block_table, ((0, 0), (0, -block_table.shape[1] % tile_blocks)))
    query_position = positions[:, None] + jnp.arange(num_queries, dtype=jnp.int32)[None]
    last_key = query_position if last_keys is None else last_keys
    queries = jnp.moveaxis(q, 1, 3)  # [R, K, G, Q, D]
    queries = queries.reshape(num_rows, num_kv_heads, group * num_queries, head_dim)

    def one_tile(tile, carry):
        acc, top, total = carry
        blocks = lax.dynamic_slice_in_dim(block_table, tile * tile_blocks, tile_blocks, axis=1)
        key_position = tile * tile_kv + jnp.arange(tile_kv, dtype=jnp.int32)
        valid = key_position[None] < kv_lens[:, None]  # [R, B]
        if window is not None:  # what no query of the row sees may be somebody else's by now
            valid &= key_position[None] > positions[:, None] - window
        keys, values = _read_tile(pool, blocks, valid, head_dim, q.dtype)
        scores = mask.scale * jnp.einsum(
            "rkqd,rksd->rkqs", queries, keys, preferred_element_type=jnp.float32
        )
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        visible = valid[:, None] & (key_position[None, None] <= last_key[:, :, None])
        if window is not None:
            visible &= key_position[None, None] > query_position[:, :, None] - window
        visible = jnp.tile(visible, (1, group, 1))[:, None]  # [R, 1, G*Q, B]
        scores = jnp.where(visible, scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        # A query that has seen no key yet has top = -inf; 0 stands in, so that exp(-inf - 0) = 0 and never NaN.
        shift = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weights = jnp.exp(scores - shift[..., None])
        rescale = jnp.exp(top - shift)
        acc = acc * rescale[..., None] + jnp.einsum(
            "rkqs,rksd->rkqd",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return acc, new_top, total * rescale + weights.sum(axis=-1)

    rows = (num_rows, num_kv_heads, group * num_queries)
    top, total = jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows, jnp.float32)
    if (
        mask.sinks is not None
    ):  # as if a key of weight exp(sink - top) = 1 and no value had been seen
        sinks = jnp.repeat(mask.sinks.astype(jnp.float32), num_queries)
        top = jnp.broadcast_to(sinks.reshape(1, *rows[1:]), rows)
        total = jnp.ones(rows, jnp.float32)
    carry = (jnp.zeros((*rows, head_dim), jnp.float32), top, total)
    first_tile = jnp.int32(0)
    if window is not None:
        first_key = jnp.where(kv_lens > 0, positions - window + 1, jnp.iinfo(jnp.int32).max)
        first_tile = jnp.maximum(first_key.min(), 0) // tile_kv
    acc, _, total = lax.fori_loop(first_tile, -(-kv_lens.max() // tile_kv), one_tile, carry)
    out = acc / jnp.where(total == 0.0, 1.0, total)[..., None]
    out = out.reshape(num_rows, num_kv_heads, group, num_queries, head_dim)
    return jnp.moveaxis(out, 3, 1)


def _read_tile(pool, blocks, valid, head_dim, dtype):
    """Keys and values [R, K, B, D] of a tile's blocks [R, blocks], head by head; values are 0 where not valid [R, B].

    Whole blocks are gathered as flat rows: with four axes XLA:CPU takes 284 us instead of 62 for 1.6 MB.
    """
    num_rows, tile_kv = valid.shape
    num_heads, array = pool.shape[2], whole(pool)
    if isinstance(pool, LatentPool):
        return _read_latents(array, blocks, valid, head_dim, dtype)
    rows = jax.tree.map(
        lambda x: x.reshape(x.shape[0], -1).at[blocks.reshape(-1)].get(mode="clip"), array
    )
    if isinstance(pool, PoolPart):
        by_head = jax.tree.map(lambda x, y: x.reshape(-1, *y.shape[1:]), rows, array)
        rows = jax.tree.map(lambda x: x.reshape(x.shape[0], -1), pool.own(by_head))
    if isinstance(rows, QuantizedPool):
        return _read_quantized(rows, valid, num_heads // 2, dtype)
    stored = rows.dtype
    kv = _pairs(rows).reshape(num_rows, tile_kv, num_heads // 2, 2, -1)
    keys = jnp.swapaxes(kv[:, :, :, 0], 1, 2)
    values = jnp.where(valid[:, :, None, None], kv[:, :, :, 1], 0)  # 0 * NaN would be NaN
    values = jnp.swapaxes(values, 1, 2)
    # The barrier: computed once, not once more inside whatever reads them.
    keys, values = lax.optimization_barrier((keys, values))
    shape = (num_rows, num_heads // 2, tile_kv, -1)
    return tuple(_unpaired(x, stored, dtype).reshape(shape) for x in (keys, values))


def _read_latents(array, blocks, valid, head_dim, dtype):
    """The same of a pool of keys, which are the values too. On a TPU, blocks as flat rows would be a copy of it."""

    def read(x):
        keys = x.at[blocks.reshape(-1)].get(mode="clip")[..., :head_dim]
        return jnp.where(valid[..., None], keys.reshape(*valid.shape, head_dim), 0)

    stored = lax.optimization_barrier(jax.tree.map(read, array))
    keys = from_storage(stored, dtype)[:, None]
    return keys, keys


def _read_quantized(rows, valid, num_kv_heads, dtype):
    """The same from the gathered rows of a quantised pool. Heads are moved while they are bytes."""

    def by_head(x):
        x = x.reshape(*valid.shape, num_kv_heads, 2, -1)
        x = jnp.where(valid[:, :, None, None, None], x, 0)  # which in every format is 0
        return x.transpose(3, 0, 2, 1, 4)

    kv = from_storage(jax.tree.map(by_head, rows), dtype)  # [2, R, K, B, D]
    return lax.optimization_barrier((kv[0], kv[1]))


def _pairs(rows):
    """[N, D] of 2-byte elements as uint32[N, D / 2]; others as they are.

    Heads are moved in this form. XLA would fold a transpose of bf16 into the layout of the product's operand, and
    YNNPACK takes batched bf16 products in one layout only: in others XLA converts the operands to float32 first.
    """
    if rows.dtype.itemsize != 2:
        return rows
    return lax.bitcast_convert_type(rows.reshape(rows.shape[0], -1, 2), jnp.uint32)


def _unpaired(x, stored, dtype):
    return x if stored.itemsize != 2 else lax.bitcast_convert_type(x, dtype)
