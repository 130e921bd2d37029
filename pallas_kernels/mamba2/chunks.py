"""Mamba-2 for chunks of tokens: products of a chunk's tokens with each other, which do not depend on the state, and two
with the state (section 6 of https://arxiv.org/abs/2405.21060).

Letters: C tokens of a chunk, N key heads, J value heads for each, D key dim, F value dim, V = J F.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.delta_rule.chunks import Rule, decays, product
from pallas_kernels.mamba2.reference import Tokens, next_state, of_columns


class Chunk(NamedTuple):
    """What does not depend on the state of C tokens, of one sequence or of several one after the other."""

    out: jax.Array  # [N, C, V]: outputs as far as they come from tokens of the chunk
    q: jax.Array  # [N, C, D]
    since: jax.Array  # [N, J, C]: the decay of the state before the chunk until each token
    k: jax.Array  # [N, C, D]
    # [N, C, V]: values, decayed until the last kept token of their sequence in the chunk.
    left: jax.Array
    decay: jax.Array  # [N, J, C]: of the state, from before the chunk to that token


def prepare(tokens: Tokens, sequence: jax.Array, is_kept: jax.Array | None = None) -> Chunk:
    """As `delta_rule.chunks.prepare`."""
    found = decays(tokens.log_decay, sequence, is_kept)
    q, k, v = (x.swapaxes(0, 1) for x in (tokens.q, tokens.k, tokens.v))  # [N, C, ...]
    scores = product("ntd,nsd->nts", q, k)[:, None] * found.between
    of_heads = v.reshape(*v.shape[:2], scores.shape[1], -1)  # [N, C, J, F]
    return Chunk(
        out=product("njts,nsjf->ntjf", scores, of_heads).reshape(v.shape),
        q=q,
        since=found.since,
        k=k,
        left=v * _columns(found.left, v),
        decay=found.whole,
    )


def advance(
    state: jax.Array, chunk: Chunk, is_own: jax.Array, last: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """The state [N, D, V] of a sequence after a chunk, and outputs [N, C, V], which mean nothing for others.

    is_own: bool[C], its tokens; last: index of one of them.
    """
    seen = product("ntd,ndv->ntv", chunk.q, state)
    out = chunk.out + seen * _columns(chunk.since, seen)
    added = jnp.where(is_own[None, :, None], chunk.left, 0.0)
    decay = lax.dynamic_index_in_dim(chunk.decay, last, axis=2, keepdims=False)  # [N, J]
    state = state * of_columns(decay, state.shape[-1])[:, None]
    return state + product("ntd,ntv->ndv", chunk.k, added), out


def _columns(x: jax.Array, like: jax.Array) -> jax.Array:
    """[N, C, V] of [N, J, C]"""
    return of_columns(x.swapaxes(1, 2), like.shape[-1])


MAMBA2 = Rule(next_state, prepare, advance)
