"""What the scheduler asks of a step, and what the device answers. Lists and NumPy; engine and runner share this."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpage.request import Sequence

NULL_BLOCK = 0  # never allocated; takes the writes of padding
NULL_SLOT = 0  # request slot of padding rows; live sequences have slots 1 .. max_num_seqs


class Feature(enum.IntFlag):
    """Parts of the sampler that a step needs; the others are skipped on the device. One bit each."""

    RANDOM = 1  # some row has temperature > 0
    TRUNCATE = 2  # top_k, top_p or min_p
    PENALTIES = 4
    CONSTRAINTS = 8  # allowed ids, bad words, min_tokens, logit_bias
    TOP_LOGPROBS = 16  # logprobs >= 1: the best ids besides the sampled one


@dataclass(kw_only=True, slots=True, eq=False)
class BlockTransfers:
    """Block contents that move before the rows of a step run, in the order of these fields."""

    stores: list[tuple[int, bytes]] = field(default_factory=list)  # (host block, hash) to the disk
    loads: list[tuple[int, Any]] = field(
        default_factory=list
    )  # (host block, content from the disk)
    swaps_out: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    swaps_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)

    def __bool__(self) -> bool:
        return bool(self.stores or self.loads or self.swaps_out or self.swaps_in)


@dataclass(kw_only=True, slots=True, eq=False)
class StepPlan:
    """One step: parallel lists with one entry per row, and what changes on the device before the rows run.

    A row computes tokens `starts .. starts + num_tokens` of the sequence in its request slot. Their ids are not in the
    plan: the device keeps the token history of every request slot (see `batch.RequestState`).

    A row of `num_tokens == 0` is a fork: a further sequence of the request in the row before it (which may be a fork
    too). It samples from the logits of that row, so a prompt is computed once, whatever n.
    """

    sequences: list[Sequence] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    samples: list[bool] = field(
        default_factory=list
    )  # the row reaches its last known token, so it samples
    num_steps: int = (
        1  # decode steps in this launch; more than 1 only if every row decodes (num_tokens == 1)
    )
    features: Feature = Feature(0)
    admissions: list[Sequence] = field(
        default_factory=list
    )  # take a slot in this step: all their data goes up
    # (slot, KV-cache group, index in its table, block id): blocks gained by rows that are not admitted in this step
    table_updates: list[tuple[int, int, int, int]] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(
        default_factory=list
    )  # (source, destination), before any write
    moves: BlockTransfers | None = None  # between device, host and disk; before the copies

    @property
    def num_rows(self) -> int:
        return len(self.sequences)

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step sampled. P = plan.num_steps, R = plan.num_rows, W = top logprobs kept (0 unless asked for)."""

    token_ids: np.ndarray  # int32[P, R]
    num_sampled: (
        np.ndarray
    )  # int32[R]; the first so many of a row's P tokens count; 0: the row did not sample
    logprobs: np.ndarray  # float32[P, R] of the sampled tokens
    ranks: np.ndarray  # int32[P, R]; 1 = the most likely token
    top_token_ids: np.ndarray  # int32[P, R, W], best first
    top_logprobs: np.ndarray  # float32[P, R, W]
