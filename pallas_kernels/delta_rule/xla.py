"""The gated delta rule for a token of each row in plain XLA, for every platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.delta_rule.reference import Rows, next_state


def one_token(
    states: Float[Array, "Q N J D F"], rows: Rows, number: Int[Array, ""], *, together: int
) -> tuple[Float[Array, "Q N J D F"], Float[Array, "n N J F"]]:
    """`reference.one_token`, `together` rows at a time, and no more often than there are rows."""
    size = rows.slots.size
    padded = jax.tree.map(
        lambda x: jnp.pad(x, [(0, -size % together), *[(0, 0)] * (x.ndim - 1)]), rows
    )

    def some(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        states, out = carry
        first = index * together
        own = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, together), padded)
        before = jnp.where(own.begins[:, None, None, None, None], 0.0, states[own.slots])
        after, new = next_state(before, own)
        is_row = first + jnp.arange(together) < number
        where = jnp.where(is_row, own.slots, states.shape[0])
        states = states.at[where].set(after, mode="drop")
        return states, lax.dynamic_update_slice_in_dim(out, new, first, 0)

    out = jnp.zeros_like(padded.v)
    states, out = lax.fori_loop(0, -(-number // together), some, (states, out))
    return states, out[:size]
