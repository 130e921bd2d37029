"""The plan of a step, from the scheduler, and its result, from the device. Plain values: integers, lists, NumPy arrays.

The engine and the runner share these types and nothing else. A plan can be printed, stored and sent; it contains
no object that changes later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from jaxpage.pictures.border import Picture

NULL_BLOCK = 0  # never allocated; receives the writes of padding
NULL_SLOT = 0  # request slot of padding rows; running sequences have slots 1 .. max_num_seqs


def _no_floats() -> Any:
    return field(default_factory=lambda: np.zeros(0, np.float32))


def _no_ints() -> Any:
    return field(default_factory=lambda: np.zeros(0, np.int32))


class ParameterError(RuntimeError):
    """No step can run until the owner of the model replaces a parameter."""


class DeletedParameterError(ParameterError):
    """The owner of the model donated or deleted a parameter."""

    def __init__(self) -> None:
        super().__init__(
            "a parameter of the model was donated or deleted; put others in place before requests go on"
        )


class UnfitParameterError(ParameterError):
    """The owner of the model replaced a parameter by an array that programs do not take."""

    def __init__(self, found: object, expected: object):
        super().__init__(
            f"a parameter of the model is now {found}, but programs were compiled for {expected}; put such an array in "
            "place, or call update() of a Sampler, before requests go on"
        )


@dataclass(kw_only=True, slots=True, eq=False)
class BlockTransfers:
    """Block contents that move before the rows of a step run, in the order of these fields."""

    # (host block, hash) to disk
    stores: list[tuple[int, bytes]] = field(default_factory=list)
    # (host block, content from disk)
    loads: list[tuple[int, Any]] = field(default_factory=list)
    swaps_out: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    swaps_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)

    def __bool__(self) -> bool:
        return bool(self.stores or self.loads or self.swaps_out or self.swaps_in)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Admission:
    """The upload to a request slot: a sequence that starts to run, or the new state of a beam."""

    slot: int
    sequence_index: int  # which of the n continuations; the sampler folds it into the seed
    token_ids: list[int]  # prompt and output tokens known so far
    block_tables: list[list[int]]  # one for each KV-cache group
    prompt_len: int
    max_len: int  # number of tokens at which the sequence ends
    fields: Mapping[str, Any]  # values of the other slot fields, by name: `Request.slot_fields`
    adapter_slot: int = 0  # 0: no adapter
    # of the cached recurrent state with which the sequence begins; 0: it begins with zeros
    state_slot: int = 0


@dataclass(kw_only=True, slots=True, eq=False)
class StepPlan:
    """One step: parallel lists with one entry per row, and changes on the device before the rows run.

    A row computes tokens `starts .. starts + num_tokens` of the sequence in its request slot. Their ids are not in the
    plan: the device keeps the token history of every request slot (see `runner.slots`).

    A row that is not late and has `num_tokens == 0` is a sibling row: another sequence of the request in the row before
    it (which may be a sibling row too). It samples from the logits of that row, so a prompt is computed only once for
    any n. If it does not sample in this step, it takes over that row's hidden state and samples late.

    The last `num_late_rows` rows were computed by an earlier step, which left their hidden states in their slots. They
    only sample in this step: `num_tokens == 0`, `samples` is True, `starts` is the number of tokens known so far.
    """

    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    # The row reaches its last known token and samples in this step.
    samples: list[bool] = field(default_factory=list)
    num_late_rows: int = 0
    # Decode steps in this launch. More than 1 only if every row decodes (num_tokens == 1) and none has a mask or needs
    # the log-probabilities of the whole vocabulary.
    num_steps: int = 1
    features: int = 0  # union of the rows' feature bits
    # Row -> uint32[ceil(V / 32)]: the tokens that it may sample in this step, one bit each, lowest bit first.
    masks: dict[int, np.ndarray] = field(default_factory=dict)
    # (slot, position of the first, ids): tokens that the host appended to running sequences
    forced_tokens: list[tuple[int, int, list[int]]] = field(default_factory=list)
    # (row, [k, E]): embeddings that replace the row's first k tokens of this step
    input_embeds: list[tuple[int, np.ndarray]] = field(default_factory=list)
    # (picture, int32[num_embeddings]): pictures to encode into these rows of the picture cache before the rows run
    encodes: list[tuple[Picture, np.ndarray]] = field(default_factory=list)
    # (row, offset, int32[k] rows of the picture cache): embeddings that replace k of the row's tokens of this step;
    # the null row, 0, replaces nothing
    picture_tokens: list[tuple[int, int, np.ndarray]] = field(default_factory=list)
    # (row, int32[3, k]): rotary positions of the row's first k tokens of this step; see `PromptPictures`
    positions: list[tuple[int, np.ndarray]] = field(default_factory=list)
    # (row, offset, ids, whether to return the whole vocabulary): score `ids`, which follow the row's tokens from
    # `offset` on in this step
    prompt_scores: list[tuple[int, int, list[int], bool]] = field(default_factory=list)
    # (row, offsets of its tokens in this step, ascending): tokens whose values inside the model are returned
    captured: list[tuple[int, list[int]]] = field(default_factory=list)
    # Row -> how many guesses at its next tokens it has, which are the last of its `num_tokens` and not among the known
    # ones. The row samples once more after each guess that was right.
    num_drafts: dict[int, int] = field(default_factory=dict)
    # Row -> its guesses, for all of `num_drafts`; or empty, and the draft model makes them on the device
    drafts: dict[int, list[int]] = field(default_factory=dict)
    # sampling rows that return the log-probabilities of the whole vocabulary
    vocabulary_rows: list[int] = field(default_factory=list)
    # (adapter slot, contents): loaded before sequences are admitted
    adapter_loads: list[tuple[int, tuple[np.ndarray, ...]]] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    # (slot, KV-cache group, index in its table, block id): blocks gained by rows that are not admitted in this step
    table_updates: list[tuple[int, int, int, int]] = field(default_factory=list)
    # (source, destination), before any write
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    # between device, host and disk, before the copies
    transfers: BlockTransfers | None = None
    # (request slot, slot of a cached state): recurrent states to copy after the rows have run
    state_saves: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)

    @property
    def runs_draft_model(self) -> bool:
        """Whether some rows have drafts that the host does not know."""
        return bool(self.num_drafts) and not self.drafts


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step sampled. R = plan.num_rows, W = number of top logprobs (0 unless asked for). P = plan.num_steps, or
    1 + the engine's most drafts for a row if any row has drafts.

    N tokens of `plan.prompt_scores` were scored; A of them, which come last, with the whole vocabulary.
    """

    token_ids: np.ndarray  # int32[P, R]
    # int32[R]: how many of a row's P tokens are valid; 0: the row did not sample
    num_sampled: np.ndarray
    # float32[P, R] of the sampled tokens; if no row asks for logprobs 0, or NaN where the model computed NaN
    logprobs: np.ndarray
    ranks: np.ndarray  # int32[P, R]; 1 = the most likely token; 0 if no row asks for logprobs
    top_token_ids: np.ndarray  # int32[P, R, W], best first
    top_logprobs: np.ndarray  # float32[P, R, W]
    # The following are empty unless the plan asks for them.
    vocabulary: np.ndarray = _no_floats()  # float32[len(plan.vocabulary_rows), V]
    prompt_logprobs: np.ndarray = _no_floats()  # float32[N]
    prompt_ranks: np.ndarray = _no_ints()  # int32[N]
    # int32[N, W], best first; here W is the engine's maximum
    prompt_top_token_ids: np.ndarray = _no_ints()
    prompt_top_logprobs: np.ndarray = _no_floats()  # float32[N, W]
    prompt_vocabulary: np.ndarray = _no_floats()  # float32[A, V]
    # float32[n, J, E]: values of the n tokens of `plan.captured`, in order, at each of J captured points
    captured: np.ndarray = _no_floats()
    # int32[layers with experts, X] with `record_expert_load`: how many tokens the step routed to each expert
    expert_load: np.ndarray = _no_ints()
    program: str = ""  # that computed the step's tokens, or sampled if there were none
    fill: float = 0.0  # share of that program's tokens that are not padding; 0 if it only sampled


# The fields of a result that the step computes.
RESULT_ARRAYS = tuple(f.name for f in fields(StepResult) if f.type == "np.ndarray")
