"""Which tokens a row may sample: allowed ids, bad words, min_tokens; and logit_bias. Meaning and order are vLLM's.

Knows masks of one bit per token and the token history of a row. Knows nothing of probabilities. `step_mask` is
what a grammar allows for the next token alone; it is set before each step that samples such a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.ops.token_mask import mask_and_add
from jaxpage.sampling.fields import RequestState, SamplerFeature, SlotField, token_bits

if TYPE_CHECKING:
    from jaxpage.request import Request

# Both are multiples of `pallas_kernels.token_mask.xla.CHUNK`.
MAX_LOGIT_BIAS = 1024  # logit_bias entries of one request
MAX_BAD_WORDS = 128  # bad_words of one request, after tokenisation
MAX_BAD_WORD_LEN = 16  # tokens in one of them

_ALL_TOKENS = 0xFFFFFFFF  # in each word of a mask
_MOST_INT32 = 2**31 - 1
_FINITE_BAN = -1e30  # far below every logit, and a thousand of them are far above the least float32
_NO_TOKEN = _MOST_INT32  # an id outside every vocabulary: scatters drop it


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


def is_set(mask: jax.Array, ids: jax.Array, slots: jax.Array) -> jax.Array:
    """bool[R]: whether bit `ids[r]` of `mask[slots[r]]` is set. Reads R words of mask: uint32[Q, ceil(V/32)]."""
    word = mask[slots, ids // 32]
    return (word >> (ids % 32).astype(jnp.uint32)) & 1 == 1


def constrain(
    logits: jax.Array, state: RequestState, slots: jax.Array, positions: jax.Array
) -> jax.Array:
    """float32[R, V]: forbidden tokens are -inf, then biases are added; a bias does not bring back a forbidden token.

    What would leave a row none of the tokens that its grammar allows does not count: an output is valid first of all.
    If bad words and biases forbid all of them, they are equally likely.
    """
    vocab_size = logits.shape[1]
    too_short = positions < state["min_len"][slots]
    stopping = jnp.where(too_short[:, None], state["min_tokens_mask"][slots], 0)
    step_mask = state["step_mask"][slots]
    has_grammar = (~step_mask != 0).any(-1)
    allowed = state["allowed_mask"][slots] & step_mask & ~stopping
    is_left = ~has_grammar | (allowed != 0).any(-1)
    allowed = jnp.where(is_left[:, None], allowed, step_mask)
    banned = _ends_of_bad_words(state, slots, positions, vocab_size)
    ids = jnp.concatenate([banned, state["bias_ids"][slots]], axis=1)
    values = jnp.pad(
        state["bias_values"][slots],
        ((0, 0), (banned.shape[1], 0)),
        constant_values=-jnp.inf,
    )
    # Beside a grammar's own -inf these bans are finite: if it allows nothing else, what they forbid is sampled.
    values = jnp.where(has_grammar[:, None], jnp.maximum(values, _FINITE_BAN), values)
    return mask_and_add(logits, allowed, ids, values)


def _ends_of_bad_words(
    state: RequestState, slots: jax.Array, positions: jax.Array, vocab_size: int
) -> jax.Array:
    """int32[R, MAX_BAD_WORDS]: the last token of each bad word whose other tokens end the output so far, else V.

    Only the output counts: a word that began in the prompt is not recognised, as in vLLM.
    """
    words = state["bad_words"][slots]
    prefixes, lasts = words[:, :, :-1], words[:, :, -1]
    num_before = prefixes.shape[2]
    index = positions[:, None] - num_before + jnp.arange(num_before, dtype=jnp.int32)[None, :]
    is_output = index >= state["prompt_len"][slots][:, None]
    tail = state["token_ids"][slots[:, None], jnp.where(is_output, index, 0)]
    tail = jnp.where(is_output, tail, -1)  # equals no token
    matches = ((prefixes == -1) | (prefixes == tail[:, None, :])).all(-1)
    return jnp.where(matches & (lasts >= 0), lasts, vocab_size)


def _asked(request: Request) -> bool:
    params = request.params
    lists = (params.allowed_token_ids, params.logit_bias, request.bad_words_token_ids)
    return any(lists) or params.min_tokens > 0 or request.mask_source is not None


def _min_tokens_mask(request: Request, vocab_size: int) -> np.ndarray | None:
    if request.params.min_tokens == 0:
        return None
    return pack_mask(request.stop_token_ids | request.all_eos_token_ids, vocab_size)


def _allowed_mask(request: Request, vocab_size: int) -> np.ndarray | None:
    ids = request.params.allowed_token_ids
    return None if ids is None else pack_mask(ids, vocab_size)


def _bias_ids(request: Request, vocab_size: int) -> np.ndarray | None:
    bias = request.params.logit_bias
    return _padded(list(bias), MAX_LOGIT_BIAS, _NO_TOKEN) if bias else None


def _bias_values(request: Request, vocab_size: int) -> np.ndarray | None:
    bias = request.params.logit_bias
    return _padded(list(bias.values()), MAX_LOGIT_BIAS, 0.0) if bias else None


def _padded(values: list, length: int, fill: int | float) -> np.ndarray:
    return np.array(values + [fill] * (length - len(values)))


def _bad_words(request: Request, vocab_size: int) -> np.ndarray | None:
    if not request.bad_words_token_ids:
        return None
    words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_LEN), -1)
    for row, word in zip(words, request.bad_words_token_ids, strict=False):
        row[-len(word) :] = word
    return words


CONSTRAINTS = SamplerFeature(
    name="constraints",
    fields=(
        # while the sequence is shorter than `min_len`, the tokens of `min_tokens_mask` are forbidden
        SlotField(
            name="min_len",
            value=lambda r, _: min(len(r.prompt_token_ids) + r.params.min_tokens, _MOST_INT32),
        ),
        SlotField(name="min_tokens_mask", dtype="uint32", shape=token_bits, value=_min_tokens_mask),
        # these tokens end the sequence
        SlotField(
            name="stop_mask",
            dtype="uint32",
            shape=token_bits,
            value=lambda r, vocab_size: pack_mask(r.stop_token_ids, vocab_size),
        ),
        SlotField(
            name="allowed_mask",
            dtype="uint32",
            shape=token_bits,
            fill=_ALL_TOKENS,
            value=_allowed_mask,
        ),
        SlotField(
            name="step_mask",
            dtype="uint32",
            shape=token_bits,
            fill=_ALL_TOKENS,
            value=lambda r, _: None,
        ),
        SlotField(
            name="bias_ids", shape=lambda _: (MAX_LOGIT_BIAS,), fill=_NO_TOKEN, value=_bias_ids
        ),
        SlotField(
            name="bias_values",
            dtype="float32",
            shape=lambda _: (MAX_LOGIT_BIAS,),
            value=_bias_values,
        ),
        # right-aligned, padding on the left
        SlotField(
            name="bad_words",
            shape=lambda _: (MAX_BAD_WORDS, MAX_BAD_WORD_LEN),
            fill=-1,
            value=_bad_words,
        ),
    ),
    asked=_asked,
    apply=constrain,
)
