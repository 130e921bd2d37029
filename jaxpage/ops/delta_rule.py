"""The gated delta rule (https://arxiv.org/abs/2412.06464), token by token and for chunks of tokens.

A head's state S [I, J] maps keys to values. A token decays it, S' = exp(g) S, and corrects the value of its key k by
the share b: S = S' + k (b (v - S'^T k))^T; its output is S^T q. Over a chunk this is a triangular system
(https://arxiv.org/abs/2406.06484; transformers' `torch_chunk_gated_delta_rule`). All is float32.

Letters: T tokens, N key heads, J value heads for each, D key dim, F value dim, B batch.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 64  # tokens
_NORM_EPS = 1e-6  # of transformers' `l2norm`
_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


class Tokens(NamedTuple):
    """What tokens do to the state, float32, with any leading axes."""

    q: jax.Array  # [..., N, D], of length 1 / sqrt(D)
    k: jax.Array  # [..., N, D], of length 1
    v: jax.Array  # [..., N, J, F]
    log_decay: jax.Array  # [..., N, J], at most 0
    beta: jax.Array  # [..., N, J], in 0..1


def to_tokens(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array
) -> Tokens:
    """Tokens of q and k of any length."""
    q, k, v, log_decay, beta = (x.astype(jnp.float32) for x in (q, k, v, log_decay, beta))
    return Tokens(_unit(q) * q.shape[-1] ** -0.5, _unit(k), v, log_decay, beta)


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _NORM_EPS)


def one_token(state: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
    """The state [B, N, J, D, F] after a token of each sequence, and their outputs [B, N, J, F]."""
    q, k = token.q[:, :, None, :, None], token.k[:, :, None, :, None]
    state = state * jnp.exp(token.log_decay)[..., None, None]
    correction = token.beta[..., None] * (token.v - jnp.sum(state * k, axis=-2))
    state = state + k * correction[..., None, :]
    return state, jnp.sum(state * q, axis=-2)


def chunk(state: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """The state [N, J, D, F] after CHUNK tokens of a sequence, and their outputs [CHUNK, N, J, F].

    Tokens whose fields are all zero change nothing.
    """
    q, k, v, log_decay, beta = tokens
    total = jnp.cumsum(log_decay, axis=0).transpose(1, 2, 0)  # [N, J, C], up to each token
    beta = beta.transpose(1, 2, 0)[..., None]
    earlier = jnp.tril(jnp.ones((1, 1, CHUNK, CHUNK), jnp.bool_))
    between = total[..., :, None] - total[..., None, :]
    decay = jnp.exp(
        jnp.where(earlier, between, -jnp.inf)
    )  # [N, J, C, C], from the second to the first
    keys = _einsum("tnd,snd->nts", k, k)[:, None]
    corrections = unit_lower_inverse(jnp.tril(beta * keys * decay, -1))
    since_start = jnp.exp(total)[..., None]
    known = since_start * _einsum("tnd,njdf->njtf", k, state)
    new = beta * (v.transpose(1, 2, 0, 3) - known)
    new = _einsum("njts,njsf->njtf", corrections, new)
    scores = _einsum("tnd,snd->nts", q, k)[:, None] * decay
    out = since_start * _einsum("tnd,njdf->njtf", q, state)
    out += _einsum("njts,njsf->njtf", scores, new)
    left = jnp.exp(total[..., -1:] - total)[..., None]  # of each token at the end
    state = state * since_start[..., -1:, :]
    state += _einsum("tnd,njtf->njdf", k, left * new)
    return state, out.transpose(2, 0, 1, 3)


def whole(tokens: Tokens) -> jax.Array:
    """Outputs [B, T, N, J, F] of sequences from their first tokens on. Differentiable."""
    num_tokens = tokens.q.shape[1]
    num_chunks = -(-num_tokens // CHUNK)

    def by_chunk(x: jax.Array) -> jax.Array:
        """[chunks, B, CHUNK, ...]"""
        padding = [(0, 0)] * x.ndim
        padding[1] = (0, num_chunks * CHUNK - num_tokens)
        x = jnp.pad(x, padding)
        return jnp.moveaxis(x.reshape(x.shape[0], num_chunks, CHUNK, *x.shape[2:]), 1, 0)

    batch, _, *heads, value_dim = tokens.v.shape
    start = jnp.zeros((batch, *heads, tokens.k.shape[-1], value_dim), jnp.float32)
    _, outputs = lax.scan(jax.vmap(chunk), start, jax.tree.map(by_chunk, tokens))
    joined = jnp.moveaxis(outputs, 0, 1).reshape(batch, num_chunks * CHUNK, *heads, value_dim)
    return joined[:, :num_tokens]


def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """The inverse of I + `lower`, strictly lower triangular [..., C, C] with C a power of two.

    From inverses of diagonal blocks to inverses of blocks twice as large. As exact as forward substitution, in
    log2(C) steps of products.
    """
    size = lower.shape[-1]
    inverse = jnp.ones((*lower.shape[:-2], size, 1, 1), lower.dtype)  # of all blocks
    width = 1
    while width < size:
        number = size // (2 * width)
        blocks = lower.reshape(*lower.shape[:-2], number, 2 * width, number, 2 * width)
        diagonal = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = _matmul(diagonal[..., width:, :width], first)
        corner = -_matmul(second, corner)
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        below = jnp.concatenate([corner, second], axis=-1)
        inverse = jnp.concatenate([above, below], axis=-2)
        width *= 2
    return inverse[..., 0, :, :]
