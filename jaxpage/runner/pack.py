"""From a plan to the integers that go up: NumPy in, one int32 buffer out. Pure; knows no device."""

from __future__ import annotations

import numpy as np

from jaxpage.batch import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_LOGIT_BIAS
from jaxpage.plan import StepPlan
from jaxpage.request import Sequence
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.layout import Field, Layout
from jaxpage.sampling.constraints import pack_mask
from jaxpage.sampling.keys import row_key

_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def step_layout(
    bucket: Bucket, *, block_size: int, decode_steps: int, num_groups: int = 1
) -> Layout:
    """What goes up for one step of a bucket; `pack_step` fills it.

    In each KV-cache group a row gains at most one block for each `block_size` of its new tokens, one for their start
    within a block, and one for a copy-on-write; so U table updates always suffice.
    """
    rows = bucket.num_rows
    new_tokens = rows * decode_steps if bucket.decode else bucket.num_tokens
    num_updates = num_groups * (new_tokens // block_size + 2 * rows)
    return Layout(
        (
            *rows_layout(rows).fields,
            Field("update_slots", (num_updates,)),  # padding: the null slot's entry 0
            Field("update_groups", (num_updates,)),
            Field("update_indices", (num_updates,)),
            Field("update_blocks", (num_updates,)),
            Field("copy_sources", (num_groups * rows,)),  # padding: the null block onto itself
            Field("copy_destinations", (num_groups * rows,)),
        )
    )


def rows_layout(num_rows: int) -> Layout:
    """What must be known of the rows to sample for them; `pack_rows` fills it."""
    return Layout(
        (
            Field("features", ()),
            Field("num_steps", ()),
            Field("slots", (num_rows,)),  # padding: NULL_SLOT
            Field("starts", (num_rows,)),
            Field("num_tokens", (num_rows,)),  # padding: 0
            Field("samples", (num_rows,)),  # 0 or 1
        )
    )


def pack_rows(plan: StepPlan, layout: Layout) -> np.ndarray:
    """int32[layout.size]. A fresh buffer each time: the device may read the last one while this one is filled."""
    buffer = np.zeros(layout.size, np.int32)
    views = layout.views(buffer)
    rows = plan.num_rows
    views["features"][()] = int(plan.features)
    views["num_steps"][()] = plan.num_steps
    views["slots"][:rows] = plan.slots
    views["starts"][:rows] = plan.starts
    views["num_tokens"][:rows] = plan.num_tokens
    views["samples"][:rows] = plan.samples
    return buffer


def pack_step(plan: StepPlan, layout: Layout) -> np.ndarray:
    """The same with what changes in block tables and pool before the rows run."""
    buffer = pack_rows(plan, layout)
    views = layout.views(buffer)
    if plan.table_updates:
        updates = np.asarray(plan.table_updates, np.int32)
        for column, name in enumerate(("slots", "groups", "indices", "blocks")):
            views[f"update_{name}"][: len(updates)] = updates[:, column]
    if plan.block_copies:
        copies = np.asarray(plan.block_copies, np.int32)
        views["copy_sources"][: len(copies)] = copies[:, 0]
        views["copy_destinations"][: len(copies)] = copies[:, 1]
    return buffer


def admission_layout(
    *, max_model_len: int, num_blocks_per_row: int, vocab_size: int, num_groups: int = 1
) -> Layout:
    """What goes up once when a sequence takes a request slot: field for field, `batch.RequestState` of that slot."""
    words = -(-vocab_size // 32)
    return Layout(
        (
            Field("slot", ()),
            Field("token_ids", (max_model_len,)),
            Field("block_tables", (num_groups, num_blocks_per_row)),
            Field("prompt_len", ()),
            Field("min_len", ()),
            Field("max_len", ()),
            Field("key", (2,), "uint32"),
            Field("temperature", (), "float32"),
            Field("top_k", ()),
            Field("top_p", (), "float32"),
            Field("min_p", (), "float32"),
            Field("presence_penalty", (), "float32"),
            Field("frequency_penalty", (), "float32"),
            Field("repetition_penalty", (), "float32"),
            Field("stop_mask", (words,), "uint32"),
            Field("allowed_mask", (words,), "uint32"),
            Field("bias_ids", (MAX_LOGIT_BIAS,)),
            Field("bias_values", (MAX_LOGIT_BIAS,), "float32"),
            Field("bad_words", (MAX_BAD_WORDS, MAX_BAD_WORD_LEN)),
        )
    )


def pack_admission(sequence: Sequence, layout: Layout, *, vocab_size: int) -> np.ndarray:
    """int32[layout.size] for a sequence that has its slot and its blocks."""
    buffer = np.zeros(layout.size, np.int32)
    views = layout.views(buffer)
    request, params = sequence.request, sequence.request.params
    prompt_len = len(request.prompt_token_ids)
    views["slot"][()] = sequence.slot
    views["token_ids"][: len(sequence.token_ids)] = sequence.token_ids
    for group, table in enumerate(sequence.block_tables):
        views["block_tables"][group, : len(table)] = table
    views["prompt_len"][()] = prompt_len
    views["min_len"][()] = min(prompt_len + params.min_tokens, sequence.max_len)
    views["max_len"][()] = sequence.max_len
    views["key"][:] = row_key(request.seed, sequence.index)
    views["top_k"][()] = min(params.top_k, vocab_size)
    for name in _FLOATS:
        views[name][()] = getattr(params, name)
    views["stop_mask"][:] = pack_mask(request.stop_token_ids, vocab_size)
    if params.allowed_token_ids is None:
        views["allowed_mask"][:] = np.uint32(0xFFFFFFFF)
    else:
        views["allowed_mask"][:] = pack_mask(params.allowed_token_ids, vocab_size)
    views["bias_ids"][:] = vocab_size
    if params.logit_bias:
        count = len(params.logit_bias)
        views["bias_ids"][:count] = list(params.logit_bias)
        views["bias_values"][:count] = list(params.logit_bias.values())
    views["bad_words"][:] = -1
    for i, word in enumerate(request.bad_words_token_ids):
        views["bad_words"][i, -len(word) :] = word
    return buffer
