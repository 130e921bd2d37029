"""The recurrent state of running sequences: in the slots of their requests, one array for each layer and kind.

A row's tokens begin where the step before ended, so each step reads the state of its rows and leaves the next one. A
sequence starts, and starts again after preemption, with zeros, or with a copy of a state in the prefix cache, which has
slots behind those of requests. A sibling row has no tokens: it gets a copy of the state after the row before it.

Letters: Q slots of requests and of the prefix cache, R rows, T packed tokens, C channels of a convolution, N, J, D, F,
W as in `models.config.RecurrentLayers`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxpage.batch import StepBatch
from jaxpage.models.config import RecurrentLayers
from jaxpage.ops.delta_rule import AnyTokens
from jaxpage.ops.packed_delta_rule import StateRows, of_packed_tokens, of_single_tokens
from jaxpage.parallel.sharding import TENSOR
from jaxpage.plan import NULL_SLOT
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.kept_rows import put_rows, words_of
from jaxpage.runner.layout import Layout
from jaxpage.sampling.fields import RequestState

_PREFIXES = ("convolution_", "recurrent_state_")
_INPUTS, _STATE = (prefix + "{}" for prefix in _PREFIXES)  # names of a layer's fields


def recurrent_fields(sizes: RecurrentLayers, num_slots: int, dtype: DTypeLike) -> RequestState:
    """The fields of all slots, for models that compute in `dtype`."""
    # Two axes: XLA would store three or so inputs in the eight rows of a TPU's registers.
    inputs = (num_slots, (sizes.num_taps - 1) * sizes.num_channels)
    of_inputs = {_INPUTS.format(i): jnp.zeros(inputs, words_of(dtype)) for i in sizes.layers}
    if not sizes.has_matrix:
        return of_inputs
    state = (num_slots, *sizes.state_shape)
    return of_inputs | {_STATE.format(i): jnp.zeros(state, jnp.float32) for i in sizes.layers}


def recurrent_axes(sizes: RecurrentLayers | None, num_devices: int) -> dict[str, tuple[str, ...]]:
    """The logical axes of these fields, see `parallel.sharding`; none if devices cannot have equally many heads."""
    if sizes is None or sizes.num_key_heads % num_devices:
        return {}
    names = (_INPUTS, _STATE) if sizes.has_matrix else (_INPUTS,)
    return {name.format(i): ("rows", "heads") for name in names for i in sizes.layers}


def make_copy_states(layout: Layout) -> Callable[[RequestState, jax.Array], RequestState]:
    """`copy_states(request_state, packed) -> request_state`: copies the states of some slots to others, in order."""

    def copy_states(state: RequestState, packed: jax.Array) -> RequestState:
        pairs = layout.unpack(packed)

        def copy(number: jax.Array, fields: RequestState) -> RequestState:
            source, destination = pairs["sources"][number], pairs["destinations"][number]
            return {
                name: lax.dynamic_update_index_in_dim(
                    x, lax.dynamic_index_in_dim(x, source, keepdims=False), destination, 0
                )
                for name, x in fields.items()
            }

        states = {name: x for name, x in state.items() if name.startswith(_PREFIXES)}
        return state | lax.fori_loop(0, pairs["num"], copy, states)

    return copy_states


def _rows_of(batch: StepBatch) -> StateRows:
    num_tokens = jnp.diff(batch.query_starts)
    row = jnp.arange(num_tokens.size, dtype=jnp.int32)
    parents = lax.cummax(jnp.where(num_tokens > 0, row, 0))
    return StateRows(
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
        sizes: RecurrentLayers,
        state: RequestState,
        batch: StepBatch,
        bucket: Bucket,
        *,
        on_gpu: bool,
        kernel: str | None = None,
        mesh: Mesh | None = None,
    ):
        """kernel: for rows of one token, see `StepSpec.state_kernel`."""
        self.state, self._sizes = dict(state), sizes
        self._rows = _rows_of(batch)
        self._one_token_per_row, self._on_gpu = bucket.decode, on_gpu
        self._kernel, self._mesh = kernel, mesh

    def convolve(
        self, layer: int, inputs: Sequence[jax.Array], weights: Sequence[jax.Array]
    ) -> list[jax.Array]:
        name, number = _INPUTS.format(layer), len(inputs)
        channels, by_channel = P(None, TENSOR), [P(None, TENSOR)] * number
        call = self._on_shares(
            partial(_convolve, one_token_per_row=self._one_token_per_row, on_gpu=self._on_gpu),
            inputs=(channels, by_channel, [P(TENSOR)] * number, P()),
            outputs=(channels, by_channel),
        )
        self.state[name], out = call(self.state[name], list(inputs), list(weights), self._rows)
        return out

    def advance(self, layer: int, tokens: AnyTokens) -> jax.Array:
        name, by_head = _STATE.format(layer), P(None, TENSOR)
        call = self._on_shares(
            partial(_advance, one_token_per_row=self._one_token_per_row, kernel=self._kernel),
            inputs=(by_head, by_head, P()),
            outputs=(by_head, by_head),
        )
        self.state[name], out = call(self.state[name], tokens, self._rows)
        return out

    def _on_shares(self, call: Callable, *, inputs: tuple, outputs: tuple) -> Callable:
        """`call` with some key heads on each device, or all heads on all devices, see `recurrent_axes`."""
        mesh = self._mesh
        if mesh is None or mesh.size == 1:
            return call
        if not recurrent_axes(self._sizes, mesh.size):
            inputs, outputs = (P(),) * len(inputs), (P(),) * len(outputs)
        return jax.shard_map(call, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


# Separate jits, so that they are traced and lowered once for all layers; XLA inlines them.
@partial(jax.jit, static_argnames=("one_token_per_row", "on_gpu"))
def _convolve(
    field: jax.Array,
    inputs: list[jax.Array],
    weights: list[jax.Array],
    rows: StateRows,
    *,
    one_token_per_row: bool,
    on_gpu: bool,
) -> tuple[jax.Array, list[jax.Array]]:
    """The field [Q, (W - 1) C] with the last inputs of each row, and the sums float32[T, channels of each input]."""
    x, weight = jnp.concatenate(inputs, axis=1), jnp.concatenate(weights).astype(jnp.float32)
    num_kept = weight.shape[1] - 1
    kept = lax.bitcast_convert_type(field[rows.slots], x.dtype)
    kept = jnp.where(rows.begins[:, None], jnp.zeros_like(kept), kept)
    before = jnp.split(kept, num_kept, axis=1) if num_kept else []
    if one_token_per_row:
        window = [*before, x]
        out = sum(
            (each.astype(jnp.float32) * weight[None, :, tap] for tap, each in enumerate(window)),
            start=jnp.float32(0),
        )
        last = window[1:]
    else:
        out, last = _sums(x, before, weight, rows), _last_inputs(x, before, rows)
    if num_kept:
        words = lax.bitcast_convert_type(jnp.concatenate(last, axis=1), field.dtype)
        field = put_rows(field, rows.slots, words, on_gpu=on_gpu)
    ends = list(itertools.accumulate(part.shape[1] for part in inputs))[:-1]
    return field, jnp.split(out, ends, axis=1)


def _sums(x: jax.Array, before: list[jax.Array], weight: jax.Array, rows: StateRows) -> jax.Array:
    """float32[T, C] of packed tokens x [T, C], after W - 1 inputs [R, C] before them. weight: [C, W]."""
    num_taps, num_tokens = weight.shape[1], x.shape[0]
    # How many tokens of its row come before each token. The tokens behind all rows do not matter.
    starts = jnp.zeros(num_tokens, jnp.int32).at[rows.first].max(rows.first, mode="drop")
    number = jnp.arange(num_tokens, dtype=jnp.int32) - lax.cummax(starts)
    out = x.astype(jnp.float32) * weight[None, :, -1]
    for back in range(1, num_taps):
        earlier = jnp.pad(x, ((back, 0), (0, 0)))[:num_tokens].astype(jnp.float32)
        earlier = jnp.where((number >= back)[:, None], earlier, 0.0)
        out += earlier * weight[None, :, -1 - back]
    for offset in range(num_taps - 1):  # tokens so close to the beginning of their row
        missing = sum(
            (
                before[num_taps - 1 + offset - back].astype(jnp.float32)
                * weight[None, :, -1 - back]
                for back in range(offset + 1, num_taps)
            ),
            start=jnp.float32(0),
        )
        where = jnp.where(offset < rows.num_tokens, rows.first + offset, num_tokens)
        out = out.at[where].add(missing, mode="drop")
    return out


def _last_inputs(x: jax.Array, before: list[jax.Array], rows: StateRows) -> list[jax.Array]:
    """W - 1 times [R, C]: the last inputs after each row's tokens x [T, C], or those of the sibling's parent."""
    num_kept, last = len(before), []
    for place in range(num_kept):
        number = rows.num_tokens - num_kept + place  # of the row's tokens; negative: before them
        own = x[jnp.clip(rows.first + number, 0, x.shape[0] - 1)]
        for num_tokens in range(num_kept - place):
            is_so = (rows.num_tokens == num_tokens)[:, None]
            own = jnp.where(is_so, before[num_tokens + place], own)
        last.append(own[rows.parents])
    return last


@partial(jax.jit, static_argnames=("one_token_per_row", "kernel"))
def _advance(
    field: jax.Array,
    tokens: AnyTokens,
    rows: StateRows,
    *,
    one_token_per_row: bool,
    kernel: str | None,
) -> tuple[jax.Array, jax.Array]:
    """The field [Q, ...] with the state after each row, and the outputs float32[T, ...]."""
    compute = of_single_tokens if one_token_per_row else of_packed_tokens
    return compute(field, tokens, rows, kernel=kernel)
