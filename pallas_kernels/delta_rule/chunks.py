"""The gated delta rule for chunks of tokens: a triangular system (https://arxiv.org/abs/2406.06484; transformers'
`torch_chunk_gated_delta_rule`), which does not depend on the state, and a few products with the state.

Letters: C tokens of a chunk, N key heads, J value heads for each, D key dim, F value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.delta_rule.reference import Tokens, next_state

# TPUs would round the inputs of products to bfloat16, and the state adds up the errors of all tokens. HIGH are three
# products of bfloat16: within 2^-16.
product = partial(jnp.einsum, precision=lax.Precision.HIGH)


class Rule(NamedTuple):
    """How tokens change states, one by one and by chunks."""

    next_state: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]
    prepare: Callable[..., Any]
    advance: Callable[..., tuple[jax.Array, jax.Array]]


class Decays(NamedTuple):
    """Of the heads, for C tokens of one sequence or of several one after the other."""

    between: jax.Array  # [N, J, C, C]: of the second token until the first; 0 where it is not seen
    since: jax.Array  # [N, J, C]: of the state before the chunk until each token
    left: jax.Array  # [N, J, C]: of each token until the last kept one of its sequence; 0 behind it
    whole: jax.Array  # [N, J, C]: of the state before the chunk until that one


def decays(log_decay: jax.Array, sequence: jax.Array, is_kept: jax.Array | None) -> Decays:
    """log_decay: [C, N, J]; sequence, is_kept: as of `prepare`."""
    same = sequence[:, None] == sequence[None]
    size = sequence.size
    first = jnp.argmax(same, axis=1)
    kept = same if is_kept is None else same & is_kept[None]
    last = size - 1 - jnp.argmax(kept[:, ::-1], axis=1)
    log_decay = log_decay.transpose(1, 2, 0)
    total = jnp.cumsum(log_decay, axis=-1)  # [N, J, C]
    start, end = (total - log_decay)[..., first], total[..., last]
    visible = (same & jnp.tril(jnp.ones((size, size), jnp.bool_)))[None, None]
    between = total[..., :, None] - total[..., None, :]
    left = end - total
    return Decays(
        between=jnp.exp(jnp.where(visible, between, -jnp.inf)),
        since=jnp.exp(total - start),
        left=jnp.exp(left if is_kept is None else jnp.where(is_kept, left, -jnp.inf)),
        whole=jnp.exp(end - start),
    )


class Chunk(NamedTuple):
    """What does not depend on the state of C tokens, of one sequence or of several one after the other."""

    # [N, J, C, F]: new values, less what the values of earlier tokens of the chunk contribute.
    v: jax.Array
    k: jax.Array  # [N, J, C, D]: the state times these is to be subtracted from v
    q: jax.Array  # [N, J, C, D]: the state times these is a part of the outputs
    # [N, J, C, C]: the share of the second token's value in the output of the first.
    scores: jax.Array
    # [N, J, C, D]: keys, decayed until the last kept token of their sequence in the chunk.
    left: jax.Array
    decay: jax.Array  # [N, J, C]: of the state, from before the chunk to that token


def prepare(tokens: Tokens, sequence: jax.Array, is_kept: jax.Array | None = None) -> Chunk:
    """tokens: [C, ...]; sequence: int32[C], in ascending order, which one each token is of.

    is_kept: bool[C], the tokens that change the state: the first ones of each sequence, at least one. None: all.
    """
    found = decays(tokens.log_decay, sequence, is_kept)
    beta = tokens.beta.transpose(1, 2, 0)
    q, k, v = tokens.q, tokens.k, tokens.v.transpose(1, 2, 0, 3)
    keys = product("tnd,snd->nts", k, k)[:, None]
    inverse = unit_lower_inverse(jnp.tril(beta[..., None] * keys * found.between, -1))
    q, k = (x.transpose(1, 0, 2)[:, None] for x in (q, k))  # [N, 1, C, D]
    since = found.since[..., None]
    return Chunk(
        v=product("njts,njsf->njtf", inverse, beta[..., None] * v),
        k=product("njts,njsd->njtd", inverse, beta[..., None] * since * k),
        q=since * q,
        scores=product("nitd,nisd->nits", q, k) * found.between,
        left=found.left[..., None] * k,
        decay=found.whole,
    )


def advance(
    state: jax.Array, chunk: Chunk, is_own: jax.Array, last: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """The state [N, J, D, F] of a sequence after a chunk, and outputs [N, J, C, F], which mean nothing for others.

    is_own: bool[C], its tokens; last: index of one of them.
    """
    new = chunk.v - product("njtd,njdf->njtf", chunk.k, state)
    new = jnp.where(is_own[None, None, :, None], new, 0.0)
    out = product("njtd,njdf->njtf", chunk.q, state)
    out += product("njts,njsf->njtf", chunk.scores, new)
    decay = lax.dynamic_index_in_dim(chunk.decay, last, axis=2)
    state = state * decay[..., None] + product("njtd,njtf->njdf", chunk.left, new)
    return state, out


DELTA = Rule(next_state, prepare, advance)


def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """The inverse of I + `lower`, strictly lower triangular [..., C, C].

    From inverses of diagonal blocks to those of blocks twice as large: with X the inverses of two neighbours and B what
    is below the first, left of the second, the inverse of both is X - X B X. As exact as forward substitution.
    """
    size = lower.shape[-1]
    index = jnp.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    width = 1
    while width < size:
        of_two, block = index // (2 * width), index // width
        is_corner = (of_two[:, None] == of_two[None]) & (block[:, None] != block[None])
        corner = jnp.where(is_corner.reshape(*[1] * (lower.ndim - 2), size, size), lower, 0.0)
        below = product("...ij,...jk->...ik", corner, inverse)
        inverse = inverse - product("...ij,...jk->...ik", inverse, below)
        width *= 2
    return inverse
