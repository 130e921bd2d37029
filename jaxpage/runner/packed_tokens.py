"""The tokens of a step, packed one row after the other, as model and attention see them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpage.batch import StepBatch
from jaxpage.plan import NULL_BLOCK
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.encoder import last_keys
from jaxpage.runner.slots import POSITION_OFFSET
from jaxpage.runner.spec import StepSpec
from jaxpage.sampling.fields import RequestState

Rows = dict[str, jax.Array]  # the fields of `pack.rows_layout` or `pack.step_layout`


def token_rows(num_tokens: jax.Array, bucket: Bucket) -> jax.Array:
    """int32[T]: the row of each packed token. num_tokens [2, 3, 0] → [0, 0, 1, 1, 1, R-1, ...]."""
    rows = jnp.arange(bucket.num_rows, dtype=jnp.int32)
    if bucket.decode:
        return rows
    ends = jnp.cumsum(num_tokens, dtype=jnp.int32)
    token = jnp.arange(bucket.num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(ends, token, side="right", method="compare_all")
    return jnp.minimum(row, bucket.num_rows - 1).astype(jnp.int32)


def unpack_batch(state: RequestState, rows: Rows, bucket: Bucket, spec: StepSpec) -> StepBatch:
    """The batch as attention and model want it. Rows whose sequence has finished on the device write nowhere."""
    token_row = token_rows(rows["num_tokens"], bucket)
    slots, starts, num_tokens = rows["slots"], rows["starts"], rows["num_tokens"]
    live = ~state["finished"][slots]
    first = jnp.zeros(1, jnp.int32)
    query_starts = jnp.concatenate([first, jnp.cumsum(num_tokens, dtype=jnp.int32)])
    token = jnp.arange(bucket.num_tokens, dtype=jnp.int32)
    valid = live[token_row] & (token < query_starts[1:][token_row])
    positions = starts[token_row] + token - query_starts[token_row]
    positions = jnp.where(valid, positions, 0)
    token_slots = slots[token_row]
    token_ids = jnp.where(valid, state["token_ids"][token_slots, positions], 0)
    blocks = state["block_tables"][token_slots, :, positions // spec.block_size].T  # [G, T]
    slot_mappings = blocks * spec.block_size + (positions % spec.block_size)[None]
    return StepBatch(
        slots=slots,
        query_starts=query_starts,
        kv_lens=jnp.where(live & (num_tokens > 0), starts + num_tokens, 0),
        token_ids=token_ids,
        positions=positions,
        slot_mappings=jnp.where(valid[None], slot_mappings, NULL_BLOCK * spec.block_size),
        block_tables=jnp.moveaxis(state["block_tables"][slots], 1, 0),
        is_token=valid,
        last_keys=last_keys(spec.pictures, rows, positions, token_row),
    )


def last_known(batch: StepBatch, rows: Rows) -> jax.Array:
    """int32[R]: where each row's last known token is among the packed ones; behind it come its drafts."""
    return batch.query_starts[1:] - 1 - rows["num_drafts"]


def rotary_positions(
    state: RequestState, rows: Rows, bucket: Bucket, indices: jax.Array
) -> jax.Array:
    """int32[3, T], or int32[T] where all three are the same: those that went up, else indices plus their offset."""
    token_row = token_rows(rows["num_tokens"], bucket)
    later = indices + state[POSITION_OFFSET][rows["slots"]][token_row]
    if bucket.decode:
        return later
    return jnp.where(rows["positions"] < 0, later, rows["positions"])
