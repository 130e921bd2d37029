"""The gated delta rule for chunks of tokens: a triangular system (https://arxiv.org/abs/2406.06484; transformers'
`torch_chunk_gated_delta_rule`), which does not depend on the state, and a few products with the state.

Letters: C tokens of a chunk, N key heads, J value heads for each, D key dim, F value dim.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.delta_rule.reference import Tokens

# TPUs would round the inputs of products to bfloat16, and the state adds up the errors of all tokens. HIGH are three
# products of bfloat16: within 2^-16.
_einsum = partial(jnp.einsum, precision=lax.Precision.HIGH)


class Chunk(NamedTuple):
    """What does not depend on the state of C tokens, of one sequence or of several one after the other."""

    # [N, J, C, F]: new values, less what the values of earlier tokens of the chunk contribute.
    v: jax.Array
    # [N, J, C, D]: the state times these is to be subtracted from v; None: nothing is corrected
    k: jax.Array | None
    q: jax.Array  # [N, J, C, D]: the state times these is a part of the outputs
    # [N, J, C, C]: the share of the second token's value in the output of the first.
    scores: jax.Array
    # [N, J, C, D]: keys, decayed until the last token of their sequence in the chunk.
    left: jax.Array
    decay: jax.Array  # [N, J, C]: of the state, from before the chunk to that token


def prepare(tokens: Tokens, sequence: jax.Array) -> Chunk:
    """tokens: [C, ...]; sequence: int32[C], in ascending order, which one each token is of."""
    same = sequence[:, None] == sequence[None]
    size = sequence.size
    first = jnp.argmax(same, axis=1)
    last = size - 1 - jnp.argmax(same[:, ::-1], axis=1)
    log_decay = tokens.log_decay.transpose(1, 2, 0)
    total = jnp.cumsum(log_decay, axis=-1)  # [N, J, C]
    start, end = (total - log_decay)[..., first], total[..., last]
    visible = (same & jnp.tril(jnp.ones((size, size), jnp.bool_)))[None, None]
    between = total[..., :, None] - total[..., None, :]
    decay = jnp.exp(jnp.where(visible, between, -jnp.inf))
    q, k, v = tokens.q, tokens.k, tokens.v.transpose(1, 2, 0, 3)
    since = jnp.exp(total - start)[..., None]
    known = None
    if tokens.beta is not None:
        beta = tokens.beta.transpose(1, 2, 0)[..., None]
        keys = _einsum("tnd,snd->nts", k, k)[:, None]
        inverse = unit_lower_inverse(jnp.tril(beta * keys * decay, -1))
        v = _einsum("njts,njsf->njtf", inverse, beta * v)
        known = _einsum("njts,njsd->njtd", inverse, beta * since * k.transpose(1, 0, 2)[:, None])
    q, k = (x.transpose(1, 0, 2)[:, None] for x in (q, k))  # [N, 1, C, D]
    return Chunk(
        v=v,
        k=known,
        q=since * q,
        scores=_einsum("nitd,nisd->nits", q, k) * decay,
        left=jnp.exp(end - total)[..., None] * k,
        decay=jnp.exp(end - start),
    )


def advance(
    state: jax.Array, chunk: Chunk, is_own: jax.Array, last: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """The state [N, J, D, F] of a sequence after a chunk, and outputs [N, J, C, F], which mean nothing for others.

    is_own: bool[C], its tokens; last: index of the last one.
    """
    new = chunk.v
    if chunk.k is not None:
        new = new - _einsum("njtd,njdf->njtf", chunk.k, state)
    new = jnp.where(is_own[None, None, :, None], new, 0.0)
    out = _einsum("njtd,njdf->njtf", chunk.q, state)
    out += _einsum("njts,njsf->njtf", chunk.scores, new)
    decay = lax.dynamic_index_in_dim(chunk.decay, last, axis=2)
    state = state * decay[..., None] + _einsum("njtd,njtf->njdf", chunk.left, new)
    return state, out


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
        below = _einsum("...ij,...jk->...ik", corner, inverse)
        inverse = inverse - _einsum("...ij,...jk->...ik", inverse, below)
        width *= 2
    return inverse
