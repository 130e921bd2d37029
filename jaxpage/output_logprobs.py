"""Logprobs of sampled tokens and of prompts, from the arrays of steps to vLLM's dicts.

Steps only append numbers; the dicts, with the text of each token, are created with an output.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpage.flat_logprobs import FlatLogprobs
from jaxpage.outputs import Logprob
from jaxpage.plan import StepResult
from jaxpage.sampling_params import SamplingParams
from jaxpage.tokenizer import Detokenizer

_MAX_BEGUN = 3  # tokens before another that may have begun its character: UTF-8 has 4 bytes at most

Logprobs = list[dict[int, Logprob]] | FlatLogprobs  # one entry for each token
PromptLogprobs = list[dict[int, Logprob] | None] | FlatLogprobs  # likewise; None for the first


class _Scored(NamedTuple):
    """A token, and alternatives at its position."""

    token_id: int
    logprob: float
    rank: int
    other_ids: list[int]
    other_logprobs: list[float]
    other_ranks: list[int] | None = None  # None: 1, 2, ...

    def entries(self) -> dict[int, Logprob]:
        entries = {self.token_id: Logprob(self.logprob, self.rank)}
        ranks = self.other_ranks or range(1, len(self.other_ids) + 1)
        for token_id, logprob, rank in zip(
            self.other_ids, self.other_logprobs, ranks, strict=False
        ):
            if token_id != self.token_id:
                entries[token_id] = Logprob(logprob, rank)
        return entries


def _from_vocabulary(
    token_id: int, logprobs: np.ndarray, wanted: list[int] | None, rank: int | None = None
) -> _Scored:
    """A token and the `wanted` ones, or all, from logprobs float32[V]."""

    def rank_of(i: int) -> int:
        return int((logprobs >= logprobs[i]).sum())

    rank = rank_of(token_id) if rank is None else rank
    own = float(logprobs[token_id])
    if wanted is not None:
        others = logprobs[wanted].tolist()
        return _Scored(token_id, own, rank, wanted, others, [rank_of(i) for i in wanted])
    order = np.argsort(-logprobs, kind="stable")
    return _Scored(token_id, own, rank, order.tolist(), logprobs[order].tolist())


class SampledLogprobs:
    """The logprobs of a sequence's tokens; the dicts of `Logprob`s are created with an output."""

    __slots__ = ("num_best", "token_ids", "from_vocabulary", "cumulative", "_named", "_pending")

    def __init__(self, params: SamplingParams, *, from_vocabulary: bool):
        """`from_vocabulary`: steps return the logprobs of all tokens, from which the wanted ones are selected here."""
        self.num_best = params.logprobs or 0  # besides the sampled token; -1: all
        self.token_ids = params.logprob_token_ids  # or these
        self.from_vocabulary = from_vocabulary
        self.cumulative = 0.0
        self._named: Logprobs = FlatLogprobs() if params.flat_logprobs else []
        self._pending: list[_Scored] = []

    def append(self, scored: _Scored) -> None:
        self.cumulative += scored.logprob
        self._pending.append(scored)

    def named(self, token_ids: list[int], detokenizer: Detokenizer | None) -> Logprobs:
        """The logprobs of all tokens so far, `token_ids`, with their texts from the detokenizer. It only grows."""
        named = self._named
        for scored in self._pending:
            before = token_ids[max(0, len(named) - _MAX_BEGUN) : len(named)]
            named.append(_with_text(scored.entries(), detokenizer, before))
        self._pending.clear()
        return named


def _with_text(
    entries: dict[int, Logprob], detokenizer: Detokenizer | None, before: list[int]
) -> dict[int, Logprob]:
    if detokenizer is not None:
        for entry_id, entry in entries.items():
            entry.decoded_token = detokenizer.decode_token(entry_id, before)
    return entries


class LogprobRows:
    """The logprobs of one step, read from its arrays at once for all rows with the same number of logprobs.

    `vocabulary_rows`: the row of each entry of the result's `vocabulary`.
    """

    def __init__(self, result: StepResult | None, vocabulary_rows: list[int]):
        self._result = result
        self._vocabulary_rows = vocabulary_rows
        self._wanted: dict[int, list[tuple[SampledLogprobs, list[int], int]]] = {}

    def add(self, logprobs: SampledLogprobs, token_ids: list[int], row: int) -> None:
        """Register `logprobs` to get those of `token_ids`, the first tokens of a row."""
        if logprobs.from_vocabulary:
            self._take(logprobs, token_ids, row)
        else:
            self._wanted.setdefault(logprobs.num_best, []).append((logprobs, token_ids, row))

    def distribute(self) -> None:
        for num_best, wanted in self._wanted.items():
            self._distribute(num_best, wanted)

    def _take(self, logprobs: SampledLogprobs, token_ids: list[int], row: int) -> None:
        result = self._result
        assert result is not None and len(token_ids) <= 1, "one token a step"
        for token_id in token_ids:
            found = result.vocabulary[self._vocabulary_rows.index(row)]
            rank = int(result.ranks[0, row])
            logprobs.append(_from_vocabulary(token_id, found, logprobs.token_ids, rank))

    def _distribute(
        self, num_best: int, wanted: list[tuple[SampledLogprobs, list[int], int]]
    ) -> None:
        result = self._result
        assert result is not None
        rows = [row for _, _, row in wanted]
        width = result.top_token_ids.shape[-1] if num_best == -1 else num_best
        sampled, ranks = result.logprobs[:, rows].tolist(), result.ranks[:, rows].tolist()
        best_ids = result.top_token_ids[:, rows, :width].tolist()
        best_logprobs = result.top_logprobs[:, rows, :width].tolist()
        for i, (logprobs, token_ids, _) in enumerate(wanted):
            for step, token_id in enumerate(token_ids):
                logprobs.append(
                    _Scored(
                        token_id,
                        sampled[step][i],
                        ranks[step][i],
                        best_ids[step][i],
                        best_logprobs[step][i],
                    )
                )


class ScoredPrompt:
    """The logprobs of a prompt's tokens, in the order in which steps score them: from the second token on.

    `of_given_ids`: float32[rows, ids] of `prompt_logprob_token_ids`, or None.
    """

    def __init__(self, params: SamplingParams, prompt_token_ids: list[int]):
        self._num_best = params.prompt_logprobs  # -1: all; None: only `_ids`
        self._ids = params.prompt_logprob_token_ids or []
        self._start = params.prompt_logprob_start or 0
        self._token_ids = prompt_token_ids
        self._flat = params.flat_logprobs
        self._scored: list[_Scored | None] = [None]
        self.of_given_ids: np.ndarray | None = None
        if self._ids:
            shape = len(self._ids), max(map(len, self._ids))
            self.of_given_ids = np.full(shape, -np.inf, np.float32)

    def take(
        self, result: StepResult, start: int, count: int, vocabulary_start: int | None
    ) -> None:
        """Take tokens `start` to `start + count` of the result, and their place in its vocabularies, if any."""
        for i in range(start, start + count):
            token_id = self._token_ids[len(self._scored)]
            found = None
            if vocabulary_start is not None:
                found = result.prompt_vocabulary[vocabulary_start + i - start]
                self._take_given_ids(found)
            if self._num_best is None:
                self._scored.append(None)
            elif self._num_best == -1:
                assert found is not None
                self._scored.append(_from_vocabulary(token_id, found, None))
            else:
                width = self._num_best
                self._scored.append(
                    _Scored(
                        token_id,
                        float(result.prompt_logprobs[i]),
                        int(result.prompt_ranks[i]),
                        result.prompt_top_token_ids[i, :width].tolist(),
                        result.prompt_top_logprobs[i, :width].tolist(),
                    )
                )

    def _take_given_ids(self, logprobs: np.ndarray) -> None:
        """Take those of the next token, from float32[V]."""
        row = len(self._scored) - 1 - self._start
        if self.of_given_ids is not None and 0 <= row < len(self._ids):
            for column, token_id in enumerate(self._ids[row]):
                if token_id >= 0:
                    self.of_given_ids[row, column] = logprobs[token_id]

    def named(self, detokenizer: Detokenizer | None) -> PromptLogprobs:
        """One dict for each token of the prompt, None for the first."""
        named: PromptLogprobs = FlatLogprobs() if self._flat else []
        for position, scored in enumerate(self._scored):
            before = self._token_ids[max(0, position - _MAX_BEGUN) : position]
            named.append(
                None if scored is None else _with_text(scored.entries(), detokenizer, before)
            )
        return named
