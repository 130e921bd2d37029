"""Lists of indices that XLA computes."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def chosen_first(chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Indices int32[n] of bool[n], the chosen ones first and in order; and how many are chosen."""
    order = jnp.argsort(~chosen, stable=True).astype(jnp.int32)
    return order, chosen.sum(dtype=jnp.int32)
