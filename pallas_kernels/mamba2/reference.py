"""Mamba-2 (https://arxiv.org/abs/2405.21060): linear attention whose states decay, for packed tokens of rows.

All heads with the same keys have one state S [D, J F]: a token decays the F columns of each head, S' = exp(g) S, and
adds S = S' + k v^T; its outputs are S^T q. All is float32. Wherever rows and parts of windows are meant, those of
`delta_rule.reference` are.

Letters: Q slots, n rows, N key heads (groups), J value heads for each, D key dim, F value dim, V = J F.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.delta_rule.reference import Rows


class Tokens(NamedTuple):
    """What tokens do to states, with any leading axes. A token of zeros does nothing."""

    q: Float[Array, "... N D"]  # C
    k: Float[Array, "... N D"]  # B
    v: Float[Array, "... N V"]  # x times its time step
    log_decay: Float[Array, "... N J"]  # g, at most 0


def one_token(
    states: Float[Array, "Q N D V"], rows: Rows, number: Int[Array, ""]
) -> tuple[Float[Array, "Q N D V"], Float[Array, "n N V"]]:
    """As `delta_rule.reference.one_token`."""
    before = jnp.where(rows.begins[:, None, None, None], 0.0, states[rows.slots])
    after, out = next_state(before, rows.tokens)
    is_row = jnp.arange(rows.slots.size) < number
    where = jnp.where(is_row, rows.slots, states.shape[0])
    return states.at[where].set(after, mode="drop"), out


def next_state(before: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """The states [n, N, D, V] after a token of each row, and the outputs [n, N, V]."""
    decay = of_columns(jnp.exp(tokens.log_decay), before.shape[-1])
    state = before * decay[..., None, :] + tokens.k[..., None] * tokens.v[..., None, :]
    return state, jnp.sum(state * tokens.q[..., None], axis=-2)


def of_columns(x: jax.Array, num_columns: int) -> jax.Array:
    """[..., V] of what each head has, [..., J]."""
    return jnp.repeat(x, num_columns // x.shape[-1], axis=-1, total_repeat_length=num_columns)
