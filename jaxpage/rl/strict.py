"""The trainer's logprobs with `numerics="strict"`: bit for bit what the sampler computed.

The forward pass runs the same functions as the sampler's steps, with the same tiles, on its own KV pool; see
`runner.strict`. Its gradient is that of the dense forward pass, recomputed from the parameters. The strict forward pass
itself is not differentiated, because that would change bits of its value.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpage.batch import StepBatch
from jaxpage.kv_groups import Location
from jaxpage.kv_pool import KVPoolSpec
from jaxpage.models.decoder import CausalLM
from jaxpage.ops.lists import chosen_first
from jaxpage.plan import NULL_BLOCK
from jaxpage.rl.logprobs import logprobs
from jaxpage.rl.rollout import Padded
from jaxpage.runner.strict import hidden_states, logits_of, token_logprobs, unsupported_models
from jaxpage.runner.tiles import TILE


def strict_logprobs(
    model: CausalLM, batch: Padded, temperature: float | jax.Array = 1.0, *, block_size: int
) -> jax.Array:
    """float32[N, L]: as `logprobs`, bit for bit those of a strict sampler with that `block_size`; differentiable.

    Holds the KV of all rows, and the logits of a few tokens at a time. Raises ValueError for models that no strict
    sampler takes.
    """
    if wrong := unsupported_models(model.config):
        raise ValueError(f"strict logprobs are not for {', '.join(wrong)}; take `logprobs`")
    graphdef, state = nnx.split(model)
    temperature = jnp.asarray(temperature, jnp.float32)

    def forward(state: Any, batch: Padded, temperature: jax.Array) -> jax.Array:
        return _forward(nnx.merge(graphdef, state), batch, temperature, block_size)

    def keep(state: Any, batch: Padded, temperature: jax.Array) -> tuple[jax.Array, Any]:
        return forward(state, batch, temperature), (state, batch, temperature)

    def backward(kept: Any, cotangent: jax.Array) -> tuple[Any, None, None]:
        state, batch, temperature = kept

        def dense(state: Any) -> jax.Array:
            return logprobs(nnx.merge(graphdef, state), batch, temperature)

        (gradient,) = jax.vjp(dense, state)[1](cotangent)
        return gradient, None, None

    compute = jax.custom_vjp(forward)
    compute.defvjp(keep, backward)
    return compute(state, jax.tree.map(jnp.asarray, batch), temperature)


def _forward(model: CausalLM, batch: Padded, temperature: jax.Array, block_size: int) -> jax.Array:
    shape, config = batch.token_ids.shape, model.config
    num_rows, width = shape
    num_blocks = -(-width // block_size)  # per row
    is_token, positions = batch.attention_mask.ravel(), batch.positions.ravel()
    rows = jnp.repeat(jnp.arange(num_rows, dtype=jnp.int32), width)
    table = 1 + jnp.arange(num_rows * num_blocks, dtype=jnp.int32).reshape(num_rows, num_blocks)
    block = table[rows, positions // block_size]
    slots = jnp.where(is_token, block * block_size + positions % block_size, NULL_BLOCK)
    order, num_tokens = chosen_first(is_token)
    starts = jnp.zeros(num_rows + 1, jnp.int32).at[-1].set(num_tokens)
    step = StepBatch(
        slots=jnp.zeros(num_rows, jnp.int32),
        query_starts=starts,
        kv_lens=jnp.zeros(num_rows, jnp.int32),
        token_ids=batch.token_ids.ravel()[order],
        positions=positions[order],
        slot_mappings=slots[order][None],
        block_tables=table[None],
        is_token=is_token[order],
    )
    pool = KVPoolSpec(
        num_arrays=config.num_layers,
        num_blocks=1 + num_rows * num_blocks,
        block_size=block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=jnp.dtype(config.dtype),
    )
    places = [Location(0, index) for index in range(config.num_layers)]
    _, hidden = hidden_states(model, step, rows[order], pool.allocate(), places)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
    is_sampled = batch.completion_mask.at[:, 0].set(False).ravel()
    which, num_sampled = chosen_first(is_sampled)
    found = _of_sampled(
        model, hidden[back[which - 1]], batch.token_ids.ravel()[which], temperature, num_sampled
    )
    found = jnp.zeros(is_sampled.size, jnp.float32).at[which].set(found)
    return jnp.where(is_sampled, found, 0.0).reshape(shape)


def _of_sampled(
    model: CausalLM,
    hidden: jax.Array,
    token_ids: jax.Array,
    temperature: jax.Array,
    num_sampled: jax.Array,
) -> jax.Array:
    """Logprobs float32[T] of tokens, each from the hidden state [T, E] before it, a tile at a time."""
    total = token_ids.size
    pad = (0, -total % TILE)
    hidden, token_ids = jnp.pad(hidden, (pad, (0, 0))), jnp.pad(token_ids, pad)

    def one_tile(index: jax.Array, found: jax.Array) -> jax.Array:
        start = index * TILE
        number = jnp.minimum(num_sampled - start, TILE)
        logits = logits_of(model, lax.dynamic_slice_in_dim(hidden, start, TILE), number)
        ids = lax.dynamic_slice_in_dim(token_ids, start, TILE)
        own = token_logprobs(logits, ids, jnp.broadcast_to(temperature, ids.shape), number)
        return lax.dynamic_update_slice_in_dim(found, own, start, 0)

    empty = jnp.zeros(token_ids.size, jnp.float32)
    return lax.fori_loop(0, (num_sampled + TILE - 1) // TILE, one_tile, empty)[:total]
