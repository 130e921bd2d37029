"""thinking_token_budget: how long a row may reason before the end of its reasoning is forced. Meaning and order are
vLLM's (those of its GPU runner).

Whether a row reasons, for how long, and how much of the end it has written, all follow from the token history that the
device keeps. So nothing is counted, and nothing can go stale after a preemption. Knows nothing of text.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpage.reasoning import MAX_MARKER_LEN
from jaxpage.sampling.fields import RequestState, SamplerFeature, SlotField

if TYPE_CHECKING:
    from jaxpage.request import Request

# The logit of a forced token; temperature and truncation leave it far ahead of all others.
_FORCED = 1e9
_WINDOW = 320  # tokens of history that are searched at a time
_PADDING = -1  # behind the ids of a marker
_NO_TOKEN = -2  # where a row has no token: equals no id of a marker, nor its padding
_MOST_INT32 = 2**31 - 1


def force_end_of_thinking(
    logits: jax.Array, state: RequestState, slots: jax.Array, positions: jax.Array
) -> jax.Array:
    """float32[R, V]: rows that have spent their budget have one logit raised, that of the next token of the end.

    A history that ends with the beginning of the forced end, whoever wrote it, is continued from there.
    """
    vocab_size = logits.shape[1]
    budgets = state["thinking_budget"][slots]
    spent = (budgets >= 0) & (count_thinking(state, slots, positions) >= budgets)
    forced = jnp.where(spent, _next_of_end(state, slots, positions), vocab_size)
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.where(ids == forced[:, None], _FORCED, logits)


def count_thinking(state: RequestState, slots: jax.Array, positions: jax.Array) -> jax.Array:
    """int32[R]: the tokens since the start marker, or -1 for a row that does not reason, or has no budget.

    A row reasons while the last start marker of its history, prompt or output, is behind the last end marker. The
    history is searched backwards as far as the last marker of each row.
    """
    history = state["token_ids"]
    width = min(_WINDOW, history.shape[1])
    markers = jnp.stack([state["think_start"][slots], state["think_end"][slots]], axis=1)
    lens = (markers != _PADDING).sum(-1, dtype=jnp.int32)
    has_budget = state["thinking_budget"][slots] >= 0

    # `ends`: markers that begin there or behind were looked for. `last`: where the last ones begin, or -1.
    def is_open(ends, last):
        return (ends > 0) & (last < 0).all(-1)

    def search(carry):
        ends, last = carry
        # A marker that begins before `ends` may reach beyond. At both ends of the history the window is moved to fit,
        # and what it then holds of the one behind is known to hold no marker.
        begins = jnp.clip(ends - (width - MAX_MARKER_LEN + 1), 0, history.shape[1] - width)
        read = jax.vmap(lambda slot, begin: lax.dynamic_slice(history, (slot, begin), (1, width)))
        index = begins[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
        ids = _only_known(read(slots, begins)[:, 0], index, state, slots, positions)
        found = _find(ids, markers, lens.max())
        found = jnp.where(found, index[:, None, :], -1).max(-1)
        return begins, jnp.where(is_open(ends, last)[:, None], found, last)

    carry = jnp.where(has_budget, positions, 0), jnp.full(lens.shape, -1, jnp.int32)
    _, last = lax.while_loop(lambda carry: is_open(*carry).any(), search, carry)
    start, end = last[:, 0], last[:, 1]
    return jnp.where(has_budget & (start > end), positions - start - lens[:, 0], -1)


def _find(ids: jax.Array, markers: jax.Array, longest: jax.Array) -> jax.Array:
    """bool[R, 2, W]: whether markers[r, m], int32[R, 2, K], stands at ids[r, w:], int32[R, W]."""
    width = ids.shape[1]
    ids = jnp.pad(ids, ((0, 0), (0, MAX_MARKER_LEN)), constant_values=_NO_TOKEN)

    def compare(offset, equal):
        token = lax.dynamic_slice_in_dim(ids, offset, width, axis=1)[:, None, :]
        wanted = lax.dynamic_slice_in_dim(markers, offset, 1, axis=2)
        return equal & ((token == wanted) | (wanted == _PADDING))

    equal = jnp.ones((*markers.shape[:2], width), jnp.bool_)
    return lax.fori_loop(0, longest, compare, equal)


def _next_of_end(state: RequestState, slots: jax.Array, positions: jax.Array) -> jax.Array:
    """int32[R]: the token of the forced end that comes after the longest beginning of it that ends the history."""
    forced = state["think_forced_end"][slots]
    lens = (forced != _PADDING).sum(-1, dtype=jnp.int32)
    written = jnp.arange(MAX_MARKER_LEN, dtype=jnp.int32)[None, :]

    def compare(offset, equal):
        index = positions[:, None] - written + offset
        ids = state["token_ids"][slots[:, None], index]
        ids = _only_known(ids, index, state, slots, positions)
        wanted = lax.dynamic_slice_in_dim(forced, offset, 1, axis=1)
        return equal & ((ids == wanted) | (written <= offset))

    equal = lax.fori_loop(0, lens.max() - 1, compare, written < lens[:, None])
    num_written = jnp.where(equal, written, 0).max(-1)
    return jnp.take_along_axis(forced, num_written[:, None], axis=1)[:, 0]


def _only_known(
    ids: jax.Array, index: jax.Array, state: RequestState, slots: jax.Array, positions: jax.Array
) -> jax.Array:
    """ids, int32[R, N] of the tokens at `index`, with _NO_TOKEN outside of a row's history."""
    first = state["first_token"][slots]  # the rest of a prompt of embeddings has no ids
    is_known = (index >= first[:, None]) & (index < positions[:, None])
    return jnp.where(is_known, ids, _NO_TOKEN)


def _budget(request: Request, vocab_size: int) -> int | None:
    budget = request.params.thinking_token_budget
    return None if budget is None else min(budget, _MOST_INT32)


def _marker(request: Request, vocab_size: int, *, name: str) -> np.ndarray | None:
    if request.reasoning is None:
        return None
    ids = getattr(request.reasoning, name)
    return np.array([*ids, *[_PADDING] * (MAX_MARKER_LEN - len(ids))])


def _marker_field(name: str) -> SlotField:
    return SlotField(
        name=f"think_{name}",
        shape=lambda _: (MAX_MARKER_LEN,),
        fill=_PADDING,
        value=partial(_marker, name=name),
    )


THINKING = SamplerFeature(
    name="thinking",
    fields=(
        SlotField(name="thinking_budget", fill=-1, value=_budget),  # -1: none
        _marker_field("start"),
        _marker_field("end"),
        _marker_field("forced_end"),
    ),
    asked=lambda r: r.params.thinking_token_budget is not None,
    apply=force_end_of_thinking,
)
