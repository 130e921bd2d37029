"""Which tokens a row may sample: allowed ids, bad words, min_tokens; and logit_bias. Meaning and order are vLLM's.

Knows masks of one bit per token and the token history of a row. Knows nothing of probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.batch import RequestState


def pack_mask(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """uint32[ceil(V/32)] in which bit `v % 32` of word `v // 32` is set for every id v.

    Raises ValueError for an id outside the vocabulary.
    """
    index = np.fromiter(ids, np.int64)
    if index.size and not (0 <= index.min() and index.max() < vocab_size):
        raise ValueError(
            f"token ids must be in 0..{vocab_size - 1}, got {index.min()}..{index.max()}; "
            "use ids of this model's vocabulary"
        )
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    np.bitwise_or.at(mask, index // 32, np.uint32(1) << (index % 32).astype(np.uint32))
    return mask


def unpack_mask(mask: jax.Array, vocab_size: int) -> jax.Array:
    """bool[R, V] from uint32[R, ceil(V/32)]."""
    bits = (mask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]) & 1
    return bits.reshape(mask.shape[0], -1)[:, :vocab_size] == 1


def is_set(mask: jax.Array, ids: jax.Array, slots: jax.Array) -> jax.Array:
    """bool[R]: whether bit `ids[r]` of `mask[slots[r]]` is set. Reads R words of mask: uint32[Q, ceil(V/32)]."""
    word = mask[slots, ids // 32]
    return (word >> (ids % 32).astype(jnp.uint32)) & 1 == 1


def constrain(
    logits: jax.Array, state: RequestState, slots: jax.Array, positions: jax.Array
) -> jax.Array:
    """float32[R, V]: forbidden tokens are -inf, then biases are added; a bias does not bring back a forbidden token."""
    num_rows, vocab_size = logits.shape
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    too_short = positions < state.min_len[slots]
    stopping = jnp.where(too_short[:, None], state.stop_mask[slots], 0)
    allowed = state.allowed_mask[slots] & ~stopping
    logits = jnp.where(unpack_mask(allowed, vocab_size), logits, -jnp.inf)
    banned = _ends_of_bad_words(state, slots, positions, vocab_size)
    logits = logits.at[rows, banned].set(-jnp.inf, mode="drop")
    return logits.at[rows, state.bias_ids[slots]].add(state.bias_values[slots], mode="drop")


def _ends_of_bad_words(
    state: RequestState, slots: jax.Array, positions: jax.Array, vocab_size: int
) -> jax.Array:
    """int32[R, MAX_BAD_WORDS]: the last token of each bad word whose other tokens end the output so far, else V.

    Only the output counts: a word that began in the prompt is not recognised, as in vLLM.
    """
    words = state.bad_words[slots]
    prefixes, lasts = words[:, :, :-1], words[:, :, -1]
    num_before = prefixes.shape[2]
    index = positions[:, None] - num_before + jnp.arange(num_before, dtype=jnp.int32)[None, :]
    is_output = index >= state.prompt_len[slots][:, None]
    tail = state.token_ids[slots[:, None], jnp.where(is_output, index, 0)]
    tail = jnp.where(is_output, tail, -1)  # equals no token
    matches = ((prefixes == -1) | (prefixes == tail[:, None, :])).all(-1)
    return jnp.where(matches & (lasts >= 0), lasts, vocab_size)
