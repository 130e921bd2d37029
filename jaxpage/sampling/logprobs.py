"""Log-probabilities of sampled tokens: log-softmax and rank, in float32.

The caller decides which logits to pass, raw or processed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxpage.sampling.fields import SamplerFeature
from jaxpage.sampling.truncation import find_best

if TYPE_CHECKING:
    from jaxpage.request import Request

# Which logits log-probabilities are computed from; modes that end in "logits" are not normalised.
LOGPROBS_MODES = ("raw", "temperature", "processed", "raw_logits", "processed_logits")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Scores:
    """Log-probabilities of given tokens. N tokens, W top logprobs."""

    logprobs: jax.Array  # float32[N]
    ranks: jax.Array  # int32[N], as `ranks`
    top_token_ids: jax.Array  # int32[N, W] best first, ties by id
    top_logprobs: jax.Array  # float32[N, W]
    vocabulary: jax.Array  # float32[N, V], of all tokens


def score(logits: jax.Array, ids: jax.Array, *, num_top: int, logprobs_mode: str) -> Scores:
    """Log-probabilities of ids, int32[N], from logits, float32[N, V], normalised as the mode says."""
    scored = logits - offset(logits, logits.max(-1), logprobs_mode)[:, None]
    own = logits_of(scored, ids)
    top, top_ids = find_best(scored, num_top)
    return Scores(
        logprobs=own,
        ranks=ranks(scored, own),
        top_token_ids=top_ids,
        top_logprobs=top,
        vocabulary=scored,
    )


def offset(logits: jax.Array, best: jax.Array, logprobs_mode: str) -> jax.Array:
    """float32[R]: what a mode takes from the logits of each row, of which best[r] is the largest."""
    if logprobs_mode.endswith("logits"):
        return jnp.zeros_like(best)
    return best + jnp.log(jnp.exp(logits - best[:, None]).sum(-1))


def log_normaliser(logits: jax.Array) -> jax.Array:
    """float32[R]: logits minus this are log-probabilities. NaN where logits hold NaN or nothing but -inf."""
    return offset(logits, logits.max(-1), "raw")


def logits_of(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """float32[R]: logits[r, ids[r]]."""
    return jnp.take_along_axis(logits, ids[:, None], axis=1)[:, 0]


def ranks(logits: jax.Array, own: jax.Array) -> jax.Array:
    """int32[R]: how many tokens have a logit at least as large as own[r]; 1 = it is that of the only best."""
    # A float sum is exact up to 2**24 and vectorises better on a CPU than an integer one.
    return jnp.where(logits >= own[:, None], 1.0, 0.0).sum(-1).astype(jnp.int32)


def _wants_any(request: Request) -> bool:
    return request.params.logprobs is not None or request.wants_vocabulary


def _wants_best(request: Request) -> bool:
    return bool(request.params.logprobs) and not request.wants_vocabulary


# Of the sampled token, with its rank. Top logprobs need what it computes.
LOGPROBS = SamplerFeature(name="logprobs", asked=_wants_any)
# The most likely ids besides the sampled one; logprobs=0 asks for the sampled one alone.
TOP_LOGPROBS = SamplerFeature(name="top logprobs", asked=_wants_best)
