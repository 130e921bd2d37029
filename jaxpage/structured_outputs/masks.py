"""The masks of one request: where its continuations are in its grammar. See `request.MaskSource`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import llguidance
import numpy as np

from jaxpage.structured_outputs.compiler import CompilingGrammar, GrammarCompiler

_ALL_TOKENS = 0xFFFFFFFF


@dataclass(slots=True)
class _Continuation:
    """`matcher` has consumed the first `num_read` tokens, without those of the reasoning."""

    matcher: llguidance.LLMatcher
    reasons: bool
    num_read: int = 0


class GrammarMasks:
    """A `MaskSource`.

    `end_of_reasoning`: the token ids after which the grammar begins; None: it begins with the output. `forces`: tokens
    without an alternative may be appended unsampled.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        grammar: CompilingGrammar,
        *,
        end_of_reasoning: tuple[int, ...] | None = None,
        forces: bool = True,
    ):
        self._compiler = compiler
        self._grammar = grammar
        self._end_of_reasoning = end_of_reasoning
        self._forces = forces
        self._continuations: dict[int, _Continuation] = {}
        self._errors: dict[int, str] = {}
        self._num_ended = 0

    def mask(self, index: int, output_token_ids: Sequence[int]) -> np.ndarray | None:
        """See `MaskSource`: a bit for each token of the model's vocabulary."""
        continuation = self._read(index, output_token_ids)
        if continuation is None:
            return None
        vocab_size = self._compiler.vocab_size
        num_words = -(-vocab_size // 32)
        if continuation.reasons:
            return np.full(num_words, _ALL_TOKENS, np.uint32)
        mask = np.frombuffer(continuation.matcher.compute_bitmask(), np.uint32)[:num_words]
        if vocab_size % 32:  # the tokenizer may know more ids than the model
            mask = mask.copy()
            mask[-1] &= np.uint32((1 << vocab_size % 32) - 1)
        if continuation.matcher.is_error():
            self._errors[index] = f"structured output: {continuation.matcher.get_error()}"
        elif not mask.any():
            self._errors[index] = "structured output: no token of the model continues it"
        return None if index in self._errors else mask

    def forced(self, index: int, output_token_ids: Sequence[int]) -> list[int]:
        """See `MaskSource`."""
        if not self._forces:
            return []
        continuation = self._read(index, output_token_ids)
        if continuation is None or continuation.reasons:
            return []
        return continuation.matcher.compute_ff_tokens()

    def error(self, index: int) -> str | None:
        """See `MaskSource`."""
        return self._errors.get(index)

    def wait(self) -> None:
        """See `MaskSource`: grammars come late because they are compiled."""
        self._compiler.wait(self._num_ended, self._grammar.deadline)

    def _read(self, index: int, output_token_ids: Sequence[int]) -> _Continuation | None:
        """Where a continuation is after these tokens, which begin with those that it was asked about before."""
        if index in self._errors:
            return None
        continuation = self._continuations.get(index) or self._begin(index)
        if continuation is None:
            return None
        for position in range(continuation.num_read, len(output_token_ids)):
            if continuation.reasons:
                continuation.reasons = not self._ends_reasoning(output_token_ids, position + 1)
            elif not continuation.matcher.consume_token(output_token_ids[position]):
                self._errors[index] = (
                    f"structured output: token {output_token_ids[position]} does not continue it: "
                    f"{continuation.matcher.get_error()}"
                )
                return None
        continuation.num_read = len(output_token_ids)
        return continuation

    def _begin(self, index: int) -> _Continuation | None:
        self._num_ended = self._compiler.num_ended  # before the question: what ends now is noticed
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
        continuation = _Continuation(matcher, reasons=self._end_of_reasoning is not None)
        self._continuations[index] = continuation
        return continuation

    def _ends_reasoning(self, token_ids: Sequence[int], length: int) -> bool:
        end = self._end_of_reasoning
        assert end is not None
        return tuple(token_ids[max(0, length - len(end)) : length]) == end


def reasoning_has_ended(
    token_ids: Sequence[int], start: tuple[int, ...], end: tuple[int, ...]
) -> bool:
    """Whether a prompt has an end of reasoning with no new start behind it, as templates write it to skip it."""
    for position in range(len(token_ids), 0, -1):
        if tuple(token_ids[max(0, position - len(end)) : position]) == end:
            return True
        if tuple(token_ids[max(0, position - len(start)) : position]) == start:
            return False
    return False
