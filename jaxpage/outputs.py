"""What a user gets back: vLLM's output types, and how they are read off a request.

Plain data. Knows the request, not the engine; holds no reference into either, so an output stays
as it is while its request goes on.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxpage.request import Request, Sequence


@dataclass(slots=True)
class Logprob:
    """Log-probability (natural, float32) of one token at one position."""

    logprob: float
    rank: int | None = None  # 1 = the most likely token of the vocabulary
    decoded_token: str | None = None  # None without a tokenizer


@dataclass(kw_only=True, slots=True)
class CompletionOutput:
    """One continuation of a prompt. `token_ids` include the stop token, `text` does not."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None  # of `token_ids`; None unless logprobs were asked for
    logprobs: list[dict[int, Logprob]] | None  # one dict per output token: id -> Logprob
    finish_reason: str | None = None  # "stop", "length", "abort"; None while running
    stop_reason: int | str | None = None  # stop string or id; None for EOS and other reasons

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(kw_only=True, slots=True)
class RequestStateStats:
    """Times of a request. `arrival_time` is seconds since the epoch, `*_ts` are monotonic.

    vLLM has None here unless `disable_log_stats=False`; jaxpage always counts. A time that has not
    come yet is 0.0, as in vLLM. The properties are the names of vLLM 0.x's `RequestMetrics`.
    """

    num_generation_tokens: int = 0  # of all sequences
    num_preemptions: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0  # seconds from arrival to the first token

    @property
    def first_scheduled_time(self) -> float:
        return self.scheduled_ts

    @property
    def first_token_time(self) -> float:
        return self.first_token_ts

    @property
    def last_token_time(self) -> float:
        return self.last_token_ts

    @property
    def time_in_queue(self) -> float:
        return max(0.0, self.scheduled_ts - self.queued_ts)


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """One prompt and its `n` continuations, in the order of their index."""

    request_id: str
    prompt: str | None  # None if the prompt was given as ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: None = None  # always None; here because vLLM's users look at it
    metrics: RequestStateStats
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache


def from_request(request: Request) -> RequestOutput:
    """The state of `request` now, as a copy. A finished sequence's detokenizer is flushed."""
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=list(request.prompt_token_ids),
        outputs=[_completion(s) for s in sorted(request.sequences, key=lambda s: s.index)],
        finished=request.finished,
        metrics=_stats(request),
        num_cached_tokens=request.num_cached_tokens,
    )


def _completion(sequence: Sequence) -> CompletionOutput:
    detokenizer, logprobs = sequence.detokenizer, sequence.logprobs
    if detokenizer is not None and sequence.finished:
        detokenizer.flush()
    if logprobs is not None:
        if detokenizer is not None:
            _fill_decoded_tokens(logprobs, detokenizer)
        logprobs = list(logprobs)
    return CompletionOutput(
        index=sequence.index,
        text="" if detokenizer is None else detokenizer.text,
        token_ids=sequence.output_token_ids,
        cumulative_logprob=None if logprobs is None else sequence.cumulative_logprob,
        logprobs=logprobs,
        finish_reason=None if sequence.finish_reason is None else str(sequence.finish_reason),
        stop_reason=sequence.stop_reason,
    )


def _fill_decoded_tokens(logprobs: list[dict[int, Logprob]], detokenizer) -> None:
    """Name the tokens of the positions that came since the last output."""
    for position in reversed(logprobs):
        for token_id, entry in position.items():
            if entry.decoded_token is not None:
                return
            entry.decoded_token = detokenizer.decode_token(token_id)


def _stats(request: Request) -> RequestStateStats:
    first_token = request.first_token_time or 0.0
    return RequestStateStats(
        num_generation_tokens=sum(s.num_output_tokens for s in request.sequences),
        num_preemptions=request.num_preemptions,
        arrival_time=request.arrival_time,
        queued_ts=request.queued_time,
        scheduled_ts=request.first_scheduled_time or 0.0,
        first_token_ts=first_token,
        last_token_ts=request.last_token_time or 0.0,
        first_token_latency=first_token - request.queued_time if first_token else 0.0,
    )
