"""The definition of ragged paged attention: plain jnp, obvious, slow. Everything else is compared with it.

Letters: T packed query tokens, R rows, M blocks per row, N blocks, S block size, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_write.latents import LatentPool
from pallas_kernels.kv_write.parts import PoolPart, whole
from pallas_kernels.kv_write.storage import Pool, from_storage
from pallas_kernels.paged_attention.queries import Queries, parts


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
) -> Float[Array, "T H V"]:
    """Causal attention of each packed query over its row's keys and values, found through the block table.

    Row r holds queries `query_starts[r] .. query_starts[r+1]`; they are the last of its `kv_lens[r]` positions. The
    query at position i sees keys `j <= i`, or up to its last key (`queries.SeeingAhead`), and with a `window` only
    `j > i - window`. `soft_cap` c replaces a score s
    by `c * tanh(s / c)`. Query head h reads KV head `h // (H // K)`; the pool interleaves K (`2k`) and V (`2k + 1`).
    `sinks` are one more logit for each head, which takes its share of the softmax and has no value (gpt-oss).
    V is D, except for a `LatentPool`, whose values are the first V elements of its keys.
    The pool may be as `kv_write.xla.to_storage` leaves it, and is read as K and V in q's dtype. Scores and softmax are
    float32; the result has q's dtype. Tokens of no row give something finite. Nothing is read beyond `kv_lens`, before
    the window of the row's first query, or outside the row's blocks (NaN may stand there).
    """
    own = pool.own(pool.pool) if isinstance(pool, PoolPart) else whole(pool)
    stored = from_storage(own, q.dtype)
    num_tokens, num_heads, head_dim = q.shape
    query_starts, last_keys = parts(query_starts)
    num_kv_heads = pool.shape[2] // 2
    per_head, value_dim = 2, head_dim
    if isinstance(pool, LatentPool):
        per_head, value_dim = 1, pool.value_dim
        stored = stored[..., :head_dim]
    block_size = pool.shape[1]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(query_starts[1:], token, side="right", method="compare_all")
    in_row = row < kv_lens.shape[0]
    row = jnp.where(in_row, row, 0)
    position = kv_lens[row] - (query_starts[1:][row] - token)

    key_position = jnp.arange(block_table.shape[1] * block_size, dtype=jnp.int32)
    blocks = block_table[row]  # [T, M]
    kv = stored[blocks].reshape(num_tokens, -1, num_kv_heads, per_head, head_dim)
    kv = kv.astype(jnp.float32)
    valid = (key_position[None] < kv_lens[row][:, None]) & in_row[:, None]  # [T, M*S]
    last_key = position if last_keys is None else last_keys
    visible = valid & (key_position[None] <= last_key[:, None])
    if window is not None:
        visible &= key_position[None] > position[:, None] - window
    kv = jnp.where(visible[:, :, None, None, None], kv, 0.0)
    grouped = q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, -1, head_dim)
    scores = scale * jnp.einsum("tkgd,tskd->tkgs", grouped, kv[:, :, :, 0])
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    visible = jnp.broadcast_to(visible[:, None, None, :], scores.shape)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32), (num_tokens, num_heads))
        scores = jnp.concatenate([scores, sink.reshape(*scores.shape[:3], 1)], axis=-1)
        visible = jnp.pad(visible, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=True)
    scores = jnp.where(visible, scores, -jnp.inf)
    weights = jnp.where(visible, jax.nn.softmax(scores, axis=-1, where=visible), 0.0)
    weights = weights[..., : key_position.size]
    out = jnp.einsum("tkgs,tskd->tkgd", weights, kv[:, :, :, -1, :value_dim])
    return out.reshape(num_tokens, num_heads, value_dim).astype(q.dtype)
