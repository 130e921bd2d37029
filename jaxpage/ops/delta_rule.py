"""The gated delta rule and Mamba-2, see `pallas_kernels/delta_rule` and `mamba2`, for whole sequences. All is float32.

Letters: T tokens, N key heads, J value heads for each, D key dim, F value dim, B batch.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.delta_rule.chunks import DELTA, Rule
from pallas_kernels.delta_rule.reference import Tokens
from pallas_kernels.mamba2 import reference as mamba2
from pallas_kernels.mamba2.chunks import MAMBA2

AnyTokens = Tokens | mamba2.Tokens
CHUNK = 64  # tokens
_NORM_EPS = 1e-6  # of transformers' `l2norm`


def to_tokens(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array
) -> Tokens:
    """Tokens of q and k of any length: here k has length 1, and q 1 / sqrt(D)."""
    q, k, v, log_decay, beta = (x.astype(jnp.float32) for x in (q, k, v, log_decay, beta))
    return Tokens(_unit(q) * q.shape[-1] ** -0.5, _unit(k), v, log_decay, beta)


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _NORM_EPS)


def rule_of(tokens: AnyTokens) -> Rule:
    """How they change states."""
    return MAMBA2 if isinstance(tokens, mamba2.Tokens) else DELTA


def whole(tokens: AnyTokens) -> jax.Array:
    """Outputs [B, T, N, J, F] of sequences from their first tokens on, of Mamba-2 [B, T, N, J F]. Differentiable."""
    rule = rule_of(tokens)
    num_tokens = tokens.q.shape[1]
    num_chunks = -(-num_tokens // CHUNK)

    def by_chunk(x: jax.Array) -> jax.Array:
        """[chunks, B, CHUNK, ...]"""
        padding = [(0, 0)] * x.ndim
        padding[1] = (0, num_chunks * CHUNK - num_tokens)
        x = jnp.pad(x, padding)
        return jnp.moveaxis(x.reshape(x.shape[0], num_chunks, CHUNK, *x.shape[2:]), 1, 0)

    one_sequence = partial(rule.prepare, sequence=jnp.zeros(CHUNK, jnp.int32))
    chunks = jax.vmap(jax.vmap(one_sequence))(jax.tree.map(by_chunk, tokens))
    batch, _, *heads, value_dim = tokens.v.shape
    start = jnp.zeros((batch, *heads, tokens.k.shape[-1], value_dim), jnp.float32)
    all_own = jnp.ones(CHUNK, jnp.bool_)
    step = jax.vmap(partial(rule.advance, is_own=all_own, last=CHUNK - 1))
    _, outputs = lax.scan(step, start, chunks)  # [chunks, B, ..., CHUNK, F]
    joined = jnp.moveaxis(outputs, (0, -2), (1, 2))
    return joined.reshape(batch, num_chunks * CHUNK, *heads, value_dim)[:, :num_tokens]
