"""From logits to tokens: the part of the compiled step that honours `SamplingParams`. One pure function.

Order of operations, vLLM's: the mask of a grammar; allowed ids, bad words, min_tokens; logit bias; repetition,
frequency and presence penalties; a forced end of thinking; greedy rows take the argmax here; temperature; min_p; top-k;
top-p; a draw.

Every parameter is read from the request state by slot, and what a row samples depends on its own slot, logits and
position alone. Parts that no row of a step needs are skipped on the device by the step's feature bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxpage.plan import NULL_SLOT
from jaxpage.sampling.constraints import is_set
from jaxpage.sampling.draw import Distributions, draw, draw_among
from jaxpage.sampling.features import ASKED, BEFORE_ARGMAX, bits, processor_bits
from jaxpage.sampling.fields import Processors, RequestState, SamplerFeature
from jaxpage.sampling.keys import RANDOM, Keys, row_keys
from jaxpage.sampling.logprobs import (
    LOGPROBS,
    LOGPROBS_MODES,
    TOP_LOGPROBS,
    logits_of,
    offset,
    ranks,
)
from jaxpage.sampling.row_ops import argmax, first_of, where_any
from jaxpage.sampling.truncation import TRUNCATION, find_best, truncate_rows

T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One token for each row. R rows, W top logprobs."""

    token_ids: jax.Array  # int32[R]
    logprobs: jax.Array  # float32[R] of the sampled tokens
    ranks: jax.Array  # int32[R] tokens at least as likely as the sampled one; 1 = the most likely
    # int32[R, W] best first, ties by id; means nothing unless the step asks for TOP_LOGPROBS
    top_token_ids: jax.Array
    top_logprobs: jax.Array  # float32[R, W]


def sample(
    logits: jax.Array,
    state: RequestState,
    slots: jax.Array,
    positions: jax.Array,
    features: jax.Array,
    *,
    num_top_logprobs: int,
    logprobs_mode: str,
    processors: Processors = (),
) -> Sampled:
    """Samples one token for each row.

    logits: float32[R, V]. slots: int32[R]. positions: int32[R], where the sampled token will stand: the number of
    known tokens, whose ids are `state["token_ids"][slot, :position]`. features: int32[], see `features.bits`; a bit
    that is set without need changes nothing but the time. V at most 2**24.

    logprobs_mode names the distribution of logprobs, ranks and top logprobs: "raw", of the logits as given;
    "temperature", of the logits divided by the temperature (1 for greedy rows), as RL trainers recompute it;
    "processed", of what the token was drawn from, renormalised; "raw_logits" and "processed_logits": the logits of
    which "raw" and "processed" are made, in the place of logprobs.

    processors: those of the engine, see `features.processors_of`; they act last of what comes before the argmax.

    Token ids are within [0, V) whatever the logits hold. With NaN among a row's logits the id means nothing, and
    its raw logprob is NaN, which tells. A row whose tokens are all forbidden samples id 0. If no row asks for logprobs,
    those that are not NaN are 0, and so are the ranks.

    Raises ValueError, when traced, for an unknown logprobs_mode or num_top_logprobs outside 0..V.
    """
    vocab_size = logits.shape[1]
    if logprobs_mode not in LOGPROBS_MODES:
        raise ValueError(f"logprobs_mode={logprobs_mode!r}, choose one of {LOGPROBS_MODES}")
    if not 0 <= num_top_logprobs <= vocab_size:
        raise ValueError(
            f"num_top_logprobs={num_top_logprobs} is not in 0..{vocab_size}, the vocabulary size"
        )
    best_given = logits.max(-1)
    choose = partial(_choose, logits, best_given, state, slots, positions, features, processors)
    if logprobs_mode.startswith("processed"):
        token_ids, scored = choose()
    else:
        scored = _unprocessed(logits, state, slots, logprobs_mode)
        # The processed logits die within the branch.
        asked = bits(*BEFORE_ARGMAX, RANDOM) | sum(processor_bits(processors))
        token_ids = lax.cond(
            (features & asked) != 0,
            lambda: choose()[0],
            lambda: first_of(logits, best_given),
        )
    best = scored.max(-1)

    def score():
        own = logits_of(scored, token_ids)
        normaliser = offset(scored, best, logprobs_mode)
        return own - normaliser, ranks(scored, own), normaliser

    logprobs, rank, normaliser = lax.cond(
        _any(features, LOGPROBS, TOP_LOGPROBS),
        score,
        lambda: (
            jnp.where(jnp.isfinite(best), 0.0, jnp.nan),
            jnp.zeros(best.shape, jnp.int32),
            jnp.zeros(best.shape),
        ),
    )
    top_ids, top = _top(scored, normaliser, features, num_top_logprobs)
    return Sampled(
        token_ids=token_ids, logprobs=logprobs, ranks=rank, top_token_ids=top_ids, top_logprobs=top
    )


def _top(
    scored: jax.Array, normaliser: jax.Array, features: jax.Array, num_top_logprobs: int
) -> tuple[jax.Array, jax.Array]:
    """(int32[R, W] the most likely tokens, float32[R, W] their log-probabilities), if the step asks for them."""
    shape = (scored.shape[0], num_top_logprobs)
    top_ids, top = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    if num_top_logprobs:
        top, top_ids = lax.cond(
            _any(features, TOP_LOGPROBS),
            lambda: find_best(scored, num_top_logprobs),
            lambda: (top, top_ids),
        )
        top = top - normaliser[:, None]
    return top_ids, top


def vocabulary(
    logits: jax.Array,
    state: RequestState,
    slots: jax.Array,
    positions: jax.Array,
    features: jax.Array,
    *,
    logprobs_mode: str,
    processors: Processors = (),
) -> jax.Array:
    """float32[R, V]: the logprobs of every token (logits with the `*_logits` modes), for rows that are about to sample.

    The arguments are those of `sample`.
    """
    if logprobs_mode.startswith("processed"):
        best = logits.max(-1)
        _, scored = _choose(logits, best, state, slots, positions, features, processors)
    else:
        scored = _unprocessed(logits, state, slots, logprobs_mode)
    return scored - offset(scored, scored.max(-1), logprobs_mode)[:, None]


def stops(token_ids: jax.Array, state: RequestState, slots: jax.Array) -> jax.Array:
    """bool[R]: whether token_ids[r] ends the sequence in slots[r]."""
    return is_set(state["stop_mask"], token_ids, slots)


def _choose(
    logits: jax.Array,
    best: jax.Array,
    state: RequestState,
    slots: jax.Array,
    positions: jax.Array,
    features: jax.Array,
    processors: Processors,
) -> tuple[jax.Array, jax.Array]:
    """(int32[R] tokens, float32[R, V] the processed logits they were chosen by). best: float32[R], logits.max(-1)."""

    def apply(feature, bit, current, *, is_own=False):
        def change():
            changed = feature.apply(current.logits, state, slots, positions)
            if not is_own:
                return changed
            # Its function need not know that there are rows which do not ask for it.
            asks = (state[ASKED][slots] & bit) != 0
            return jnp.where(asks[:, None], changed, current.logits)

        asked = (features & bit) != 0
        adjusted = lax.cond(asked, change, lambda: current.adjusted)
        is_adjusted = current.is_adjusted | asked
        return replace(current, adjusted=adjusted, is_adjusted=is_adjusted)

    def random():
        # Hashed and gathered here, once for all branches that draw.
        keys = row_keys(state["seed"][slots], state["sequence_index"][slots], positions)
        temperature = state["temperature"][slots]
        draw_rows = partial(_draw, keys=keys, temperature=temperature, state=state, slots=slots)
        lowest, token_ids = current.of(partial(draw_rows, features=features))
        # Computed only if the caller uses it.
        kept = current.logits >= lowest[:, None]
        kept = jnp.where(kept, current.logits / _temperature(state, slots), -jnp.inf)
        return token_ids, kept

    adjusted = lax.platform_dependent(
        logits, tpu=lambda x: lax.empty(x.shape, x.dtype), default=lambda x: x
    )
    current = _AdjustedLogits(
        original=logits,
        best_of_original=best,
        adjusted=adjusted,
        is_adjusted=jnp.bool_(False),
    )
    for feature in BEFORE_ARGMAX:
        current = apply(feature, bits(feature), current)
    for processor, bit in zip(processors, processor_bits(processors), strict=True):
        current = apply(processor, bit, current, is_own=True)

    def greedy():
        return current.of(lambda logits, _: argmax(logits)), current.logits

    return lax.cond(_any(features, RANDOM), random, greedy)


# A separate jit, like what it calls, so that it is traced once and not in each branch; XLA inlines it.
@jax.jit
def _draw(
    logits: jax.Array,
    best: jax.Array,
    *,
    keys: Keys,
    temperature: jax.Array,
    state: RequestState,
    slots: jax.Array,
    features: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """(float32[R] the least logits that are kept, int32[R] tokens); greedy rows take the argmax. best: logits.max(-1).

    keys and temperature: those of the rows. How a row chooses depends on the row alone, so its token does too.
    """
    is_random = (temperature > 0) & jnp.isfinite(best)
    rows = Distributions(
        best=best,
        lowest=jnp.full(best.shape, -jnp.inf),
        temperature=jnp.where(temperature > 0, temperature, 1.0),
        keys=keys,
    )

    def draw_among_best():
        kept = truncate_rows(logits, state, slots)
        token_ids = draw_among(kept.best, kept.best_ids, replace(rows, lowest=kept.lowest))
        return kept.lowest, is_random & kept.is_among_best, token_ids

    nothing = jnp.zeros(best.shape, bool), jnp.zeros(best.shape, jnp.int32)
    lowest, is_drawn, token_ids = lax.cond(
        _any(features, TRUNCATION), draw_among_best, lambda: (rows.lowest, *nothing)
    )
    token_ids = where_any(
        is_random & ~is_drawn,
        lambda: draw(logits, replace(rows, lowest=lowest)),
        token_ids,
        of=logits,
    )
    is_greedy = ~is_random & (slots != NULL_SLOT)
    return lowest, where_any(is_greedy, lambda: argmax(logits), token_ids, of=logits)


@dataclass(frozen=True, kw_only=True)
class _AdjustedLogits:
    """Logits that features may change.

    On a TPU the adjusted logits have an array of their own: a branch that passed on the original ones, which are needed
    afterwards, would copy them. Elsewhere they are copied, because on a CPU that costs less than a choice in each pass.
    """

    original: jax.Array  # float32[R, V]
    best_of_original: jax.Array  # float32[R], the largest ones
    adjusted: jax.Array  # float32[R, V], on a TPU undefined unless is_adjusted
    is_adjusted: jax.Array  # bool[]

    @property
    def logits(self) -> jax.Array:
        """Chosen anew by each user, so that no pass over the logits does nothing else."""
        return lax.platform_dependent(
            *(self.is_adjusted, self.adjusted, self.original),
            tpu=jnp.where,
            default=lambda is_adjusted, adjusted, original: adjusted,
        )

    def of(self, function: Callable[[jax.Array, jax.Array], T]) -> T:
        """`function(logits, logits.max(-1))` of the adjusted or the original logits.

        On a TPU in two branches, since all passes of a function that chose would read both.
        """

        def of_adjusted():
            best = lax.platform_dependent(
                self.adjusted,
                # A maximum alone costs more than twice as much there.
                tpu=lambda x: logits_of(x, argmax(x)),
                default=lambda x: x.max(-1),
            )
            return function(self.adjusted, best)

        def of_original():
            return function(self.original, self.best_of_original)

        return lax.platform_dependent(
            tpu=lambda: lax.cond(self.is_adjusted, of_adjusted, of_original), default=of_adjusted
        )


def _unprocessed(
    logits: jax.Array, state: RequestState, slots: jax.Array, logprobs_mode: str
) -> jax.Array:
    """The logits of a mode that does not look at how the token was chosen."""
    return logits / _temperature(state, slots) if logprobs_mode == "temperature" else logits


def _temperature(state: RequestState, slots: jax.Array) -> jax.Array:
    """float32[R, 1]; 1 for greedy rows."""
    temperature = state["temperature"][slots][:, None]
    return jnp.where(temperature > 0, temperature, 1.0)


def _any(features: jax.Array, *wanted: SamplerFeature) -> jax.Array:
    return (features & bits(*wanted)) != 0
