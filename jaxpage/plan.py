"""What the scheduler asks of a step, and what the device answers. Plain values: integers, lists, NumPy arrays.

The engine and the runner share these types and nothing else. A plan can be printed, stored and sent; it holds no
object that anybody changes later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NULL_BLOCK = 0  # never allocated; takes the writes of padding
NULL_SLOT = 0  # request slot of padding rows; live sequences have slots 1 .. max_num_seqs


@dataclass(kw_only=True, slots=True, eq=False)
class BlockTransfers:
    """Block contents that move before the rows of a step run, in the order of these fields."""

    # (host block, hash) to the disk
    stores: list[tuple[int, bytes]] = field(default_factory=list)
    # (host block, content from the disk)
    loads: list[tuple[int, list[np.ndarray]]] = field(default_factory=list)
    swaps_out: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    swaps_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)

    def __bool__(self) -> bool:
        return bool(self.stores or self.loads or self.swaps_out or self.swaps_in)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Admission:
    """What fills a request slot: a sequence that starts to run, or the new state of a beam."""

    slot: int
    sequence_index: int  # which of the n continuations; the sampler folds it into the seed
    token_ids: list[int]  # prompt and output tokens known so far
    block_tables: list[list[int]]  # one for each KV-cache group
    prompt_len: int
    max_len: int  # tokens at which the sequence ends
    fields: Mapping[str, Any]  # values of the other slot fields, by name: `Request.slot_fields`


@dataclass(kw_only=True, slots=True, eq=False)
class StepPlan:
    """One step: parallel lists with one entry per row, and what changes on the device before the rows run.

    A row computes tokens `starts .. starts + num_tokens` of the sequence in its request slot. Their ids are not in the
    plan: the device keeps the token history of every request slot.

    A row of `num_tokens == 0` is a sibling row: a further sequence of the request in the row before it (which may be a
    sibling row too). It samples from the logits of that row, so a prompt is computed once, whatever n. Or it is one of
    the `num_late_rows` at the end: an earlier step computed its last known token, and this one samples.
    """

    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    # the row reaches its last known token, so it samples
    samples: list[bool] = field(default_factory=list)
    num_late_rows: int = 0
    # decode steps in this launch; more than 1 only if every row decodes (num_tokens == 1)
    num_steps: int = 1
    features: int = 0  # what the rows ask of the sampler, as bits; see `sampling.features`
    # row -> uint32[ceil(V/32)]: the tokens that the row may sample in this step
    masks: dict[int, np.ndarray] = field(default_factory=dict)
    # (row, [k, E]): embeddings instead of the row's first k tokens of this step
    input_embeds: list[tuple[int, np.ndarray]] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    # (slot, KV-cache group, index in its table, block id): blocks gained by rows that are not admitted in this step
    table_updates: list[tuple[int, int, int, int]] = field(default_factory=list)
    # (source, destination), before any write
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    transfers: BlockTransfers | None = None  # between device, host and disk; before the copies

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step sampled. P = plan.num_steps, R = plan.num_rows, W = top logprobs kept (0 unless asked for)."""

    token_ids: np.ndarray  # int32[P, R]
    # int32[R]; the first so many of a row's P tokens count; 0: the row did not sample
    num_sampled: np.ndarray
    logprobs: np.ndarray  # float32[P, R] of the sampled tokens
    ranks: np.ndarray  # int32[P, R]; 1 = the most likely token
    top_token_ids: np.ndarray  # int32[P, R, W], best first
    top_logprobs: np.ndarray  # float32[P, R, W]
