"""The request state, which the device keeps for each running sequence: one array for each slot field.

A slot is filled once, when its sequence is admitted; steps append the tokens they sample. So a step uploads only a few
integers per row, and step n+1 can be launched before the tokens of step n have been read.

Letters: Q request slots (slot 0 is the null slot of padding rows), G KV-cache groups, M blocks per sequence, E model
dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpage.interventions import slot_fields as intervention_fields
from jaxpage.plan import NULL_SLOT, Admission
from jaxpage.runner.kept_rows import put_rows, words_of
from jaxpage.runner.layout import Field, Layout
from jaxpage.runner.recurrence import recurrent_fields
from jaxpage.runner.spec import StepSpec
from jaxpage.sampling.features import fields_of
from jaxpage.sampling.fields import RequestState
from jaxpage.sampling.sampler import stops

POSITION_OFFSET = "position_offset"
EXPERT_LOAD = "expert_load"  # see `StepSpec`; counts of the current launch
FEATURES = "draft_features"  # see `runner.eagle_drafting`
FEATURES_START = "draft_features_start"
FEATURES_POSITION = "draft_features_position"
ADAPTER = "adapter"  # name of the field with a sequence's adapter slot; 0: none
_NOWHERE = -(2**30)  # no position that a sequence has is near it


def has_positions(spec: StepSpec) -> bool:
    """Whether rotary positions can differ from token indices."""
    return spec.pictures is not None and spec.pictures.has_positions


def admission_layout(spec: StepSpec) -> Layout:
    """The upload when a sequence is admitted to a request slot: its number, and every field that the host sets."""
    num_groups = len(spec.groups.windows)
    return Layout(
        (
            Field("slot"),
            # known tokens; entries beyond the known ones are never read
            Field("token_ids", (spec.max_model_len,)),
            # entries beyond the KV in use, or behind a window, are never read
            Field("block_tables", (num_groups, spec.num_blocks_per_row)),
            Field("prompt_len"),
            Field("max_len"),  # the sequence ends at this many tokens
            Field("sequence_index"),
            *([Field(ADAPTER)] if spec.num_adapters else []),
            *(
                Field(f.name, f.shape(spec.vocab_size), f.dtype, f.fill)
                for f in fields_of(spec.processors)
            ),
            *(Field(*each) for each in intervention_fields(spec.research)),
            # rotary position minus index, for tokens after the prompt's pictures
            *([Field(POSITION_OFFSET)] if has_positions(spec) else []),
        )
    )


def pack_admission(admission: Admission, layout: Layout) -> np.ndarray:
    """int32[layout.size]: the fields of an admitted sequence, with fill values for those that are not set."""
    buffer = layout.new_buffer()
    views = layout.views(buffer)
    views["slot"][()] = admission.slot
    views["token_ids"][: len(admission.token_ids)] = admission.token_ids
    for group, table in enumerate(admission.block_tables):
        views["block_tables"][group, : len(table)] = table
    views["prompt_len"][()] = admission.prompt_len
    views["max_len"][()] = admission.max_len
    views["sequence_index"][()] = admission.sequence_index
    if admission.adapter_slot:
        views[ADAPTER][()] = admission.adapter_slot
    for name, value in admission.fields.items():
        views[name][...] = value
    return buffer


def allocate_request_state(spec: StepSpec) -> RequestState:
    """Fields of all slots. The null slot counts as finished, so padding rows write nothing and do not prolong loops."""
    slot, *fields = admission_layout(spec).fields
    state = {
        field.name: jnp.full((spec.num_slots, *field.shape), field.fill, field.dtype)
        for field in fields
    }
    # bool[Q] a stop id was sampled or max_len reached, so later steps of the row do nothing
    state["finished"] = jnp.zeros(spec.num_slots, jnp.bool_).at[NULL_SLOT].set(True)
    # the last hidden state of the slot's sequence that `forward` computed, for `sample`
    state["hidden"] = jnp.zeros((spec.num_slots, spec.hidden_size), words_of(spec.dtype))
    if spec.num_drafts:  # those of the last known token and the drafts after it, for `verify`
        shape = (spec.num_slots, 1 + spec.num_drafts, spec.hidden_size)
        state["draft_hidden"] = jnp.zeros(shape, words_of(spec.dtype))
    if spec.feature_size:  # of the same tokens, for an EAGLE head, and the first one's position
        shape = (spec.num_slots, 1 + spec.num_drafts, spec.feature_size)
        state[FEATURES] = jnp.zeros(shape, words_of(spec.dtype))
        state[FEATURES_START] = jnp.full(spec.num_slots, _NOWHERE, jnp.int32)
        if has_positions(spec):  # and its rotary positions
            state[FEATURES_POSITION] = jnp.zeros((spec.num_slots, 3), jnp.int32)
    if spec.pictures is not None:  # see `runner.encoder`
        shape = (spec.pictures.num_rows, spec.pictures.vision.embedding_size)
        state["pictures"] = jnp.zeros(shape, words_of(spec.dtype))
    if spec.expert_load is not None:
        state[EXPERT_LOAD] = jnp.zeros(spec.expert_load, jnp.int32)
    if spec.recurrent is not None:
        num_states = spec.cached_state_slots.stop
        drafts = {"num_drafts": spec.num_drafts}
        state |= recurrent_fields(spec.recurrent, num_states, spec.dtype, **drafts)
    return state


def abstract_request_state(spec: StepSpec) -> RequestState:
    """The same with `jax.ShapeDtypeStruct`s instead of arrays."""
    return jax.eval_shape(lambda: allocate_request_state(spec))


def update_tables(state: RequestState, rows: dict[str, jax.Array]) -> RequestState:
    """The state with the blocks that rows gained in their block tables."""
    where = (rows["update_slots"], rows["update_groups"], rows["update_indices"])
    tables = state["block_tables"].at[where].set(rows["update_blocks"])
    return state | {"block_tables": tables}


def store_drafts(state: RequestState, rows: dict[str, jax.Array]) -> RequestState:
    """The state with the drafts of rows behind their sequences."""
    num_drafts, slots = rows["num_drafts"][:, None], rows["slots"][:, None]
    number = jnp.arange(rows["drafts"].shape[1], dtype=jnp.int32)[None]
    known = (rows["starts"] + rows["num_tokens"])[:, None] - num_drafts
    positions = jnp.where(number < num_drafts, known + number, state["token_ids"].shape[1])
    token_ids = state["token_ids"].at[slots, positions].set(rows["drafts"], mode="drop")
    return state | {"token_ids": token_ids}


def drafts_of(state: RequestState, rows: dict[str, jax.Array], num_drafts: int) -> jax.Array:
    """int32[R, num_drafts]: the drafts behind the sequences of rows. Those that a row does not have mean nothing."""
    known = (rows["starts"] + rows["num_tokens"] - rows["num_drafts"])[:, None]
    positions = known + jnp.arange(num_drafts, dtype=jnp.int32)[None]
    token_ids = state["token_ids"]
    return token_ids[rows["slots"][:, None], jnp.minimum(positions, token_ids.shape[1] - 1)]


def keep_hidden(
    state: RequestState, slots: jax.Array, new: jax.Array, *, on_gpu: bool, field: str = "hidden"
) -> RequestState:
    """The state with the hidden states `new` [R, ..., E] of rows in their slots."""
    words = lax.bitcast_convert_type(new, words_of(new.dtype))
    return state | {field: put_rows(state[field], slots, words, on_gpu=on_gpu)}


def append_tokens(
    state: RequestState,
    slots: jax.Array,
    samples: jax.Array,
    token_ids: jax.Array,
    position: jax.Array,
) -> RequestState:
    """The state with the sampled tokens at `position` of their rows, and with the rows that ended marked."""
    ended = stops(token_ids, state, slots) | (position + 1 >= state["max_len"][slots])
    slots = jnp.where(samples, slots, state["token_ids"].shape[0])  # or nowhere
    return state | {
        "token_ids": state["token_ids"].at[slots, position].set(token_ids, mode="drop"),
        "finished": state["finished"].at[slots].set(ended, mode="drop"),
    }


def make_admit(layout: Layout) -> Callable[[RequestState, jax.Array], RequestState]:
    """`admit(request_state, packed) -> request_state`: fills one request slot with what `pack_admission` wrote."""

    def admit(state: RequestState, packed: jax.Array) -> RequestState:
        row = layout.unpack(packed)
        slot = row.pop("slot")
        row["finished"] = jnp.zeros((), jnp.bool_)
        if FEATURES_START in state:
            row[FEATURES_START] = jnp.int32(_NOWHERE)
        changed = {
            name: lax.dynamic_update_index_in_dim(state[name], value, slot, 0)
            for name, value in row.items()
        }
        return state | changed

    return admit


def make_set_masks(layout: Layout) -> Callable[[RequestState, jax.Array], RequestState]:
    """`set_masks(request_state, packed) -> request_state`: sets the tokens that some slots may sample next."""

    def set_masks(state: RequestState, packed: jax.Array) -> RequestState:
        rows = layout.unpack(packed)
        return state | {"step_mask": state["step_mask"].at[rows["slots"]].set(rows["masks"])}

    return set_masks


def make_set_tokens(layout: Layout) -> Callable[[RequestState, jax.Array], RequestState]:
    """`set_tokens(request_state, packed) -> request_state`: stores tokens that the host appended to sequences."""

    def set_tokens(state: RequestState, packed: jax.Array) -> RequestState:
        tokens = layout.unpack(packed)
        where = (tokens["slots"], tokens["positions"])
        return state | {"token_ids": state["token_ids"].at[where].set(tokens["token_ids"])}

    return set_tokens
