"""Logprobs of sampled tokens, from the arrays of steps to vLLM's dicts.

Steps only append numbers; the dicts, with the text of each token, are made when an output is.
"""

from __future__ import annotations

from jaxpage.outputs import Logprob
from jaxpage.plan import StepResult
from jaxpage.tokenizer import Detokenizer

_MAX_BEGUN = 3  # tokens before another that may have begun its character: UTF-8 has 4 bytes at most


class SampledLogprobs:
    """The logprobs of a sequence's tokens; the dicts of `Logprob`s are made when an output is."""

    __slots__ = ("num_best", "cumulative", "_named", "_pending")

    def __init__(self, num_best: int):
        self.num_best = num_best  # besides the sampled token; -1: all
        self.cumulative = 0.0
        self._named: list[dict[int, Logprob]] = []
        self._pending: list[tuple[int, float, int, list[int], list[float]]] = []

    def append(
        self,
        token_id: int,
        logprob: float,
        rank: int,
        best_ids: list[int],
        best_logprobs: list[float],
    ) -> None:
        self.cumulative += logprob
        self._pending.append((token_id, logprob, rank, best_ids, best_logprobs))

    def named(
        self, token_ids: list[int], detokenizer: Detokenizer | None
    ) -> list[dict[int, Logprob]]:
        """Of all tokens so far, `token_ids`; the detokenizer says how they read. Only ever appended to."""
        named = self._named
        for token_id, logprob, rank, best_ids, best_logprobs in self._pending:
            entries = {token_id: Logprob(logprob, rank)}
            for best_rank, best in enumerate(zip(best_ids, best_logprobs, strict=True), start=1):
                if best[0] != token_id:
                    entries[best[0]] = Logprob(best[1], best_rank)
            if detokenizer is not None:
                before = token_ids[max(0, len(named) - _MAX_BEGUN) : len(named)]
                for entry_id, entry in entries.items():
                    entry.decoded_token = detokenizer.decode_token(entry_id, before)
            named.append(entries)
        self._pending.clear()
        return named


class LogprobRows:
    """The logprobs of one step, read from its arrays for all rows at once that want as many."""

    def __init__(self, result: StepResult | None):
        self._result = result
        self._wanted: dict[int, list[tuple[SampledLogprobs, list[int], int]]] = {}

    def add(self, logprobs: SampledLogprobs, token_ids: list[int], row: int) -> None:
        """`logprobs` wants those of `token_ids`, the first tokens of a row."""
        self._wanted.setdefault(logprobs.num_best, []).append((logprobs, token_ids, row))

    def distribute(self) -> None:
        for num_best, wanted in self._wanted.items():
            self._distribute(num_best, wanted)

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
                    token_id,
                    sampled[step][i],
                    ranks[step][i],
                    best_ids[step][i],
                    best_logprobs[step][i],
                )
