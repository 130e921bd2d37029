"""The masks of one request: the state of each continuation in its grammar. See `request.MaskSource`."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass

import llguidance
import numpy as np

from jaxpage.reasoning import ReasoningTokens
from jaxpage.structured_outputs.compiler import CompilingGrammar, GrammarCompiler

_ALL_TOKENS = 0xFFFFFFFF


class _Phase(enum.Enum):
    """What a continuation generates now."""

    MAY_REASON = enum.auto()  # a beginning of the start of reasoning, or nothing yet
    REASONS = enum.auto()
    MATCHES = enum.auto()  # the output of the grammar


@dataclass(slots=True)
class _Continuation:
    """`matcher` has consumed the first `num_read` tokens, except reasoning.

    `fits`: they match the grammar. If not, they can only be the beginning of the start of reasoning.
    """

    matcher: llguidance.LLMatcher
    phase: _Phase
    num_read: int = 0
    fits: bool = True


class GrammarMasks:
    """A `MaskSource`.

    `reasoning`: the markers of a model that may reason before the constrained output: its output may begin with the
    start marker, or its prompt may end within reasoning (`is_reasoning`). `forces`: tokens without an alternative may
    be appended without sampling.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        grammar: CompilingGrammar,
        *,
        reasoning: ReasoningTokens | None = None,
        is_reasoning: bool = False,
        forces: bool = True,
    ):
        self._compiler = compiler
        self._grammar = grammar
        self._start = () if reasoning is None else reasoning.start
        self._end = () if reasoning is None else reasoning.end
        self._first = _Phase.MATCHES if reasoning is None else _Phase.MAY_REASON
        if is_reasoning:
            self._first = _Phase.REASONS
        self._forces = forces
        self._continuations: dict[int, _Continuation] = {}
        self._errors: dict[int, str] = {}
        self._num_ended = 0

    def mask(self, index: int, output_token_ids: Sequence[int]) -> np.ndarray | None:
        """See `MaskSource`: one bit per token of the model's vocabulary."""
        continuation = self._read(index, output_token_ids)
        if continuation is None:
            return None
        vocab_size = self._compiler.vocab_size
        num_words = -(-vocab_size // 32)
        mask = np.zeros(num_words, np.uint32)
        if continuation.phase is _Phase.REASONS:
            mask[:] = _ALL_TOKENS
            for token_id in self._compiler.eos_token_ids:  # the output is not complete yet
                mask[token_id // 32] &= ~np.uint32(1 << token_id % 32)
            return mask
        if continuation.fits:
            mask |= np.frombuffer(continuation.matcher.compute_bitmask(), np.uint32)[:num_words]
            if vocab_size % 32:  # the tokenizer may have more ids than the model
                mask[-1] &= np.uint32((1 << vocab_size % 32) - 1)
        if continuation.phase is _Phase.MAY_REASON:
            token_id = self._start[len(output_token_ids)]
            mask[token_id // 32] |= np.uint32(1 << token_id % 32)
        if continuation.matcher.is_error():
            self._errors[index] = f"structured output: {_reason(continuation.matcher)}"
        elif not mask.any():
            self._errors[index] = "structured output: no token of the model continues it"
        return None if index in self._errors else mask

    def forced(self, index: int, output_token_ids: Sequence[int]) -> list[int]:
        """See `MaskSource`."""
        if not self._forces:
            return []
        continuation = self._read(index, output_token_ids)
        if continuation is None or continuation.phase is not _Phase.MATCHES:
            return []
        return continuation.matcher.compute_ff_tokens()

    def error(self, index: int) -> str | None:
        """See `MaskSource`."""
        return self._errors.get(index)

    def wait(self, seconds: float) -> None:
        """See `MaskSource`: waits for compilation."""
        deadline = min(self._grammar.deadline, time.monotonic() + seconds)
        self._compiler.wait(self._num_ended, deadline)

    def restart(self) -> None:
        """See `MaskSource`."""
        self._continuations.clear()
        self._errors.clear()

    def _read(self, index: int, output_token_ids: Sequence[int]) -> _Continuation | None:
        """The state of a continuation after these tokens, which extend those of the previous call."""
        if index in self._errors:
            return None
        continuation = self._continuations.get(index) or self._begin(index)
        if continuation is None:
            return None
        for position in range(continuation.num_read, len(output_token_ids)):
            if continuation.phase is _Phase.MAY_REASON:
                self._read_start(continuation, output_token_ids, position)
            elif continuation.phase is _Phase.REASONS:
                self._read_reasoning(continuation, output_token_ids, position + 1)
            if continuation.phase is _Phase.MATCHES and continuation.num_read <= position:
                if not continuation.matcher.consume_token(output_token_ids[position]):
                    self._errors[index] = (
                        f"structured output: token {output_token_ids[position]} does not continue it: "
                        f"{_reason(continuation.matcher)}"
                    )
                    return None
            continuation.num_read = position + 1
        return continuation

    def _read_start(
        self, continuation: _Continuation, token_ids: Sequence[int], position: int
    ) -> None:
        """Read a token that may belong to the start of reasoning, to the constrained output, or to both."""
        token_id = token_ids[position]
        if token_id != self._start[position]:
            continuation.phase = _Phase.MATCHES
            return
        matcher = continuation.matcher
        continuation.fits = continuation.fits and matcher.validate_tokens([token_id]) == 1
        if continuation.fits:
            matcher.consume_token(token_id)
        if position + 1 == len(self._start):
            matcher.reset()
            continuation.phase, continuation.fits = _Phase.REASONS, True
        continuation.num_read = position + 1

    def _read_reasoning(
        self, continuation: _Continuation, token_ids: Sequence[int], length: int
    ) -> None:
        if tuple(token_ids[max(0, length - len(self._end)) : length]) == self._end:
            continuation.phase = _Phase.MATCHES
        continuation.num_read = length

    def _begin(self, index: int) -> _Continuation | None:
        self._num_ended = self._compiler.num_ended  # before the check, so that none is missed
        future, config = self._grammar.matcher, self._compiler.config
        if not future.done():
            if time.monotonic() > self._grammar.deadline:
                self._errors[index] = (
                    f"structured output: its grammar was not compiled within {config.compile_timeout} s, "
                    "which structured_outputs_config sets as compile_timeout"
                )
            return None
        error = future.exception()
        if error is not None:
            self._errors[index] = f"structured output: its grammar cannot be compiled: {error}"
            return None
        matcher = future.result().deep_copy()
        continuation = _Continuation(matcher, self._first)
        self._continuations[index] = continuation
        return continuation


def _reason(matcher: llguidance.LLMatcher) -> str:
    """Why a matcher failed, for a user who does not know llguidance."""
    reason = matcher.get_error().removesuffix("<non-verbose/>").rstrip()
    if reason == "NoExtensionBias":
        return "no text continues it; a rule that only refers to itself, or an empty class of characters, has no end"
    return reason


def reasoning_at_end(
    token_ids: Sequence[int], start: tuple[int, ...], end: tuple[int, ...]
) -> bool | None:
    """Whether a prompt ends within reasoning; None if it has no marker. Templates that skip reasoning write an empty
    one.
    """
    for position in range(len(token_ids), 0, -1):
        if tuple(token_ids[max(0, position - len(end)) : position]) == end:
            return False
        if tuple(token_ids[max(0, position - len(start)) : position]) == start:
            return True
    return None
