"""Beam search over one prompt: which continuations survive, which have ended, and when the search is over.

Knows log-probabilities and token ids. Must not know sequences, blocks or steps: `beam_scheduling` does.

The semantics are those of transformers' `generate(num_beams=width)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

Candidates = list[tuple[int, float]]  # (token id, log-probability), best first


class Survivor(NamedTuple):
    """A live beam of the next step: the beam that it continues, and with which token."""

    parent: int
    token_id: int
    cum_logprob: float


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A continuation of the prompt: a linked list from its last token to its first, whose tails beams share."""

    parent: Beam | None  # None: the empty continuation
    token_id: int
    cum_logprob: float  # of all its tokens
    candidates: Candidates  # from which the last token was taken

    def path(self) -> list[Beam]:
        """The beam at each length, from 1 token to all of its tokens."""
        beams: list[Beam] = []
        beam: Beam | None = self
        while beam is not None and beam.parent is not None:
            beams.append(beam)
            beam = beam.parent
        return beams[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """A beam that ended, by EOS (its last token) or by its length."""

    beam: Beam
    score: float  # cum_logprob / number of tokens ** length_penalty
    ended_by_eos: bool


def num_candidates(width: int, num_eos_token_ids: int) -> int:
    """How many candidates a step considers: enough that `width` survive, however many of them end."""
    return max(2, 1 + num_eos_token_ids) * width


class Beams:
    """The beams of one request: one empty beam at first, `width` from the first token on.

    `early_stopping` says when the search ends once `width` hypotheses have ended. True: at once. False: when the best
    beam, scored at its current length, no longer beats the worst hypothesis. "never": likewise, but scored at
    `max_tokens` if the length penalty favours length.
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
    ):
        self.width = width
        self.max_tokens = max_tokens
        self.eos_token_ids = eos_token_ids
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.num_candidates = num_candidates(width, len(eos_token_ids))
        self.restart()

    def restart(self) -> None:
        """Start the search, or start it over."""
        self.live = [Beam(None, -1, 0.0, [])]
        self.ended: list[Hypothesis] = []  # the best `width` so far, best first
        self.num_tokens = 0  # of each live beam
        self.done = False
        self.reports: dict[int, Candidates] = {}  # of live beams, while others still sample

    def advance(self, candidates: Sequence[Candidates]) -> list[Survivor]:
        """Advance by one token. `candidates` has the `num_candidates` most likely next tokens of each live beam.

        Returns the new live beams, best first. Only the best `width` of all candidates may end; the others serve to
        keep `width` beams alive. Ties go to the better beam, then to the candidate listed first.
        """
        best = sorted(
            (
                Survivor(parent, token_id, beam.cum_logprob + logprob)
                for parent, (beam, row) in enumerate(zip(self.live, candidates, strict=True))
                for token_id, logprob in row
            ),
            key=lambda survivor: -survivor.cum_logprob,
        )
        self.num_tokens += 1
        at_end = self.num_tokens == self.max_tokens
        live, survivors = [], []
        for rank, (parent, token_id, cum_logprob) in enumerate(best[: self.num_candidates]):
            beam = Beam(self.live[parent], token_id, cum_logprob, candidates[parent])
            if at_end or token_id in self.eos_token_ids:
                if rank < self.width:
                    self._end(beam)
            elif len(live) < self.width:
                live.append(beam)
                survivors.append(best[rank])
        self.live = live
        self.done = at_end or self._nothing_to_gain()
        return survivors

    def _end(self, beam: Beam) -> None:
        score = self._score(beam, self.num_tokens)
        ended_by_eos = beam.token_id in self.eos_token_ids
        self.ended.append(Hypothesis(beam, score, ended_by_eos))
        self.ended.sort(key=lambda hypothesis: -hypothesis.score)
        del self.ended[self.width :]

    def _nothing_to_gain(self) -> bool:
        if len(self.ended) < self.width:
            return False
        if self.early_stopping is True:
            return True
        to_the_end = self.early_stopping == "never" and self.length_penalty > 0
        length = self.max_tokens if to_the_end else self.num_tokens
        return self._score(self.live[0], length) <= self.ended[-1].score

    def _score(self, beam: Beam, num_tokens: int) -> float:
        return beam.cum_logprob / num_tokens**self.length_penalty
