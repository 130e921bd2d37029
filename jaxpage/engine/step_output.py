"""What a step gave each sequence, and what its text says to that. Values: nothing here changes later.

The engine hands a `StepOutput` to whoever makes texts and outputs of it, and is told by `TextEnd`s which sequences
ended there. Neither of them waits for the other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jaxpage.plan import StepResult
from jaxpage.request import FinishReason


class SequenceEnd(NamedTuple):
    """Why a sequence ended, as far as its ids and its length tell."""

    finish_reason: FinishReason
    # the stop id, "repetition_detected", or what the error was; else None
    stop_reason: int | str | None


class TextEnd(NamedTuple):
    """A sequence whose text met a stop string, which wins over every other reason to end."""

    request_id: str
    index: int
    num_tokens: int  # of the output up to the end of the stop string
    num_dropped: int  # those that the same step sampled after it
    replica: int = 0  # whose step that was


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepOutput:
    """One entry in each list for every sequence that gained tokens or ended.

    `token_ids` are the new ones, the one that ends the sequence included. The logprobs of entry i stand in `result`,
    whose arrays are `[step, row]`, at row `rows[i]`; forced tokens, which nobody sampled, have none. `ends` has the
    entries that ended. The end of a beam search is an entry without tokens.
    """

    time: float = 0.0  # when it was collected; seconds, monotonic
    launch_time: float = 0.0  # on the same clock; 0 if nothing was launched
    num_tokens: int = 0  # that the step computed, padding left out
    request_ids: list[str] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)  # of the sequence within its request
    token_ids: list[list[int]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    ends: dict[int, SequenceEnd] = field(default_factory=dict)
    result: StepResult | None = None  # None: nothing was sampled
    # (request id, number of tokens, whole vocabulary): whose prompts the result scores, in the order of the plan
    scored: Sequence[tuple[str | None, int, bool]] = field(default_factory=list)  # None: nobody's
    # (request id, index of the sequence or None: all, positions): whose tokens the result captures, in its order
    captured: Sequence[tuple[str | None, int | None, list[int]]] = field(default_factory=list)
    vocabulary_rows: list[int] = field(default_factory=list)  # of the plan
    replica: int = 0  # which of several engines made the step
    # Ids of requests that begin anew: what earlier steps said of them does not count any more.
    restarted: list[str] = field(default_factory=list)

    def without(self, request_ids: Collection[str]) -> StepOutput:
        """The same, but nothing of some requests."""
        kept = [i for i, name in enumerate(self.request_ids) if name not in request_ids]
        return replace(
            self,
            request_ids=[self.request_ids[i] for i in kept],
            indices=[self.indices[i] for i in kept],
            token_ids=[self.token_ids[i] for i in kept],
            rows=[self.rows[i] for i in kept],
            ends={new: self.ends[old] for new, old in enumerate(kept) if old in self.ends},
            # What is scored or captured is found by its place.
            scored=[
                (None if name is None or name in request_ids else name, count, whole)
                for name, count, whole in self.scored
            ],
            captured=[
                (None if name in request_ids else name, index, positions)
                for name, index, positions in self.captured
            ],
        )
