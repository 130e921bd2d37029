"""The gated delta rule for the packed tokens of a step, whose sequences have states in slots.

Tokens are divided into windows of CHUNK, wherever rows begin and end. What does not depend on states is computed for
all windows at once, and then the parts of rows in windows follow one after the other. Rows of one token need no window:
on a TPU a kernel computes them in place.

All loops run as often as there is work, and change the slots in place: a conditional would copy them.

Letters: Q slots, R rows, T tokens, W windows; the others as in `delta_rule`.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpage.ops.delta_rule import CHUNK, Tokens, advance, prepare
from jaxpage.ops.lists import chosen_first
from jaxpage.plan import NULL_SLOT
from pallas_kernels.delta_rule import tpu, xla
from pallas_kernels.delta_rule.reference import Rows
from pallas_kernels.lists import expand

_TOGETHER = 8  # rows of one token, in steps with longer ones


class StateRows(NamedTuple):
    """The rows of a step, and where their states are."""

    slots: jax.Array  # int32[R]
    first: jax.Array  # int32[R]: the first token of each among the packed ones
    num_tokens: jax.Array  # int32[R]
    is_live: jax.Array  # bool[R]: it has tokens that count
    begins: jax.Array  # bool[R]: its tokens are the first of the sequence
    parents: jax.Array  # int32[R]: the row itself, or the one before it that a sibling continues
    is_sibling: jax.Array  # bool[R]: it has no tokens, and gets the state of its parent


def of_packed_tokens(
    field: jax.Array, tokens: Tokens, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """`field` [Q, N, J, D, F] with the state after each row, and the outputs float32[T, N, J, F]."""
    field, out = _by_windows(field, tokens, rows)
    is_single = rows.is_live & (rows.num_tokens == 1)
    field, out = _singles(field, out, tokens, rows, is_single, together=_TOGETHER)
    return _to_siblings(field, rows), out


def of_single_tokens(
    field: jax.Array, tokens: Tokens, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """The same for rows that all have one token."""
    out = jnp.zeros_like(tokens.v)
    return _singles(field, out, tokens, rows, rows.is_live, together=rows.slots.size)


def _by_windows(field: jax.Array, tokens: Tokens, rows: StateRows) -> tuple[jax.Array, jax.Array]:
    """The rows of several tokens; zeros for the outputs of others."""
    num_tokens = tokens.q.shape[0]
    num_windows = -(-num_tokens // CHUNK)
    is_several = rows.is_live & (rows.num_tokens > 1)
    place = jnp.arange(num_windows * CHUNK, dtype=jnp.int32)
    row_of = jnp.searchsorted(
        rows.first + rows.num_tokens, place, side="right", method="compare_all"
    )
    row_of = jnp.minimum(row_of, rows.slots.size - 1).astype(jnp.int32)
    counts = is_several[row_of] & (place < rows.first[-1] + rows.num_tokens[-1])

    def by_window(x: jax.Array) -> jax.Array:
        """[W, CHUNK, ...], zero for tokens that do not count."""
        x = jnp.pad(x, [(0, num_windows * CHUNK - num_tokens), *[(0, 0)] * (x.ndim - 1)])
        x = jnp.where(counts.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0)
        return x.reshape(num_windows, CHUNK, *x.shape[1:])

    sequence = row_of.reshape(num_windows, CHUNK)
    windows = jax.vmap(prepare)(jax.tree.map(by_window, tokens), sequence)
    last_token = rows.first + rows.num_tokens - 1
    num_parts = jnp.where(is_several, last_token // CHUNK - rows.first // CHUNK + 1, 0)
    part_rows, numbers, total = expand(num_parts, num_windows + rows.slots.size)

    def one_part(index: jax.Array, carry: tuple[jax.Array, jax.Array]):
        field, out = carry
        row, number = part_rows[index], numbers[index]
        slot, window = rows.slots[row], rows.first[row] // CHUNK + number
        state = jnp.where(rows.begins[row] & (number == 0), 0.0, field[slot])
        chunk = jax.tree.map(lambda x: x[window], windows)
        is_own = sequence[window] == row
        last = jnp.minimum(last_token[row] - window * CHUNK, CHUNK - 1)
        state, new = advance(state, chunk, is_own, last)
        new = jnp.where(is_own[None, None, :, None], new, out[window])
        return field.at[slot].set(state), out.at[window].set(new)

    _, num_heads, num_values, value_dim = tokens.v.shape
    out = jnp.zeros((num_windows, num_heads, num_values, CHUNK, value_dim), jnp.float32)
    field, out = lax.fori_loop(0, total[0], one_part, (field, out))
    out = out.transpose(0, 3, 1, 2, 4).reshape(-1, *tokens.v.shape[1:])
    return field, out[:num_tokens]


def _singles(
    field: jax.Array,
    out: jax.Array,
    tokens: Tokens,
    rows: StateRows,
    is_single: jax.Array,
    *,
    together: int,
) -> tuple[jax.Array, jax.Array]:
    """The rows of one token. together: how many of them XLA computes at a time."""
    order, number = chosen_first(is_single)
    exists = jnp.arange(order.size) < number
    first = rows.first[order]
    q, k, v, log_decay, beta = (x[first] for x in tokens)
    given = Rows(
        slots=jnp.where(exists, rows.slots[order], NULL_SLOT),
        begins=rows.begins[order],
        q=q,
        k=k,
        v=v,
        decay=jnp.exp(log_decay),
        beta=beta,
    )
    by_xla = partial(xla.one_token, together=together)
    kernel = by_xla if tpu.unsupported_reason(field) else tpu.one_token
    field, new = lax.platform_dependent(field, given, number, tpu=kernel, default=by_xla)
    return field, out.at[jnp.where(exists, first, out.shape[0])].set(new, mode="drop")


def _to_siblings(field: jax.Array, rows: StateRows) -> jax.Array:
    order, number = chosen_first(rows.is_sibling)

    def one(index: jax.Array, field: jax.Array) -> jax.Array:
        row = order[index]
        return field.at[rows.slots[row]].set(field[rows.slots[rows.parents[row]]])

    return lax.fori_loop(0, number, one, field)
