"""Turns the tokens of steps into text and `RequestOutput`s, and looks for stop strings.

Knows requests, `StepOutput`s and detokenizers. Must not know the engine, or who waits for an output: `LLM` and
`AsyncLLM` feed it steps, and tell the engine which sequences ended at a stop string.

Steps only append tokens. An output of an unfinished sequence copies them lazily, when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxpage.completions import GrowingCompletion, weight_spans
from jaxpage.engine.step_output import StepOutput, TextEnd
from jaxpage.output_logprobs import LogprobRows, PromptLogprobs, SampledLogprobs, ScoredPrompt
from jaxpage.outputs import RequestOutput, RequestStateStats
from jaxpage.request import FinishReason, Request
from jaxpage.sampling_params import RequestOutputKind
from jaxpage.tokenizer import Detokenizer

CapturedPart = tuple[np.ndarray, np.ndarray]  # positions int32[n], values float32[n, J, E]


def make_detokenizer(tokenizer: Any, request: Request) -> Detokenizer | None:
    """A detokenizer for one sequence of a request; None without `detokenize` or a tokenizer."""
    if tokenizer is None or not request.params.detokenize:
        return None
    # A prompt of embeddings has only dummy ids.
    before = request.prompt_token_ids if request.prompt_embeds is None else []
    return Detokenizer(tokenizer, request.params, before)


class Processed(NamedTuple):
    """What the engine and the callers must be told after a step."""

    text_ends: list[TextEnd]  # sequences that the engine must end
    finished: list[str]  # ids of requests
    errors: dict[str, Exception]  # of detokenizers, by request id; the engine must abort these
    unwanted: list[str]  # restarted requests that have already ended here; likewise


class OutputProcessor:
    """Texts and tokens of unfinished requests, and outputs that were not taken yet. Not thread-safe."""

    def __init__(
        self, make_detokenizer: Callable[[Request], Detokenizer | None], stream_interval: int = 1
    ):
        """`stream_interval`: the least number of tokens between two outputs of a sequence."""
        self._make_detokenizer = make_detokenizer
        self._stream_interval = stream_interval
        self._requests: dict[str, _RequestState] = {}  # unfinished
        self._unreported: dict[str, _RequestState] = {}  # have new tokens, or have ended
        self._made: list[RequestOutput] = []  # by a call of `take` that has raised

    def __contains__(self, request_id: object) -> bool:
        """Whether a request with this id is unfinished, or has an output that was not taken yet."""
        held = [output.request_id for output in self._made]
        return request_id in self._requests or request_id in self._unreported or request_id in held

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    @property
    def num_unreported(self) -> int:
        """Number of outputs that `take` would return."""
        return len(self._made) + len(self._unreported)

    def add(self, request: Request) -> None:
        """Register a request when it is added to the engine."""
        self._requests[request.request_id] = self._begin(request)

    def _begin(self, request: Request) -> _RequestState:
        return _RequestState(request, self._make_detokenizer, self._stream_interval)

    def process(self, step: StepOutput) -> Processed:
        """Process a step. Entries of requests and sequences that have already ended are ignored."""
        processed = Processed([], [], {}, self._restart(step.restarted))
        logprob_rows = LogprobRows(step.result, step.vocabulary_rows)
        if step.scored:
            self._take_prompts(step)
        if step.captured:
            self._take_captures(step)
        columns = zip(step.request_ids, step.indices, step.token_ids, step.rows, strict=True)
        for entry, (request_id, index, token_ids, row) in enumerate(columns):
            request = self._requests.get(request_id)
            if request is None:
                continue
            sequence = request.sequences[index]
            if sequence.finish_reason is not None:
                continue
            try:
                num_taken = sequence.append(token_ids, step.ends.get(entry))
            except Exception as error:  # raised by the detokenizer
                sequence.detokenizer = None  # its text is lost
                request.abort()
                processed.errors[request_id] = error
            else:
                if sequence.stop_string is not None:
                    num_dropped = len(token_ids) - num_taken
                    num_tokens = len(sequence.token_ids)
                    processed.text_ends.append(
                        TextEnd(request_id, index, num_tokens, num_dropped, step.replica)
                    )
                if sequence.logprobs is not None and step.result is not None:
                    logprob_rows.add(sequence.logprobs, token_ids[:num_taken], row)
                request.gained(step.time, ended=sequence.finish_reason is not None)
            if request.num_unfinished == 0:
                self._finish(request)
                processed.finished.append(request_id)
            elif request.reports_progress and sequence.has_news:
                self._unreported[request_id] = request
        logprob_rows.distribute()
        return processed

    def _restart(self, request_ids: list[str]) -> list[str]:
        """Reset requests that restart. Returns those that have already ended."""
        for request_id in request_ids:
            before = self._requests.get(request_id)
            if before is not None:
                self._requests[request_id] = self._begin(before.request)
        return [request_id for request_id in request_ids if request_id not in self._requests]

    def _take_prompts(self, step: StepOutput) -> None:
        """Take scores of prompts in the order of the result, where those with whole vocabularies come last."""
        assert step.result is not None
        start = vocabulary_start = 0
        for request_id, count, whole in sorted(step.scored, key=lambda entry: entry[2]):
            request = None if request_id is None else self._requests.get(request_id)
            if request is not None and request.prompt is not None:
                where = vocabulary_start if whole else None
                request.prompt.take(step.result, start, count, where)
            start += count
            vocabulary_start += count if whole else 0

    def _take_captures(self, step: StepOutput) -> None:
        assert step.result is not None
        start = 0
        for request_id, index, positions in step.captured:
            stop = start + len(positions)
            request = None if request_id is None else self._requests.get(request_id)
            if request is not None:
                part = np.array(positions, np.int32), step.result.captured[start:stop]
                request.captured(index, part)
            start = stop

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests with the tokens they have; their last outputs have the finish reason "abort"."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                request.abort()
                self._finish(request)

    def discard(self, request_id: str) -> bool:
        """Forget a request without any further output. True if it was unfinished."""
        self._made = [output for output in self._made if output.request_id != request_id]
        self._unreported.pop(request_id, None)
        return self._requests.pop(request_id, None) is not None

    @property
    def unreported_ids(self) -> list[str]:
        """The requests whose outputs are yet to be made."""
        return list(self._unreported)

    def take(self, give_up: Callable[[str], object] | None = None) -> list[RequestOutput]:
        """The outputs of all requests with new tokens or an end, each once.

        If the tokenizer fails for one of them, `give_up`, or else `discard`, is called with its id, and the error
        raised; the next call returns the others.
        """
        for request_id in self.unreported_ids:
            try:
                self._made.append(self.take_one(request_id))
            except Exception:
                (give_up or self.discard)(request_id)
                raise
        made, self._made = self._made, []
        return made

    def take_one(self, request_id: str) -> RequestOutput:
        """The output of one such request. Raises KeyError for others."""
        return self._unreported.pop(request_id).output()

    def _finish(self, request: _RequestState) -> None:
        self._unreported[request.request_id] = self._requests.pop(request.request_id)


class _RequestState:
    """A request and its output so far."""

    __slots__ = (
        "request", "request_id", "prompt_token_ids", "kind", "reports_progress", "sequences",
        "num_unfinished", "first_token_time", "last_token_time", "prompt", "_prompt_logprobs", "_captured",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        make_detokenizer: Callable[[Request], Detokenizer | None],
        stream_interval: int,
    ):
        params = request.params
        self.request = request
        self.request_id = request.request_id
        # The user's copy; the original belongs to the engine. Embeddings have no ids.
        self.prompt_token_ids = (
            list(request.prompt_token_ids) if request.prompt_embeds is None else []
        )
        self.kind = params.output_kind
        self.reports_progress = self.kind is not RequestOutputKind.FINAL_ONLY
        self.sequences = [
            GrowingCompletion(
                index,
                make_detokenizer(request),
                SampledLogprobs(params, from_vocabulary=request.wants_vocabulary)
                if params.wants_logprobs
                else None,
                params.min_tokens,
                max(params.stream_interval or 1, stream_interval),
            )
            for index in range(params.n)
        ]
        self.prompt = None
        if request.scores_prompt:
            self.prompt = ScoredPrompt(params, request.prompt_token_ids)
        self._prompt_logprobs: PromptLogprobs | None = None
        self._captured: list[list[CapturedPart]] = [[] for _ in self.sequences]
        self.num_unfinished = params.n  # sequences
        self.first_token_time = self.last_token_time = 0.0

    def gained(self, time: float, *, ended: bool) -> None:
        """A sequence gained tokens, and may have ended with them."""
        self.num_unfinished -= ended
        self.first_token_time = self.first_token_time or time
        self.last_token_time = time

    def captured(self, index: int | None, part: CapturedPart) -> None:
        """Captured values for tokens of one sequence, or, without an index, for tokens shared by all of them."""
        for sequence in self.sequences if index is None else [self.sequences[index]]:
            if sequence.finish_reason is None:
                self._captured[sequence.index].append(part)

    def abort(self) -> None:
        self.num_unfinished = 0
        for sequence in self.sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = str(FinishReason.ABORT)

    def output(self) -> RequestOutput:
        """The current output, as its output kind says."""
        request = self.request
        if self.kind is RequestOutputKind.DELTA:
            outputs = [s.delta() for s in self.sequences if s.has_news]
        else:
            outputs = [s.completion() for s in self.sequences]
        for completion in outputs:
            if completion.finish_reason is not None and request.captures is not None:
                parts = self._captured[completion.index]
                completion.captures = request.captures.by_point(parts)
            if completion.finish_reason is not None and request.beams is None:
                num_tokens = len(self.sequences[completion.index].token_ids)
                if completion.index < len(request.sequences):  # it may not exist yet
                    starts = request.sequences[completion.index].weight_starts
                    completion.weight_versions = weight_spans(starts, num_tokens)
        return RequestOutput(
            request_id=self.request_id,
            prompt=request.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.num_unfinished == 0,
            prompt_logprobs=self._named_prompt(),
            prompt_token_id_logprobs=self.prompt and self.prompt.of_given_ids,
            metrics=self._stats(),
            lora_request=request.adapter and request.adapter.request,
            num_cached_tokens=request.num_cached_tokens,
            num_cache_creation_tokens=request.num_cache_creation_tokens,
        )

    def _named_prompt(self) -> PromptLogprobs | None:
        """Created once, with the first output: then the whole prompt has been scored."""
        wanted = self.request.params.prompt_logprobs is not None
        if self.prompt is not None and wanted and self._prompt_logprobs is None:
            self._prompt_logprobs = self.prompt.named(self.sequences[0].detokenizer)
        return self._prompt_logprobs

    def _stats(self) -> RequestStateStats:
        request, first_token = self.request, self.first_token_time
        lengths = [len(s.token_ids) for s in self.sequences]
        return RequestStateStats(
            num_generation_tokens=sum(lengths),
            max_num_generation_tokens=max(lengths),
            num_preemptions=request.num_preemptions,
            arrival_time=request.arrival_time,
            queued_ts=request.queued_time,
            scheduled_ts=request.first_scheduled_time or 0.0,
            first_token_ts=first_token,
            last_token_ts=self.last_token_time,
            first_token_latency=first_token - request.queued_time if first_token else 0.0,
        )
