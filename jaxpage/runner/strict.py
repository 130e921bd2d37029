"""The model of `numerics="strict"`: what a token gets is the same, bit for bit, in every batch, chunk and program.

All arithmetic of a layer is done a tile of tokens at a time (`runner.tiles`), and each token attends by itself, to
tiles of keys in their order. What is left between the tiles moves data: keys and values into the pool.

A layer is called twice for each tile: first for its queries, keys and values, then, when the keys of all tokens are in
the pool, for what follows. What is not asked for in a call is never computed, so no layer need be written in two halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpage.batch import StepBatch
from jaxpage.kv_pool import KVPool
from jaxpage.models.decoder import CausalLM
from jaxpage.runner.tiles import by_tiles
from jaxpage.sampling.logprobs import log_normaliser
from pallas_kernels.kv_write.xla import write_kv
from pallas_kernels.paged_attention import xla

ROW_TILE = 8  # rows that are sampled together


def hidden_states(
    model: CausalLM,
    batch: StepBatch,
    token_rows: jax.Array,
    kv_pool: KVPool,
    layer_locations: Sequence[tuple[int, int]],
) -> tuple[KVPool, jax.Array]:
    """The hidden states [T, E] of a step's tokens, after the final norm, and the pool with their keys and values.

    token_rows: int32[T], the row of each token.
    """
    decoder, config = model.model, model.config
    is_token = batch.is_token
    assert is_token is not None
    num_tokens = batch.query_starts[-1]
    ropes = tuple(dict.fromkeys(config.ropes))

    def begin(constants, token_ids, positions):
        x = nnx.merge(embedder, constants).embed(token_ids)
        return x, [rope.angles(positions, x.dtype) for rope in ropes]

    embedder, table = nnx.split(decoder)
    x, angles = by_tiles(begin, num_tokens, table, batch.token_ids, batch.positions)
    rotations = dict(zip(ropes, angles, strict=True))
    lens = jnp.where(is_token, batch.positions + 1, 0)
    pool = list(kv_pool)
    for index, (layer, rope) in enumerate(zip(decoder.layers, config.ropes, strict=True)):
        group, array = layer_locations[index]
        tables = batch.block_tables[group][token_rows]
        graphdef, weights = nnx.split(layer)
        q, k, v = by_tiles(partial(_project, graphdef), num_tokens, weights, x, *rotations[rope])
        pool[array] = write_kv(pool[array], k, v, batch.slot_mappings[group])
        x = by_tiles(
            partial(_finish, graphdef),
            num_tokens,
            (weights, pool[array]),
            *(x, *rotations[rope], q, tables, lens),
        )

    def end(constants, x):
        return nnx.merge(last, constants)(x)

    last, norm = nnx.split(decoder.norm)
    return pool, by_tiles(end, num_tokens, norm, x)


def _project(graphdef: Any, weights: Any, x: jax.Array, cos: jax.Array, sin: jax.Array) -> Any:
    """q [T, H, D], k and v [T, K, D] of a layer, rotated."""
    found: list[tuple[jax.Array, ...]] = []

    def record(layer, q, k, v, **options):
        found.append((q, k, v))
        return q

    nnx.merge(graphdef, weights)(x, (cos, sin), record)
    return found[0]


def _finish(
    graphdef: Any,
    constants: Any,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    q: jax.Array,
    tables: jax.Array,
    lens: jax.Array,
) -> jax.Array:
    """What a layer makes of x [T, E] when the keys that its tokens see are in the pool."""
    weights, pool = constants
    starts = jnp.arange(q.shape[0] + 1, dtype=jnp.int32)

    def attend(layer, _q, _k, _v, **options):
        return xla.paged_attention(q, pool, tables, lens, starts, one_query_per_row=True, **options)

    return nnx.merge(graphdef, weights)(x, (cos, sin), attend)


def logits(model: CausalLM, hidden: jax.Array, num_rows: jax.Array) -> jax.Array:
    """float32[R, V] of hidden [R, E], of which the first num_rows count."""
    graphdef, weights = nnx.split(model)
    return by_tiles(
        lambda constants, x: nnx.merge(graphdef, constants).logits(x), num_rows, weights, hidden
    )


def token_logprobs(
    logits: jax.Array, token_ids: jax.Array, temperature: jax.Array, num_rows: jax.Array
) -> jax.Array:
    """float32[R]: of tokens int32[R] by logits [R, V] at temperatures float32[R] above 0."""

    def of_tile(_, logits, token_ids, temperature):
        logits = logits / temperature[:, None]
        own = jnp.take_along_axis(logits, token_ids[:, None], axis=1)[:, 0]
        return own - log_normaliser(logits)

    return by_tiles(of_tile, num_rows, (), logits, token_ids, temperature, tile=ROW_TILE)
