"""Recurrent states for the packed tokens of a step, the gated delta rule's or Mamba-2's. Rows of one token are the
kernel's that was chosen, see `state_kernel`; longer ones a kernel's on TPUs where that can serve, else XLA's.

Tokens are divided into windows of CHUNK, wherever rows begin and end, and a row has a part in each window that it
reaches into. Rows of one token need no window. Rows with drafts have one each, see `_with_drafts`.

Letters: Q slots, R rows, T tokens, W windows, K most drafts of a row; the others, behind `...`, as in
`pallas_kernels/delta_rule/reference.py` or `mamba2/reference.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpage.ops.delta_rule import CHUNK, AnyTokens, rule_of
from jaxpage.ops.lists import chosen_first
from jaxpage.ops.state_kernel import one_token_of
from jaxpage.plan import NULL_SLOT
from pallas_kernels.delta_rule import tpu_windows, xla
from pallas_kernels.delta_rule.reference import Parts, Rows, Tokens
from pallas_kernels.lists import expand
from pallas_kernels.mamba2 import tpu_windows as mamba2_windows

_TOGETHER = 8  # rows of one token, in steps with longer ones
_WINDOWS_TOGETHER = 16  # rows with drafts
_SMALLEST_WINDOW = 8  # a TPU's registers have eight rows
# Of a row in a step, so that those of two steps and a token fit in a chunk.
MOST_DRAFTS = (CHUNK - 1) // 2


class StateRows(NamedTuple):
    """The rows of a step, and where their states are."""

    slots: jax.Array  # int32[R]
    first: jax.Array  # int32[R]: the first token of each among the packed ones
    num_tokens: jax.Array  # int32[R]
    is_live: jax.Array  # bool[R]: it has tokens that count
    begins: jax.Array  # bool[R]: its tokens are the first of the sequence
    parents: jax.Array  # int32[R]: the row itself, or the one before it that a sibling continues
    is_sibling: jax.Array  # bool[R]: it has no tokens, and gets the state of its parent
    num_drafts: jax.Array  # int32[R]: how many of its last tokens are drafts
    # int32[R]: how many drafts of the step before were accepted; its first token is behind them
    num_accepted: jax.Array

    @property
    def has_drafts(self) -> jax.Array:
        """bool[R]: it has drafts, or the step before had some that were accepted."""
        return self.is_live & ((self.num_drafts > 0) | (self.num_accepted > 0))


def window_of_drafts(most: int) -> int:
    """How many tokens the window of a row has in steps with up to `most` drafts a row."""
    return max(1 << (2 * most).bit_length(), _SMALLEST_WINDOW)


def of_packed_tokens(
    field: jax.Array,
    tokens: AnyTokens,
    rows: StateRows,
    *,
    kernel: str | None,
    drafts: AnyTokens | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`field` [Q, ...] with the state after each row's last token that is no draft, and the outputs float32[T, ...].

    kernel: for rows of one token, a result of `state_kernel.choose`. drafts: [R, K, ...], those of the step before, of
    which queries mean nothing; None: the engine has none.
    """
    is_other = rows.is_live if drafts is None else rows.is_live & ~rows.has_drafts
    field, out = _by_windows(field, tokens, rows, is_other & (rows.num_tokens > 1))
    options = {"together": _TOGETHER, "kernel": kernel}
    is_single = is_other & (rows.num_tokens == 1)
    field, out = _singles(field, out, tokens, rows, is_single, **options)
    if drafts is not None:
        field, out = _with_drafts(field, out, tokens, drafts, rows)
    return _to_siblings(field, rows), out


def of_single_tokens(
    field: jax.Array,
    tokens: AnyTokens,
    rows: StateRows,
    *,
    kernel: str | None,
    drafts: AnyTokens | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The same for rows that all have one token."""
    out = jnp.zeros_like(tokens.v)
    is_other = rows.is_live if drafts is None else rows.is_live & ~rows.has_drafts
    options = {"together": rows.slots.size, "kernel": kernel}
    field, out = _singles(field, out, tokens, rows, is_other, **options)
    if drafts is not None:
        field, out = _with_drafts(field, out, tokens, drafts, rows)
    return field, out


def _by_windows(
    field: jax.Array, tokens: AnyTokens, rows: StateRows, is_several: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The rows of several tokens; zeros for the outputs of others."""
    num_tokens = tokens.q.shape[0]
    num_windows = -(-num_tokens // CHUNK)
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

    windows = jax.tree.map(by_window, tokens)
    end = rows.first + rows.num_tokens
    num_parts = jnp.where(is_several, (end - 1) // CHUNK - rows.first // CHUNK + 1, 0)
    row, numbers, total = expand(num_parts, num_windows + rows.slots.size)
    window = jnp.minimum(rows.first[row] // CHUNK + numbers, num_windows - 1)
    exists = jnp.arange(row.size) < total[0]
    last = jnp.minimum(end[row] - window * CHUNK, CHUNK)
    parts = Parts(
        window=window,
        first=jnp.maximum(rows.first[row] - window * CHUNK, 0),
        end=last,
        kept_end=last,
        slots=jnp.where(exists, rows.slots[row], NULL_SLOT),
        is_first=numbers == 0,
        begins=rows.begins[row],
    )
    by_xla = partial(xla.by_windows, rule=rule_of(tokens))
    run = _on_platform(field, tokens, by_xla)
    field, out = run(field, windows, parts, total[0])
    counts = jnp.expand_dims(counts, range(1, tokens.v.ndim))
    out = jnp.where(counts, out.reshape(-1, *tokens.v.shape[1:]), 0.0)
    return field, out[:num_tokens]


def _on_platform(field: jax.Array, tokens: AnyTokens, by_xla: Callable) -> Callable:
    """The kernel `by_windows` for these states and tokens where that can serve; otherwise `by_xla`."""
    if isinstance(tokens, Tokens):
        reason, kernel = tpu_windows.unsupported_reason(field), tpu_windows.by_windows
    else:
        num_values = tokens.log_decay.shape[-1]
        reason = mamba2_windows.unsupported_reason(field, num_values)
        kernel = mamba2_windows.by_windows
    kernel = by_xla if reason else kernel
    return partial(lax.platform_dependent, tpu=kernel, default=by_xla)


def _with_drafts(
    field: jax.Array, out: jax.Array, tokens: AnyTokens, drafts: AnyTokens, rows: StateRows
) -> tuple[jax.Array, jax.Array]:
    """The rows that `has_drafts`. The window of each has the accepted drafts of the step before, which the state lacks,
    then the row's tokens, at most 1 + K.
    """
    num_tokens, most = tokens.k.shape[0], drafts.k.shape[1]
    size = window_of_drafts(most)
    order, number = chosen_first(rows.has_drafts)
    exists = jnp.arange(order.size) < number
    row = jax.tree.map(lambda x: x[order], rows)
    place = jnp.arange(size, dtype=jnp.int32)[None] - row.num_accepted[:, None]
    counts = exists[:, None] & (place < row.num_tokens[:, None])
    at = jnp.clip(row.first[:, None] + place, 0, num_tokens - 1)

    def by_window(packed: jax.Array, earlier: jax.Array) -> jax.Array:
        """[R, size, ...]"""
        earlier = jnp.pad(earlier[order], [(0, 0), (0, size - most), *[(0, 0)] * (packed.ndim - 1)])
        axes = range(2, packed.ndim + 1)
        x = jnp.where(jnp.expand_dims(place < 0, axes), earlier, packed[at])
        return jnp.where(jnp.expand_dims(counts, axes), x, 0.0)

    windows, end = jax.tree.map(by_window, tokens, drafts), row.num_accepted + row.num_tokens
    parts = Parts(
        window=jnp.arange(order.size, dtype=jnp.int32),
        first=jnp.zeros_like(end),
        end=end,
        kept_end=end - row.num_drafts,
        slots=jnp.where(exists, row.slots, NULL_SLOT),
        is_first=jnp.ones_like(exists),
        begins=row.begins,
    )
    by_xla = partial(xla.one_window, together=_WINDOWS_TOGETHER, rule=rule_of(tokens))
    field, new = _on_platform(field, tokens, by_xla)(field, windows, parts, number)
    return field, out.at[jnp.where(counts & (place >= 0), at, num_tokens)].set(new, mode="drop")


def _singles(
    field: jax.Array,
    out: jax.Array,
    tokens: AnyTokens,
    rows: StateRows,
    is_single: jax.Array,
    *,
    together: int,
    kernel: str | None,
) -> tuple[jax.Array, jax.Array]:
    """The rows of one token. together: how many of them XLA computes at a time."""
    order, number = chosen_first(is_single)
    exists = jnp.arange(order.size) < number
    first = rows.first[order]
    given = Rows(
        slots=jnp.where(exists, rows.slots[order], NULL_SLOT),
        begins=rows.begins[order],
        tokens=jax.tree.map(lambda x: x[first], tokens),
    )
    if kernel is None:
        one_token = partial(xla.one_token, together=together, rule=rule_of(tokens))
    else:
        one_token = one_token_of(tokens, kernel)
    field, new = one_token(field, given, number)
    return field, out.at[jnp.where(exists, first, out.shape[0])].set(new, mode="drop")


def _to_siblings(field: jax.Array, rows: StateRows) -> jax.Array:
    order, number = chosen_first(rows.is_sibling)

    def one(index: jax.Array, field: jax.Array) -> jax.Array:
        row = order[index]
        return field.at[rows.slots[row]].set(field[rows.slots[rows.parents[row]]])

    return lax.fori_loop(0, number, one, field)
