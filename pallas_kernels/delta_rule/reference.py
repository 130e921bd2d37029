"""One token of the gated delta rule for some rows, whose states are in slots."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Rows(NamedTuple):
    """A token of each of n rows. N key heads, J value heads for each, D key dim, F value dim."""

    slots: Int[Array, " n"]
    begins: Bool[Array, " n"]  # the state before the token is zero, whatever is in the slot
    q: Float[Array, "n N D"]
    k: Float[Array, "n N D"]
    v: Float[Array, "n N J F"]
    decay: Float[Array, "n N J"]
    beta: Float[Array, "n N J"]


def one_token(
    states: Float[Array, "Q N J D F"], rows: Rows, number: Int[Array, ""]
) -> tuple[Float[Array, "Q N J D F"], Float[Array, "n N J F"]]:
    """The states with those of the first `number` rows after their tokens, and these rows' outputs; all is float32.

    The slots of these rows differ. Those of other rows are not read, except that a kernel may write anything to the
    slot of the first: if there are no rows at all, it must be one whose content means nothing. Outputs of other rows
    mean nothing.
    """
    before = jnp.where(rows.begins[:, None, None, None, None], 0.0, states[rows.slots])
    after, out = next_state(before, rows)
    is_row = jnp.arange(rows.slots.size) < number
    where = jnp.where(is_row, rows.slots, states.shape[0])
    return states.at[where].set(after, mode="drop"), out


def next_state(before: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """[n, N, J, D, F] after the tokens, and outputs [n, N, J, F]: https://arxiv.org/abs/2412.06464."""
    q, k = rows.q[:, :, None, :, None], rows.k[:, :, None, :, None]
    state = before * rows.decay[..., None, None]
    correction = rows.beta[..., None] * (rows.v - jnp.sum(state * k, axis=-2))
    state = state + k * correction[..., None, :]
    return state, jnp.sum(state * q, axis=-2)
