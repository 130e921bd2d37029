"""The tokens that each sequence gained in a step, and the ends of sequences found in their texts. Immutable values.

The engine passes a `StepOutput` to the output processor, which makes texts and outputs of it and answers with a
`TextEnd` for each sequence that ended at a stop string. Neither waits for the other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxpage.plan import StepResult
from jaxpage.request import FinishReason


class SequenceEnd(NamedTuple):
    """Why a sequence ended by its token ids or its length."""

    finish_reason: FinishReason
    # the stop id, "repetition_detected", or the error message; otherwise None
    stop_reason: int | str | None


class TextEnd(NamedTuple):
    """A sequence that ended at a stop string, which takes precedence over every other reason to end."""

    request_id: str
    index: int
    num_tokens: int  # of the output up to the end of the stop string
    num_dropped: int  # tokens that the same step sampled after it
    replica: int = 0  # that ran the step


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepOutput:
    """One entry in each list for every sequence that gained tokens or ended.

    `token_ids` are the new ones, including the one that ends the sequence. The logprobs of entry i are in `result`,
    whose arrays are `[step, row]`, at row `rows[i]`; forced tokens were not sampled and have none. `ends` has the
    entries that ended. The end of a beam search is an entry without tokens.
    """

    time: float = 0.0  # when it was collected; seconds, monotonic
    launch_time: float = 0.0  # on the same clock; 0 if nothing was launched
    num_tokens: int = 0  # that the step computed, without padding
    request_ids: list[str] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)  # of the sequence within its request
    token_ids: list[list[int]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    ends: dict[int, SequenceEnd] = field(default_factory=dict)
    result: StepResult | None = None  # None: nothing was sampled
    # (request id or None: discarded, number of tokens, whole vocabulary) of scored prompts, in the order of the plan
    scored: Sequence[tuple[str | None, int, bool]] = field(default_factory=list)
    # (request id or None, index of the sequence or None: all, positions) of captured tokens, in the order of `result`
    captured: Sequence[tuple[str | None, int | None, list[int]]] = field(default_factory=list)
    vocabulary_rows: list[int] = field(default_factory=list)  # of the plan
    replica: int = 0  # that ran the step
    # Ids of requests that restart: the outputs of earlier steps for them are void.
    restarted: list[str] = field(default_factory=list)

    def without(self, request_ids: Collection[str]) -> StepOutput:
        """A copy without some requests."""
        kept = [i for i, name in enumerate(self.request_ids) if name not in request_ids]
        return replace(
            self,
            request_ids=[self.request_ids[i] for i in kept],
            indices=[self.indices[i] for i in kept],
            token_ids=[self.token_ids[i] for i in kept],
            rows=[self.rows[i] for i in kept],
            ends={new: self.ends[old] for new, old in enumerate(kept) if old in self.ends},
            # These are matched to the result by position, so their entries must stay.
            scored=[
                (None if name is None or name in request_ids else name, count, whole)
                for name, count, whole in self.scored
            ],
            captured=[
                (None if name in request_ids else name, index, positions)
                for name, index, positions in self.captured
            ],
        )
