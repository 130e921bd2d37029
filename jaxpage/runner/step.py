"""The compiled programs: one step of a bucket, and the admission of a sequence. Pure functions on the device.

`step(leaves, kv_pool, request_state, packed) -> (kv_pool, request_state, result)`: unpack the batch, embed, layers,
final norm, gather the rows' last tokens, LM head, masks, sample, logprobs. Pool and request state are donated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpage.batch import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_LOGIT_BIAS, RequestState, StepBatch
from jaxpage.ops.attention import PagedAttention
from jaxpage.plan import NULL_BLOCK, NULL_SLOT
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.layout import Layout
from jaxpage.sampling.sampler import Sampled, sample, stops
from pallas_kernels.kv_write.xla import copy_blocks


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DeviceResult:
    """`plan.StepResult` still on the device and padded. P decode steps (1 in a mixed step), R rows, W top logprobs."""

    sampled: Sampled  # every field with a leading axis P
    num_sampled: jax.Array  # int32[R]


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """What all programs of an engine share: shapes and static choices."""

    block_size: int
    max_model_len: int  # C
    num_blocks_per_row: int  # M
    num_slots: int  # Q, the null slot included
    vocab_size: int  # V
    decode_steps: int  # most decode steps in one launch
    num_top_logprobs: int  # W
    logprobs_mode: str


def abstract_request_state(spec: StepSpec) -> RequestState:
    """Shapes and dtypes of the request state."""
    slots, words = spec.num_slots, -(-spec.vocab_size // 32)
    shapes = {
        "token_ids": ((spec.max_model_len,), jnp.int32),
        "block_table": ((spec.num_blocks_per_row,), jnp.int32),
        "finished": ((), jnp.bool_),
        "key": ((2,), jnp.uint32),
        "stop_mask": ((words,), jnp.uint32),
        "allowed_mask": ((words,), jnp.uint32),
        "bias_ids": ((MAX_LOGIT_BIAS,), jnp.int32),
        "bias_values": ((MAX_LOGIT_BIAS,), jnp.float32),
        "bad_words": ((MAX_BAD_WORDS, MAX_BAD_WORD_LEN), jnp.int32),
    }
    shapes |= dict.fromkeys(("prompt_len", "min_len", "max_len", "top_k"), ((), jnp.int32))
    scalars = {field.name for field in fields(RequestState)} - set(shapes)
    shapes |= dict.fromkeys(scalars, ((), jnp.float32))
    return RequestState(
        **{
            name: jax.ShapeDtypeStruct((slots, *shape), dtype)
            for name, (shape, dtype) in shapes.items()
        }
    )


def allocate_request_state(spec: StepSpec) -> RequestState:
    """An empty state. The null slot counts as finished, so padding rows write nothing and keep no loop alive."""
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract_request_state(spec))
    return replace(state, finished=state.finished.at[NULL_SLOT].set(True))


def make_admit(layout: Layout) -> Callable:
    """`admit(request_state, packed) -> request_state`: fills one request slot with what `pack_admission` wrote."""

    def admit(state: RequestState, packed: jax.Array) -> RequestState:
        row = layout.unpack(packed)
        slot = row.pop("slot")
        row["finished"] = jnp.zeros((), jnp.bool_)
        return RequestState(
            **{
                name: lax.dynamic_update_index_in_dim(getattr(state, name), value, slot, 0)
                for name, value in row.items()
            }
        )

    return admit


def make_step(
    graphdef: nnx.GraphDef,
    treedef: jax.tree_util.PyTreeDef,
    bucket: Bucket,
    layout: Layout,
    spec: StepSpec,
) -> Callable:
    """The step of one bucket. `graphdef` and `treedef` turn the flat list of parameter arrays into the model."""

    def one_step(leaves, kv_pool, state, rows, token_row):
        """All rows move by one step: (kv_pool, state, Sampled, bool[R] which rows sampled)."""
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        batch = _unpack_batch(state, rows, token_row, bucket, spec)
        attention = PagedAttention(kv_pool, batch, one_query_per_row=bucket.decode)
        hidden = model.hidden_states(batch.token_ids, batch.positions, attention)
        # A fork has no tokens of its own: its last token is that of the row before it.
        last = jnp.maximum(batch.query_starts[1:] - 1, 0)
        logits = model.logits(hidden if bucket.decode else hidden[last])
        position = rows["starts"] + rows["num_tokens"]  # of the sampled tokens
        sampled = sample(
            logits,
            state,
            batch.slots,
            position,
            rows["features"],
            num_top_logprobs=spec.num_top_logprobs,
            logprobs_mode=spec.logprobs_mode,
        )
        state = _append(state, batch, sampled.token_ids, position)
        return attention.kv_pool, state, sampled, batch.samples

    def step(leaves, kv_pool, state, packed):
        rows = layout.unpack(packed)
        state = _update_tables(state, rows)
        kv_pool = lax.cond(
            rows["copy_sources"].any(),
            lambda pool: [
                copy_blocks(p, rows["copy_sources"], rows["copy_destinations"]) for p in pool
            ],
            lambda pool: pool,
            kv_pool,
        )
        token_row = _token_rows(rows["num_tokens"], bucket)
        if not bucket.decode:
            kv_pool, state, sampled, samples = one_step(leaves, kv_pool, state, rows, token_row)
            sampled = jax.tree.map(lambda x: x[None], sampled)
            return (
                kv_pool,
                state,
                DeviceResult(sampled=sampled, num_sampled=samples.astype(jnp.int32)),
            )

        def more(carry):
            index, _, state, result = carry
            return (index < rows["num_steps"]) & ~state.finished[rows["slots"]].all()

        def decode(carry):
            index, kv_pool, state, result = carry
            now = rows | {"starts": rows["starts"] + index}
            # Tied to the index, the weights are no loop invariants. Else XLA hoists what it derives
            # from them: on CPU a float32 copy of the whole bf16 embedding table, at every launch.
            weights, index = lax.optimization_barrier((leaves, index))
            kv_pool, state, sampled, samples = one_step(weights, kv_pool, state, now, token_row)
            result = DeviceResult(
                sampled=jax.tree.map(
                    lambda all_, one: all_.at[index].set(one), result.sampled, sampled
                ),
                num_sampled=result.num_sampled + samples.astype(jnp.int32),
            )
            return index + 1, kv_pool, state, result

        carry = (jnp.int32(0), kv_pool, state, _empty_result(bucket, spec))
        _, kv_pool, state, result = lax.while_loop(more, decode, carry)
        return kv_pool, state, result

    return step


def _update_tables(state: RequestState, rows: dict) -> RequestState:
    where = (rows["update_slots"], rows["update_indices"])
    return replace(state, block_table=state.block_table.at[where].set(rows["update_blocks"]))


def _token_rows(num_tokens: jax.Array, bucket: Bucket) -> jax.Array:
    """int32[T]: the row of each packed token. num_tokens [2, 3, 0] → [0, 0, 1, 1, 1, R-1, ...]."""
    rows = jnp.arange(bucket.num_rows, dtype=jnp.int32)
    if bucket.decode:
        return rows
    ends = jnp.cumsum(num_tokens, dtype=jnp.int32)
    token = jnp.arange(bucket.num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(ends, token, side="right", method="compare_all")
    return jnp.minimum(row, bucket.num_rows - 1).astype(jnp.int32)


def _unpack_batch(
    state: RequestState, rows: dict, token_row: jax.Array, bucket: Bucket, spec: StepSpec
) -> StepBatch:
    """The batch as attention and model want it. Rows whose sequence has finished on the device write nowhere."""
    slots, starts, num_tokens = rows["slots"], rows["starts"], rows["num_tokens"]
    live = ~state.finished[slots]
    query_starts = jnp.concatenate(
        [jnp.zeros(1, jnp.int32), jnp.cumsum(num_tokens, dtype=jnp.int32)]
    )
    token = jnp.arange(bucket.num_tokens, dtype=jnp.int32)
    valid = live[token_row] & (token < query_starts[1:][token_row])
    positions = starts[token_row] + token - query_starts[token_row]
    positions = jnp.where(valid, positions, 0)
    token_slots = slots[token_row]
    token_ids = jnp.where(valid, state.token_ids[token_slots, positions], 0)
    blocks = state.block_table[token_slots, positions // spec.block_size]
    slot_mapping = blocks * spec.block_size + positions % spec.block_size
    return StepBatch(
        slots=slots,
        query_starts=query_starts,
        kv_lens=jnp.where(live & (num_tokens > 0), starts + num_tokens, 0),
        samples=live & (rows["samples"] > 0),
        token_ids=token_ids,
        positions=positions,
        slot_mapping=jnp.where(valid, slot_mapping, NULL_BLOCK * spec.block_size),
        block_table=state.block_table[slots],
    )


def _append(
    state: RequestState, batch: StepBatch, token_ids: jax.Array, position: jax.Array
) -> RequestState:
    """The state with the sampled tokens at `position` of their rows, and with the rows that ended marked."""
    nowhere = state.token_ids.shape[0]
    slots = jnp.where(batch.samples, batch.slots, nowhere)
    ended = stops(token_ids, state, batch.slots) | (position + 1 >= state.max_len[batch.slots])
    return replace(
        state,
        token_ids=state.token_ids.at[slots, position].set(token_ids, mode="drop"),
        finished=state.finished.at[slots].set(ended, mode="drop"),
    )


def _empty_result(bucket: Bucket, spec: StepSpec) -> DeviceResult:
    shape, top = (spec.decode_steps, bucket.num_rows), spec.num_top_logprobs
    return DeviceResult(
        sampled=Sampled(
            token_ids=jnp.zeros(shape, jnp.int32),
            logprobs=jnp.zeros(shape, jnp.float32),
            ranks=jnp.zeros(shape, jnp.int32),
            top_token_ids=jnp.zeros((*shape, top), jnp.int32),
            top_logprobs=jnp.zeros((*shape, top), jnp.float32),
        ),
        num_sampled=jnp.zeros(bucket.num_rows, jnp.int32),
    )
