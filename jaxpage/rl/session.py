"""`Session`: a conversation with the policy, turn by turn, as an append-only sequence of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpage.rl.rollout import Rollout, Row, stack_rows
from jaxpage.rl.seeds import GroupSeeds
from jaxpage.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxpage.rl.sampler import Sampler


@dataclass(frozen=True)
class _Turn:
    start: int  # in the session's tokens
    rollout: Rollout  # of one row


class Session:
    """Tokens of an environment and of the policy, in turns.

    Each turn continues the ids of all previous turns as they were sampled: nothing is decoded and tokenised again, so a
    trainer sees what the policy saw, and the KV of earlier turns is found in the prefix cache.

    A session must be used by one thread at a time; the sessions of many threads share steps.
    """

    def __init__(
        self,
        sampler: Sampler,
        prompt: str | Sequence[int] = (),
        *,
        seed: int | GroupSeeds | None = None,
    ):
        """`prompt`: how the session begins; see `extend`. `seed`: for all turns, see `Sampler.generate`; sessions with
        the same prompt must share a `GroupSeeds` or have different seeds.
        """
        self.token_ids: list[int] = []  # the environment's and the policy's
        self._sampler, self._seed = sampler, seed
        self._turns: list[_Turn] = []
        if len(prompt):
            self.extend(prompt)

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, tokens: str | Sequence[int]) -> None:
        """Append tokens of the environment: a tool's result, or the next question.

        Ids, or a text, which is tokenised separately and without special tokens. Raises ValueError, and appends
        nothing, for a text if there is no tokenizer, for ids outside the vocabulary, and if there would be no room
        left for an answer.
        """
        ids = self._tokenise(tokens) if isinstance(tokens, str) else [int(i) for i in tokens]
        config = self._sampler.config
        wrong = next((i for i in ids if not 0 <= i < self._sampler.vocab_size), None)
        if wrong is not None:
            raise ValueError(
                f"token id {wrong} is not in the vocabulary, which has ids 0..{self._sampler.vocab_size - 1}"
            )
        length = len(self.token_ids) + len(ids)
        if length >= config.max_model_len:
            raise ValueError(
                f"the session would have {length} tokens ({len(self.token_ids)} and {len(ids)} more); max_model_len is "
                f"{config.max_model_len}, including the answer"
            )
        self.token_ids += ids

    def generate(self, params: SamplingParams | None = None) -> Rollout:
        """Sample the next turn and append it; returns it as a rollout of one row.

        The session includes the stop token, and the tokens of a stop string up to the one that completed it. Raises
        what `Sampler.generate` raises, and ValueError for `n` above 1; the session is then unchanged.
        """
        if params is not None and params.n > 1:
            raise ValueError(f"a session continues with one answer, got n={params.n}")
        rollout = self._sampler.generate([list(self.token_ids)], params, seed=self._seed)
        self._turns.append(_Turn(len(self.token_ids), rollout))
        self.token_ids += rollout.completion(0)
        return rollout

    @property
    def loss_mask(self) -> np.ndarray:
        """bool[tokens]: True for what the policy sampled."""
        mask = np.zeros(len(self), bool)
        for turn in self._turns:
            mask[turn.start :][: turn.rollout.lengths[0]] = True
        return mask

    @property
    def logprobs(self) -> np.ndarray:
        """float32[tokens]: of sampled tokens, at the time of sampling; 0 elsewhere."""
        logprobs = np.zeros(len(self), np.float32)
        for turn in self._turns:
            logprobs[turn.start :][: turn.rollout.lengths[0]] = turn.rollout.logprobs[0]
        return logprobs

    def _tokenise(self, text: str) -> list[int]:
        tokenizer = self._sampler.tokenizer
        if tokenizer is None:
            raise ValueError("there is no tokenizer (skip_tokenizer_init): give token ids")
        return tokenizer.encode(text, add_special_tokens=False)

    def _row(self, index: int) -> Row:
        """The row whose completion is everything from the first answer to the end of the last."""
        first, last = self._turns[0], self._turns[-1]
        end = last.start + int(last.rollout.lengths[0])
        completion = slice(first.start, end)
        spans = [
            (version, turn.start - first.start + start, turn.start - first.start + end)
            for turn in self._turns
            for version, start, end in turn.rollout.weight_versions[0]
        ]
        return Row(
            prompt_ids=self.token_ids[: first.start],
            token_ids=self.token_ids[completion],
            logprobs=self.logprobs[completion],
            sampled=self.loss_mask[completion],
            prompt_index=index,
            num_cached=int(last.rollout.num_cached[0]),
            seed=int(first.rollout.seeds[0]),
            finish_reason=last.rollout.finish_reasons[0],
            weight_versions=tuple(spans),
            text=last.rollout.texts[0],
        )

    @property
    def _modes(self) -> set[tuple[Any, ...]]:
        """Settings that all turns of a rollout must share."""
        rollouts = [turn.rollout for turn in self._turns]
        return {(r.temperature, r.logprobs_mode, r.pad_id) for r in rollouts}


def collect(sessions: Sequence[Session]) -> Rollout:
    """The sessions as one rollout, with a row for each.

    A row's prompt is everything before the first answer; its completion is everything from there to the end of the last
    answer, and `mask` tells which of it was sampled. Tokens appended after the last answer are left out.
    `finish_reasons`, `texts` and `num_cached` are the last turn's, `seeds` the first's.

    Raises ValueError for no sessions, for a session without an answer, and for turns sampled at different temperatures.
    """
    if not sessions:
        raise ValueError("sessions are empty; give at least one")
    silent = [index for index, session in enumerate(sessions) if not session._turns]
    if silent:
        raise ValueError(f"sessions {silent[:8]} have no answer yet; call generate()")
    modes = set[tuple[Any, ...]]().union(*(session._modes for session in sessions))
    if len(modes) > 1:
        raise ValueError(
            "one rollout has one temperature and one logprobs_mode; these turns were sampled at (temperature, mode) "
            f"{sorted(mode[:2] for mode in modes)}"
        )
    ((temperature, logprobs_mode, pad_id),) = modes
    rows = [session._row(index) for index, session in enumerate(sessions)]
    return stack_rows(rows, pad_id=pad_id, temperature=temperature, logprobs_mode=logprobs_mode)
