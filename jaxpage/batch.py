"""Device vocabulary of a step: what the device keeps for each running sequence, and what one step is told.

Letters: Q request slots (slot 0 is the null slot of padding rows), R rows, T packed tokens, M blocks per sequence,
C tokens of the longest sequence (max_model_len), G KV-cache groups (see `kv_groups`), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

MAX_LOGIT_BIAS = 1024  # logit_bias entries of one request
MAX_BAD_WORDS = 128  # bad_words of one request, after tokenisation
MAX_BAD_WORD_LEN = 16  # tokens in one of them


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RequestState:
    """What the device knows of each running sequence, indexed by request slot. Donated to every step.

    A slot is filled once, when its sequence is admitted; steps append the tokens they sample. So a step's upload is a
    few integers a row, and step n+1 can be launched before the tokens of step n were read.
    """

    token_ids: jax.Array  # int32[Q, C] known tokens; entries beyond the known ones are never read
    block_tables: (
        jax.Array
    )  # int32[Q, G, M] entries beyond the KV in use, or behind a window, are never read
    finished: (
        jax.Array
    )  # bool[Q] a stop id was sampled or max_len reached: later steps of the row do nothing
    prompt_len: jax.Array  # int32[Q]
    min_len: jax.Array  # int32[Q] stop ids are masked while the sequence is shorter
    max_len: jax.Array  # int32[Q] the sequence ends at this many tokens
    key: jax.Array  # uint32[Q, 2] threefry key data: fold_in(key(seed), sequence index)
    temperature: jax.Array  # float32[Q] 0 = greedy
    top_k: jax.Array  # int32[Q] 0 = off
    top_p: jax.Array  # float32[Q] 1 = off
    min_p: jax.Array  # float32[Q] 0 = off
    presence_penalty: jax.Array  # float32[Q] 0 = off
    frequency_penalty: jax.Array  # float32[Q] 0 = off
    repetition_penalty: jax.Array  # float32[Q] 1 = off
    stop_mask: (
        jax.Array
    )  # uint32[Q, ceil(V/32)] bit v % 32 of word v // 32: token v ends the sequence
    allowed_mask: (
        jax.Array
    )  # uint32[Q, ceil(V/32)] token v may be sampled; all ones = no restriction
    bias_ids: jax.Array  # int32[Q, MAX_LOGIT_BIAS] padding: V, dropped
    bias_values: jax.Array  # float32[Q, MAX_LOGIT_BIAS]
    bad_words: (
        jax.Array
    )  # int32[Q, MAX_BAD_WORDS, MAX_BAD_WORD_LEN] right-aligned, padding on the left: -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """One packed step, unpacked on the device from a single int32 upload. T tokens and R rows are a bucket."""

    slots: jax.Array  # int32[R] request slot; padding: NULL_SLOT
    query_starts: jax.Array  # int32[R+1] first token of each row in the packed T
    kv_lens: (
        jax.Array
    )  # int32[R] tokens of KV after this step's writes; 0 marks a row without tokens
    token_ids: jax.Array  # int32[T] padding: 0
    positions: jax.Array  # int32[T] padding: 0
    slot_mappings: (
        jax.Array
    )  # int32[G, T] where the tokens' KV goes; padding: a slot of the null block
    block_tables: jax.Array  # int32[G, R, M]
