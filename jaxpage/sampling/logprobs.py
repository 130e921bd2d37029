"""Log-probabilities of sampled tokens: log-softmax and rank, in float32.

Knows a distribution given by its logits; which one that is, raw or processed, is the sampler's business.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpage.sampling.fields import SamplerFeature


def log_normaliser(logits: jax.Array) -> jax.Array:
    """float32[R]: logits minus this are log-probabilities. NaN where logits hold NaN or nothing but -inf."""
    best = logits.max(-1)
    return best + jnp.log(jnp.exp(logits - best[:, None]).sum(-1))


def ranks(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """int32[R]: how many tokens have a logit as large as that of ids[r] or larger; 1 = it is the only best."""
    own = jnp.take_along_axis(logits, ids[:, None], axis=1)
    # A float sum is exact up to 2**24 and vectorises better on a CPU than an integer one.
    return jnp.where(logits >= own, 1.0, 0.0).sum(-1).astype(jnp.int32)


# The most likely ids besides the sampled one; logprobs=0 asks for the sampled one alone.
TOP_LOGPROBS = SamplerFeature(name="top logprobs", asked=lambda r: bool(r.params.logprobs))
