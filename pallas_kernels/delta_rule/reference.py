"""The gated delta rule (https://arxiv.org/abs/2412.06464) for packed tokens of rows, whose states are in slots.

A head's state S [D, F] maps keys to values. A token decays it, S' = exp(g) S, and corrects the value of its key k by
the share b: S = S' + k (b (v - S'^T k))^T; its output is S^T q. All is float32.

Letters: Q slots, n rows, W windows of C tokens, P parts, N key heads, J value heads for each, D key dim, F value dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Tokens(NamedTuple):
    """What tokens do to states, with any leading axes. A token of zeros does nothing."""

    q: Float[Array, "... N D"]
    k: Float[Array, "... N D"]
    v: Float[Array, "... N J F"]
    log_decay: Float[Array, "... N J"]  # g, at most 0
    beta: Float[Array, "... N J"]  # b, in 0..1


class Rows(NamedTuple):
    """Rows of one token, [n, ...]."""

    slots: Int[Array, " n"]
    begins: Bool[Array, " n"]  # the state before the token is zero, whatever is in the slot
    tokens: Any  # `Tokens`, or those of another rule


class Parts(NamedTuple):
    """The tokens of a row in a window. Parts of a row follow each other, and so do those of a window."""

    window: Int[Array, " P"]
    first: Int[Array, " P"]  # token of the window
    end: Int[Array, " P"]
    # The state after the part is that of its tokens before this one; those behind it, of its row's last part alone, are
    # drafts: they are computed, and do not change it.
    kept_end: Int[Array, " P"]
    slots: Int[Array, " P"]
    is_first: Bool[Array, " P"]  # of its row
    begins: Bool[Array, " P"]  # the state before it is zero, whatever is in the slot


def one_token(
    states: Float[Array, "Q N J D F"], rows: Rows, number: Int[Array, ""]
) -> tuple[Float[Array, "Q N J D F"], Float[Array, "n N J F"]]:
    """The states with those of the first `number` rows after their tokens, and these rows' outputs.

    The slots of these rows differ. Those of other rows are not read; but if there are no rows at all, a kernel may
    write anything to the slot of the first. Outputs of other rows mean nothing.
    """
    before = jnp.where(rows.begins[:, None, None, None, None], 0.0, states[rows.slots])
    after, out = next_state(before, rows.tokens)
    is_row = jnp.arange(rows.slots.size) < number
    where = jnp.where(is_row, rows.slots, states.shape[0])
    return states.at[where].set(after, mode="drop"), out


def by_windows(
    states: Float[Array, "Q N J D F"], windows: Tokens, parts: Parts, number: Int[Array, ""]
) -> tuple[Float[Array, "Q N J D F"], Float[Array, "W C N J F"]]:
    """The states after the tokens of the first `number` parts, and the outputs of these; likewise for other parts.

    windows: [W, C, ...]. It takes concrete values.
    """
    out = jnp.zeros_like(windows.v)
    for part in range(int(number)):
        window, first, end, kept_end, slot, is_first, begins = (int(x[part]) for x in parts)
        state = states[slot][None]
        if is_first and begins:
            state = jnp.zeros_like(state)
        kept = state
        for token in range(first, end):
            state, new = next_state(state, Tokens(*(x[window, token][None] for x in windows)))
            out = out.at[window, token].set(new[0])
            kept = state if token < kept_end else kept
        states = states.at[slot].set(kept[0])
    return states, out


def next_state(before: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """The states [n, N, J, D, F] after a token of each row, and the outputs [n, N, J, F]."""
    q, k = tokens.q[:, :, None, :, None], tokens.k[:, :, None, :, None]
    state = before * jnp.exp(tokens.log_decay)[..., None, None]
    correction = tokens.beta[..., None] * (tokens.v - jnp.sum(state * k, axis=-2))
    state = state + k * correction[..., None, :]
    return state, jnp.sum(state * q, axis=-2)
