"""The recurrent state of running sequences: in the slots of their requests, one array for each layer and kind.

A row's tokens begin where the step before ended, so each step reads the state of its rows and leaves the next one. A
sequence starts, and starts again after preemption, with zeros. A sibling row has no tokens: it gets a copy of the state
after the row before it.

Letters: Q request slots, R rows, T packed tokens, N, J, D, F, G, W as in `models.config.GatedDelta`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxpage.batch import StepBatch
from jaxpage.models.config import GatedDelta
from jaxpage.ops.delta_rule import CHUNK, Tokens, chunk, one_token
from jaxpage.parallel.sharding import TENSOR
from jaxpage.plan import NULL_SLOT
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.kept_rows import put_rows, words_of
from jaxpage.sampling.fields import RequestState
from pallas_kernels.lists import expand

_INPUTS, _STATE = "convolution_{}", "delta_state_{}"  # names of a layer's fields


def recurrent_fields(sizes: GatedDelta, num_slots: int, dtype: DTypeLike) -> RequestState:
    """The fields of all slots, for models that compute in `dtype`."""
    inputs = (num_slots, sizes.num_taps - 1, sizes.num_key_heads, sizes.num_channels)
    heads = (sizes.num_key_heads, sizes.values_per_key)
    state = (num_slots, *heads, sizes.key_dim, sizes.value_dim)
    of_inputs = {_INPUTS.format(i): jnp.zeros(inputs, words_of(dtype)) for i in sizes.layers}
    return of_inputs | {_STATE.format(i): jnp.zeros(state, jnp.float32) for i in sizes.layers}


def recurrent_axes(sizes: GatedDelta) -> dict[str, tuple[str, ...]]:
    """The logical axes of these fields, see `parallel.sharding`."""
    kinds = {_INPUTS: ("rows", "taps", "heads"), _STATE: ("rows", "heads")}
    return {name.format(i): axes for name, axes in kinds.items() for i in sizes.layers}


class _Rows(NamedTuple):
    """The rows of a step."""

    slots: jax.Array  # int32[R]
    first: jax.Array  # int32[R]: the first token of each among the packed ones
    num_tokens: jax.Array  # int32[R]
    is_live: jax.Array  # bool[R]: it has tokens that count
    begins: jax.Array  # bool[R]: its tokens are the first of the sequence
    parents: jax.Array  # int32[R]: the row itself, or the one before it that a sibling continues
    is_sibling: jax.Array  # bool[R]


def _rows_of(batch: StepBatch) -> _Rows:
    num_tokens = jnp.diff(batch.query_starts)
    row = jnp.arange(num_tokens.size, dtype=jnp.int32)
    parents = lax.cummax(jnp.where(num_tokens > 0, row, 0))
    return _Rows(
        slots=batch.slots,
        first=batch.query_starts[:-1],
        num_tokens=num_tokens,
        is_live=batch.kv_lens > 0,
        begins=batch.kv_lens == num_tokens,
        parents=parents,
        is_sibling=(parents != row) & (batch.slots != NULL_SLOT),
    )


class SlotRecurrence:
    """The recurrence of a model inside a compiled step (`models.recurrence.Recurrence`).

    Lives only while the step is traced. A call replaces the layer's field of `state`, and the step returns `state` when
    the model is done.
    """

    def __init__(
        self,
        state: RequestState,
        batch: StepBatch,
        bucket: Bucket,
        *,
        on_gpu: bool,
        mesh: Mesh | None = None,
    ):
        self.state = dict(state)
        self._rows = _rows_of(batch)
        self._options = {"one_token_per_row": bucket.decode, "on_gpu": on_gpu}
        self._mesh = mesh

    def convolve(self, layer: int, x: jax.Array, weight: jax.Array) -> jax.Array:
        name = _INPUTS.format(layer)
        by_head = P(None, TENSOR)
        call = self._on_shares(
            partial(_convolve, **self._options),
            num_heads=weight.shape[0],
            inputs=(P(None, None, TENSOR), by_head, P(TENSOR), P()),
            outputs=(P(None, None, TENSOR), by_head),
        )
        self.state[name], out = call(self.state[name], x, weight, self._rows)
        return out

    def delta_rule(self, layer: int, tokens: Tokens) -> jax.Array:
        name = _STATE.format(layer)
        by_head = P(None, TENSOR)
        call = self._on_shares(
            partial(_delta_rule, **self._options),
            num_heads=tokens.k.shape[1],
            inputs=(by_head, by_head, P()),
            outputs=(by_head, by_head),
        )
        self.state[name], out = call(self.state[name], tokens, self._rows)
        return out

    def _on_shares(
        self, call: Callable, *, num_heads: int, inputs: tuple[P, ...], outputs: tuple[P, ...]
    ) -> Callable:
        """`call` with some key heads on each device, or all heads on all devices if they do not divide evenly."""
        mesh = self._mesh
        if mesh is None or mesh.size == 1:
            return call
        if num_heads % mesh.size:
            inputs, outputs = (P(),) * len(inputs), (P(),) * len(outputs)
        return jax.shard_map(call, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


# Separate jits, so that they are traced and lowered once for all layers; XLA inlines them.
@partial(jax.jit, static_argnames=("one_token_per_row", "on_gpu"))
def _convolve(
    field: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    rows: _Rows,
    *,
    one_token_per_row: bool,
    on_gpu: bool,
) -> tuple[jax.Array, jax.Array]:
    """The field [Q, W - 1, N, G] with the last inputs of each row, and the sums float32[T, N, G]."""
    before = lax.bitcast_convert_type(field[rows.slots], x.dtype)
    before = jnp.where(rows.begins[:, None, None, None], jnp.zeros_like(before), before)
    weight = weight.astype(jnp.float32)
    if one_token_per_row:
        window = jnp.concatenate([before, x[:, None]], axis=1)
        taps = jnp.moveaxis(weight, -1, 0)[None]
        out, last = jnp.sum(window.astype(jnp.float32) * taps, axis=1), window[:, 1:]
    else:
        out, last = _sums(x, before, weight, rows), _last_inputs(x, before, rows)
    words = lax.bitcast_convert_type(last, field.dtype)
    return put_rows(field, rows.slots, words, on_gpu=on_gpu), out


def _sums(x: jax.Array, before: jax.Array, weight: jax.Array, rows: _Rows) -> jax.Array:
    """float32[T, N, G] of packed tokens x [T, N, G], after the inputs [R, W - 1, N, G] before them."""
    num_taps, num_tokens = weight.shape[-1], x.shape[0]
    x = x.astype(jnp.float32)
    # How many tokens of its row come before each token. The tokens behind all rows do not matter.
    starts = jnp.zeros(num_tokens, jnp.int32).at[rows.first].max(rows.first, mode="drop")
    number = jnp.arange(num_tokens, dtype=jnp.int32) - lax.cummax(starts)
    out = x * weight[None, ..., -1]
    for back in range(1, num_taps):
        earlier = jnp.pad(x, ((back, 0), (0, 0), (0, 0)))[:num_tokens]
        earlier = jnp.where((number >= back)[:, None, None], earlier, 0.0)
        out += earlier * weight[None, ..., -1 - back]
    before = before.astype(jnp.float32)
    for offset in range(num_taps - 1):  # tokens so close to the beginning of their row
        missing = sum(
            (
                before[:, num_taps - 1 + offset - back] * weight[None, ..., -1 - back]
                for back in range(offset + 1, num_taps)
            ),
            start=jnp.float32(0),
        )
        where = jnp.where(offset < rows.num_tokens, rows.first + offset, num_tokens)
        out = out.at[where].add(missing, mode="drop")
    return out


def _last_inputs(x: jax.Array, before: jax.Array, rows: _Rows) -> jax.Array:
    """[R, W - 1, N, G]: the last inputs after each row's tokens x [T, N, G], or those of the sibling's parent."""
    num_kept = before.shape[1]
    place = jnp.arange(num_kept, dtype=jnp.int32)[None]
    number = (
        rows.num_tokens[:, None] - num_kept + place
    )  # of the row's tokens; negative: before them
    own = x[jnp.clip(rows.first[:, None] + number, 0, x.shape[0] - 1)]
    older = jnp.clip(num_kept + number, 0, num_kept - 1)[..., None, None]
    older = jnp.take_along_axis(before, older, axis=1)
    return jnp.where((number >= 0)[..., None, None], own, older)[rows.parents]


@partial(jax.jit, static_argnames=("one_token_per_row", "on_gpu"))
def _delta_rule(
    field: jax.Array, tokens: Tokens, rows: _Rows, *, one_token_per_row: bool, on_gpu: bool
) -> tuple[jax.Array, jax.Array]:
    """The field [Q, N, J, D, F] with the state after each row, and the outputs float32[T, N, J, F]."""
    if one_token_per_row:
        state, out = one_token(_before(field, rows), tokens)
        return put_rows(field, rows.slots, state, on_gpu=on_gpu), out
    field, out = _by_chunks(field, tokens, rows)
    is_single = rows.num_tokens == 1

    def singles(field: jax.Array, out: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = jax.tree.map(lambda x: x[jnp.minimum(rows.first, x.shape[0] - 1)], tokens)
        state, outputs = one_token(_before(field, rows), first)
        slots = jnp.where(is_single, rows.slots, field.shape[0])
        places = jnp.where(is_single, rows.first, out.shape[0])
        field = field.at[slots].set(state, mode="drop")
        return field, out.at[places].set(outputs, mode="drop")

    def siblings(field: jax.Array) -> jax.Array:
        slots = jnp.where(rows.is_sibling, rows.slots, field.shape[0])
        return field.at[slots].set(field[rows.slots[rows.parents]], mode="drop")

    field, out = lax.cond(is_single.any(), singles, lambda *same: same, field, out)
    field = lax.cond(rows.is_sibling.any(), siblings, lambda same: same, field)
    return field, out


def _before(field: jax.Array, rows: _Rows) -> jax.Array:
    """[R, N, J, D, F]: the state before each row's tokens."""
    begins = rows.begins[:, None, None, None, None]
    return jnp.where(begins, 0.0, field[rows.slots])


def _by_chunks(field: jax.Array, tokens: Tokens, rows: _Rows) -> tuple[jax.Array, jax.Array]:
    """`_delta_rule` for rows of several tokens, one chunk of a row after the other."""
    num_tokens = tokens.q.shape[0]
    has_chunks = rows.is_live & (rows.num_tokens > 1)
    num_chunks = jnp.where(has_chunks, -(-rows.num_tokens // CHUNK), 0)
    row_of, number_of, total = expand(num_chunks, num_tokens // CHUNK + rows.slots.size)
    # The last chunk may reach behind the last token.
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, CHUNK), *[(0, 0)] * (x.ndim - 1)]), tokens)
    place = jnp.arange(CHUNK, dtype=jnp.int32)

    def one_chunk(index: jax.Array, carry: tuple[jax.Array, jax.Array]):
        field, out = carry
        row, number = row_of[index], number_of[index]
        start, slot = rows.first[row] + number * CHUNK, rows.slots[row]
        is_token = place < rows.num_tokens[row] - number * CHUNK

        def own(x: jax.Array) -> jax.Array:
            x = lax.dynamic_slice_in_dim(x, start, CHUNK)
            return jnp.where(is_token.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0)

        begins = rows.begins[row] & (number == 0)
        state, new = chunk(jnp.where(begins, 0.0, field[slot]), jax.tree.map(own, padded))
        # What it writes behind the row's last token, later chunks replace, and the rows of one token.
        out = lax.dynamic_update_slice_in_dim(out, new, start, 0)
        return field.at[slot].set(state), out

    out = jnp.zeros((num_tokens + CHUNK, *tokens.v.shape[1:]), jnp.float32)
    field, out = lax.fori_loop(0, total[0], one_chunk, (field, out))
    return field, out[:num_tokens]
