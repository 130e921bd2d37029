"""The recurrent state of running sequences: in the slots of their requests, one array for each layer and kind.

A row's tokens begin where the step before ended, so each step reads the state of its rows and leaves the next one. A
sequence starts, and starts again after preemption, with zeros, or with a copy of a state in the prefix cache, which has
slots behind those of requests. A sibling row has no tokens: it gets a copy of the state after the row before it.

Drafts do not change a state, since those that turn out to be wrong could not be taken back. What they would change is
kept beside it; the sequence's next row has a position, so the device knows how many were accepted, and begins with
them.

Letters: Q slots of requests and of the prefix cache, R rows, T packed tokens, C channels of a convolution, K most
drafts of a row, N, J, D, F, W as in `models.recurrent_config.RecurrentLayers`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import layout as layouts
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxpage.batch import StepBatch
from jaxpage.models.recurrent_config import RecurrentLayers
from jaxpage.ops.delta_rule import AnyTokens
from jaxpage.ops.packed_delta_rule import StateRows, of_packed_tokens, of_single_tokens
from jaxpage.parallel.sharding import TENSOR
from jaxpage.plan import NULL_SLOT
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.kept_rows import put_rows, words_of
from jaxpage.runner.layout import Layout
from jaxpage.sampling.fields import RequestState

# Names of a layer's fields.
_PREFIXES = ("convolution_", "recurrent_state_")
_INPUTS, _STATE = (prefix + "{}" for prefix in _PREFIXES)
_DRAFTS = "recurrent_drafts_{}"
_LENGTH = "recurrent_length"  # of engines with drafts: int32[Q], how many tokens the state is of


def recurrent_fields(
    sizes: RecurrentLayers, num_slots: int, dtype: DTypeLike, *, num_drafts: int = 0
) -> RequestState:
    """The fields of all slots, for models that compute in `dtype`. num_drafts: K."""
    # Two axes: XLA would store three or so inputs in the eight rows of a TPU's registers.
    inputs = (num_slots, (sizes.num_taps - 1 + num_drafts) * sizes.num_channels)
    fields = {_INPUTS.format(i): jnp.zeros(inputs, words_of(dtype)) for i in sizes.layers}
    if num_drafts:
        fields[_LENGTH] = jnp.zeros(num_slots, jnp.int32)
    if not sizes.has_matrix:
        return fields
    state = (num_slots, *sizes.state_shape)
    fields |= {_STATE.format(i): jnp.zeros(state, jnp.float32) for i in sizes.layers}
    if num_drafts:
        drafts = (num_slots, num_drafts * sizes.num_changes)
        fields |= {_DRAFTS.format(i): jnp.zeros(drafts, jnp.float32) for i in sizes.layers}
    return fields


def recurrent_axes(sizes: RecurrentLayers | None, num_devices: int) -> dict[str, tuple[str, ...]]:
    """The logical axes of these fields, see `parallel.sharding`; none if devices cannot have equally many heads."""
    if sizes is None or sizes.num_key_heads % num_devices:
        return {}
    names = (_INPUTS, _STATE, _DRAFTS) if sizes.has_matrix else (_INPUTS,)
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

        copied = (*_PREFIXES, _LENGTH)
        states = {name: x for name, x in state.items() if name.startswith(copied)}
        return state | lax.fori_loop(0, pairs["num"], copy, states)

    return copy_states


def _rows_of(
    batch: StepBatch, num_drafts: jax.Array | None, lengths: jax.Array | None
) -> StateRows:
    """num_drafts: int32[R]; None: there are none. lengths: the field of this name, if the engine has it."""
    num_tokens = jnp.diff(batch.query_starts)
    row = jnp.arange(num_tokens.size, dtype=jnp.int32)
    parents = lax.cummax(jnp.where(num_tokens > 0, row, 0))
    is_live, begins = batch.kv_lens > 0, batch.kv_lens == num_tokens
    none = jnp.zeros_like(num_tokens)
    num_accepted = none
    if lengths is not None:
        before = batch.kv_lens - num_tokens - lengths[batch.slots]
        num_accepted = jnp.where(is_live & ~begins, before, 0)
    return StateRows(
        slots=batch.slots,
        first=batch.query_starts[:-1],
        num_tokens=num_tokens,
        is_live=is_live,
        begins=begins,
        parents=parents,
        is_sibling=(parents != row) & (batch.slots != NULL_SLOT),
        num_drafts=none if num_drafts is None else num_drafts,
        num_accepted=num_accepted,
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
        num_drafts: jax.Array | None = None,
        mesh: Mesh | None = None,
    ):
        """kernel: for rows of one token, see `StepSpec.state_kernel`. num_drafts: int32[R], how many of a row's last
        tokens are drafts; None: there are none.
        """
        self.state, self._sizes = dict(state), sizes
        lengths = state.get(_LENGTH)
        self._rows = rows = _rows_of(batch, num_drafts, lengths)
        self._one_token_per_row, self._on_gpu = bucket.decode, on_gpu
        self._kernel, self._mesh = kernel, mesh
        if lengths is not None:
            new = jnp.where(rows.is_live, batch.kv_lens - rows.num_drafts, lengths[rows.slots])
            self.state[_LENGTH] = put_rows(lengths, rows.slots, new[rows.parents], on_gpu=on_gpu)

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
        names, by_head = [_STATE.format(layer)], P(None, TENSOR)
        if _LENGTH in self.state:
            names.append(_DRAFTS.format(layer))
        how = {"one_token_per_row": self._one_token_per_row, "on_gpu": self._on_gpu}
        call = self._on_shares(
            partial(_advance, kernel=self._kernel, **how),
            inputs=(by_head, by_head, P()),
            outputs=(by_head, by_head),
        )
        fields, out = call([self.state[name] for name in names], tokens, self._rows)
        self.state |= zip(names, fields, strict=True)
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
    """The field [Q, (W - 1 + K) C] with the last inputs of each row, then those of its drafts, and the sums
    float32[T, channels of each input].
    """
    x, weight = jnp.concatenate(inputs, axis=1), jnp.concatenate(weights).astype(jnp.float32)
    # Otherwise XLA on TPUs may lay out a product by channel, if there are no whole registers of them, and copy what is
    # made of it.
    x = layouts.with_layout_constraint(x, layouts.Layout((0, 1)))
    num_kept = weight.shape[1] - 1
    num_drafts = field.shape[1] // x.shape[1] - num_kept
    before = _inputs_before(field, x.dtype, num_kept, num_drafts, rows)
    if one_token_per_row:
        window = [*before, x]
        out = sum(
            (each.astype(jnp.float32) * weight[None, :, tap] for tap, each in enumerate(window)),
            start=jnp.float32(0),
        )
        # Such rows have no drafts, so what is kept in their place means nothing.
        last = window[1:] + [x] * num_drafts
    else:
        out = _sums(x, before, weight, rows)
        last = _last_inputs(x, before, rows)
        last += [x[at] for at in _places_of_drafts(num_drafts, x.shape[0], rows).T]
    if last:
        words = lax.bitcast_convert_type(jnp.concatenate(last, axis=1), field.dtype)
        field = put_rows(field, rows.slots, words, on_gpu=on_gpu)
    ends = list(itertools.accumulate(part.shape[1] for part in inputs))[:-1]
    return field, jnp.split(out, ends, axis=1)


def _inputs_before(
    field: jax.Array, dtype: DTypeLike, num_kept: int, num_drafts: int, rows: StateRows
) -> list[jax.Array]:
    """W - 1 times [R, C]: the inputs before each row's first token, of those kept in its slot [(W - 1 + K) C]."""
    number = num_kept + num_drafts
    parts = jnp.split(field[rows.slots], number, axis=1) if number else []
    # Each by itself: of all together XLA on TPUs makes an array, and copies most of it.
    parts = [lax.bitcast_convert_type(part, dtype) for part in parts]
    parts = [jnp.where(rows.begins[:, None], jnp.zeros_like(part), part) for part in parts]
    before = parts[:num_kept]
    for accepted in range(1, num_drafts + 1):
        is_so = (rows.num_accepted == accepted)[:, None]
        before = [jnp.where(is_so, parts[accepted + place], x) for place, x in enumerate(before)]
    return before


def _places_of_drafts(num_drafts: int, num_tokens: int, rows: StateRows) -> jax.Array:
    """int32[R, K]: where the drafts of rows are among the packed tokens. Of a row with fewer, others mean nothing."""
    known = rows.first + rows.num_tokens - rows.num_drafts
    places = known[:, None] + jnp.arange(num_drafts, dtype=jnp.int32)[None]
    return jnp.minimum(places, num_tokens - 1)


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
    """W - 1 times [R, C]: the last inputs of each row's tokens x [T, C] that are no drafts, or those of the sibling's
    parent.
    """
    num_kept, num_known, last = len(before), rows.num_tokens - rows.num_drafts, []
    for place in range(num_kept):
        number = num_known - num_kept + place  # of the row's tokens; negative: before them
        own = x[jnp.clip(rows.first + number, 0, x.shape[0] - 1)]
        for num_tokens in range(num_kept - place):
            is_so = (num_known == num_tokens)[:, None]
            own = jnp.where(is_so, before[num_tokens + place], own)
        last.append(own[rows.parents])
    return last


@partial(jax.jit, static_argnames=("one_token_per_row", "on_gpu", "kernel"))
def _advance(
    fields: list[jax.Array],
    tokens: AnyTokens,
    rows: StateRows,
    *,
    one_token_per_row: bool,
    on_gpu: bool,
    kernel: str | None,
) -> tuple[list[jax.Array], jax.Array]:
    """The field [Q, ...] with the state after each row, then that with its drafts if there is one, and the outputs
    float32[T, ...].
    """
    compute = of_single_tokens if one_token_per_row else of_packed_tokens
    states, *of_drafts = fields
    if not of_drafts:
        states, out = compute(states, tokens, rows, kernel=kernel)
        return [states], out
    (kept,) = of_drafts
    earlier = _drafts_of(kept[rows.slots], tokens)
    states, out = compute(states, tokens, rows, kernel=kernel, drafts=earlier)
    if not one_token_per_row:
        at = _places_of_drafts(earlier.k.shape[1], tokens.k.shape[0], rows)
        new = [x[at].reshape(at.shape[0], -1) for x in tokens[1:]]
        kept = put_rows(kept, rows.slots, jnp.concatenate(new, axis=1), on_gpu=on_gpu)
    return [states, kept], out


def _drafts_of(kept: jax.Array, like: AnyTokens) -> AnyTokens:
    """[R, K, ...] of what is kept of them, [R, K changes]: all but queries, which change nothing."""
    sizes = [x[0].size for x in like[1:]]
    num_drafts = kept.shape[1] // sum(sizes)
    ends = [num_drafts * end for end in itertools.accumulate(sizes)][:-1]
    shape = (kept.shape[0], num_drafts)
    found = (
        part.reshape(*shape, *x.shape[1:])
        for part, x in zip(jnp.split(kept, ends, axis=1), like[1:], strict=True)
    )
    return type(like)(jnp.zeros((*shape, *like.q.shape[1:]), jnp.float32), *found)
