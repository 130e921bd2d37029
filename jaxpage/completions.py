"""A growing continuation of a prompt: its tokens, text and logprobs, and the `CompletionOutput`s made from them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jaxpage.engine.step_output import SequenceEnd
from jaxpage.output_logprobs import Logprobs, SampledLogprobs
from jaxpage.outputs import CompletionOutput
from jaxpage.request import FinishReason
from jaxpage.tokenizer import Detokenizer


class GrowingCompletion:
    """The output of one sequence so far, and how much of it has been returned."""

    __slots__ = (
        "index", "token_ids", "detokenizer", "logprobs", "min_tokens", "finish_reason", "stop_reason",
        "stop_string", "interval", "num_tokens_reported", "num_tokens_out", "num_chars_out", "end_is_out",
        "last",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer | None,
        logprobs: SampledLogprobs | None,
        min_tokens: int,
        interval: int = 1,
    ):
        self.index = index
        self.token_ids: list[int] = []  # only grows
        self.detokenizer = detokenizer
        self.logprobs = logprobs
        self.min_tokens = min_tokens
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.stop_string: str | None = None
        self.interval = interval  # tokens between outputs, see `SamplingParams.stream_interval`
        self.num_tokens_reported = 0  # in an output of any kind
        self.num_tokens_out = self.num_chars_out = 0  # in deltas
        self.end_is_out = False
        self.last: CompletionOutput | None = None  # once it has ended

    def append(self, token_ids: list[int], end: SequenceEnd | None) -> int:
        """Append new tokens, the last of which may end the sequence. Returns how many come before the end of its text.

        A stop string takes precedence over every other reason to end, as in vLLM, which checks it last.
        """
        if end is not None:
            self.finish_reason, self.stop_reason = str(end.finish_reason), end.stop_reason
        if self.detokenizer is None:
            self.token_ids += token_ids
            return len(token_ids)
        stop_id_at = len(token_ids) if end and end.finish_reason is FinishReason.STOP else -1
        append, known, min_tokens = self.detokenizer.append, self.token_ids, self.min_tokens
        for count, token_id in enumerate(token_ids, start=1):
            known.append(token_id)
            stop = append(token_id, ends=count == stop_id_at, check_stop=len(known) > min_tokens)
            if stop is not None:
                self.finish_reason = str(FinishReason.STOP)
                self.stop_reason = self.stop_string = stop
                return count
        return len(token_ids)

    @property
    def has_news(self) -> bool:
        """Whether an output is due: for the first token, after `interval` more, or at the end."""
        if self.finish_reason is not None:
            return not self.end_is_out
        num_new = len(self.token_ids) - self.num_tokens_reported
        return num_new >= (self.interval if self.num_tokens_reported else 1)

    def delta(self) -> CompletionOutput:
        """The output since the last one."""
        text, logprobs = self._text(), self._named_logprobs()
        start, end = self.num_tokens_out, len(self.token_ids)
        completion = CompletionOutput(
            index=self.index,
            text=text[self.num_chars_out :],
            token_ids=self.token_ids[start:],
            cumulative_logprob=self.logprobs and self.logprobs.cumulative,
            logprobs=None if logprobs is None else logprobs[start:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        self.num_tokens_reported = self.num_tokens_out = end
        self.num_chars_out = len(text)
        self.end_is_out = self.finish_reason is not None
        return completion

    def completion(self) -> CompletionOutput:
        """The whole output so far. That of a finished sequence is created once."""
        if self.finish_reason is None:
            self.num_tokens_reported = len(self.token_ids)
            return _PartialCompletion(self, self._text(), self._named_logprobs())
        if self.last is None:
            self.last = self.delta()
        return self.last

    def _named_logprobs(self) -> Logprobs | None:
        return self.logprobs and self.logprobs.named(self.token_ids, self.detokenizer)

    def _text(self) -> str:
        detokenizer = self.detokenizer
        if detokenizer is None:
            return ""
        if self.finish_reason is not None:
            detokenizer.flush()
        return detokenizer.text


class _PartialCompletion(CompletionOutput):
    """The output of an unfinished sequence. Its lists are copied when first read, since their originals only grow."""

    __slots__ = ("_num_tokens", "_all_token_ids", "_all_logprobs")

    def __init__(self, growing: GrowingCompletion, text: str, logprobs: Logprobs | None):
        self.index = growing.index
        self.text = text
        self.cumulative_logprob = growing.logprobs and growing.logprobs.cumulative
        self.finish_reason = self.stop_reason = None
        self.routed_experts = self.lora_request = self.weight_versions = self.captures = None
        self._num_tokens = len(growing.token_ids)
        self._all_token_ids = growing.token_ids
        self._all_logprobs = logprobs

    def __getattr__(self, name: str) -> Any:
        """Called for a field that is not set yet."""
        if name == "token_ids":
            self.token_ids = self._all_token_ids[: self._num_tokens]
            return self.token_ids
        if name == "logprobs":
            logprobs = self._all_logprobs
            self.logprobs = None if logprobs is None else logprobs[: self._num_tokens]
            return self.logprobs
        if name in ("content", "reasoning", "tool_calls"):  # read when all of the text is there
            return None
        raise AttributeError(name)

    def __reduce__(self) -> Any:
        """Copied and pickled as a plain `CompletionOutput`."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(CompletionOutput)}
        return functools.partial(CompletionOutput, **fields), ()


def weight_spans(
    starts: list[tuple[int, int]], num_tokens: int
) -> list[tuple[int, int, int]] | None:
    """`CompletionOutput.weight_versions` of the first `num_tokens` tokens, from `Sequence.weight_starts`."""
    if starts == [(0, 0)]:
        return None
    ends = [start for _, start in starts[1:]] + [num_tokens]
    spans = [
        (number, start, min(end, num_tokens))
        for (number, start), end in zip(starts, ends, strict=True)
    ]
    return [span for span in spans if span[1] < span[2]]
