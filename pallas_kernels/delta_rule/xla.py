"""Recurrent states for packed tokens in plain XLA, for every platform, by the rule of their tokens.

Loops run as often as there is work, and change the states in place: a conditional would copy them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.delta_rule.chunks import DELTA, Rule
from pallas_kernels.delta_rule.reference import Parts, Rows


def one_token(
    states: Float[Array, "Q ..."],
    rows: Rows,
    number: Int[Array, ""],
    *,
    together: int,
    rule: Rule = DELTA,
) -> tuple[Float[Array, "Q ..."], Float[Array, "n ..."]]:
    """`reference.one_token`, `together` rows at a time, and no more often than there are rows."""
    return _in_groups(
        states, rows, number, jnp.zeros_like(rows.tokens.v), rule.next_state, together
    )


def one_window(
    states: Float[Array, "Q ..."],
    windows: Any,
    parts: Parts,
    number: Int[Array, ""],
    *,
    together: int,
    rule: Rule = DELTA,
) -> tuple[Float[Array, "Q ..."], Float[Array, "n C ..."]]:
    """`reference.by_windows` for rows with a window each, which begins with their tokens: `together` of them at a time.
    Tokens behind those of a row are zeros. Slots of the first `number` rows differ.
    """
    num_rows, size, *heads, value_dim = windows.v.shape
    place = jnp.arange(size, dtype=jnp.int32)[None]
    sequence, is_kept = jnp.zeros(size, jnp.int32), place < parts.kept_end[:, None]
    chunks = jax.vmap(rule.prepare, in_axes=(0, None, 0))(windows, sequence, is_kept)
    rows = Rows(parts.slots, parts.begins, chunks)
    all_own = jnp.ones(size, jnp.bool_)
    change = jax.vmap(partial(rule.advance, is_own=all_own, last=0))
    out = jnp.zeros((num_rows, *heads, size, value_dim), jnp.float32)
    states, out = _in_groups(states, rows, number, out, change, together)
    return states, jnp.moveaxis(out, -2, 1)


def _in_groups(
    states: jax.Array,
    rows: Rows,
    number: jax.Array,
    out: jax.Array,
    change: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]],
    together: int,
) -> tuple[jax.Array, jax.Array]:
    """The states with those of the first `number` rows after `change(states, tokens) -> (states, outputs)`, and `out`
    with the outputs.
    """
    size = rows.slots.size
    padded, out = jax.tree.map(
        lambda x: jnp.pad(x, [(0, -size % together), *[(0, 0)] * (x.ndim - 1)]), (rows, out)
    )

    def some(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        states, out = carry
        first = index * together
        own = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, together), padded)
        begins = jnp.expand_dims(own.begins, range(1, states.ndim))
        before = jnp.where(begins, 0.0, states[own.slots])
        after, new = change(before, own.tokens)
        is_row = first + jnp.arange(together) < number
        where = jnp.where(is_row, own.slots, states.shape[0])
        states = states.at[where].set(after, mode="drop")
        return states, lax.dynamic_update_slice_in_dim(out, new, first, 0)

    states, out = lax.fori_loop(0, -(-number // together), some, (states, out))
    return states, out[:size]


def by_windows(
    states: Float[Array, "Q ..."],
    windows: Any,
    parts: Parts,
    number: Int[Array, ""],
    *,
    rule: Rule = DELTA,
) -> tuple[Float[Array, "Q ..."], Float[Array, "W C ..."]]:
    """`reference.by_windows`. What does not depend on states is computed for all windows at once."""
    num_windows, size, *heads, value_dim = windows.v.shape
    place = jnp.arange(size, dtype=jnp.int32)
    is_part = jnp.arange(parts.window.size) < number
    # Of each token, the part that it is in: the last one that begins at or before it.
    begin = jnp.where(is_part, parts.window * size + parts.first, num_windows * size)
    part_of = jnp.zeros(num_windows * size, jnp.int32).at[begin].add(1, mode="drop")
    number_of = jnp.cumsum(part_of, dtype=jnp.int32)
    # Tokens before all parts are of part 0; they do not matter.
    kept_end = (parts.window * size + parts.kept_end)[jnp.maximum(number_of - 1, 0)]
    is_kept = jnp.arange(num_windows * size) < kept_end
    chunks = jax.vmap(rule.prepare)(
        windows, number_of.reshape(num_windows, size), is_kept.reshape(num_windows, size)
    )

    def one_part(index: jax.Array, carry: tuple[jax.Array, jax.Array]):
        states, out = carry
        part = jax.tree.map(lambda x: x[index], parts)
        state = jnp.where(part.is_first & part.begins, 0.0, states[part.slots])
        is_own = (place >= part.first) & (place < part.end)
        chunk = jax.tree.map(lambda x: x[part.window], chunks)
        state, new = rule.advance(state, chunk, is_own, part.end - 1)
        new = jnp.where(jnp.expand_dims(is_own, expanded), new, out[part.window])
        return states.at[part.slots].set(state), out.at[part.window].set(new)

    out = jnp.zeros((num_windows, *heads, size, value_dim), jnp.float32)
    expanded = (*range(len(heads)), -1)
    states, out = lax.fori_loop(0, number, one_part, (states, out))
    return states, jnp.moveaxis(out, -2, 1)
