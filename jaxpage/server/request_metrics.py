"""Latencies, lengths and outcomes of requests, in vLLM's histograms and counters.

The unit is the request, whatever its `n`; vLLM counts each of its sequences.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from jaxpage.engine.step_output import StepOutput
from jaxpage.outputs import RequestOutput
from jaxpage.request import FinishReason, Request
from jaxpage.server.histogram import (
    FIRST_TOKEN,
    PER_TOKEN,
    PHASE,
    PREEMPTIONS,
    SEQUENCES,
    Histogram,
    family,
    one_two_five,
)
from jaxpage.server.request_times import request_times

_SECONDS = {
    "time_to_first_token_seconds": (FIRST_TOKEN, "Time from arrival to the first token."),
    "inter_token_latency_seconds": (
        PER_TOKEN,
        "Time between two steps that gave a sequence tokens; a step may give several.",
    ),
    "request_time_per_output_token_seconds": (
        PER_TOKEN,
        "Mean time per token after the first, of a request.",
    ),
    "e2e_request_latency_seconds": (PHASE, "Time from arrival to the end of a request."),
    "request_queue_time_seconds": (PHASE, "Time before a request is first scheduled."),
    "request_inference_time_seconds": (PHASE, "Time from first scheduling to the last token."),
    "request_prefill_time_seconds": (PHASE, "Time from first scheduling to the first token."),
    "request_decode_time_seconds": (PHASE, "Time from the first token to the last."),
}
_TOKENS = {
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Generated tokens of a request, of all its sequences.",
    "request_max_num_generation_tokens": "Generated tokens of the longest sequence of a request.",
    "request_params_max_tokens": "The max_tokens of a request.",
    "request_prefill_kv_computed_tokens": "Prompt tokens not found in the prefix cache.",
}
_COUNTS = {
    "request_params_n": (SEQUENCES, "The n of a request."),
    "request_num_preemptions": (PREEMPTIONS, "How often a request was preempted."),
}
# vLLM's name before 1.0, for old dashboards.
_OLD_INTER_TOKEN = "time_per_output_token_seconds"


class _Progress(NamedTuple):
    """A running request."""

    queued_time: float  # seconds, monotonic
    # Of the last tokens of each sequence; 0.0 before the first.
    last_token_times: list[float]


class RequestMetrics:
    """An observer, and a collector for prometheus_client. `labels` apply to all metrics."""

    def __init__(self, labels: Mapping[str, str], max_model_len: int):
        self._labels = labels
        lengths = one_two_five(max_model_len)
        described = {
            **_SECONDS,
            **{name: (lengths, text) for name, text in _TOKENS.items()},
            **_COUNTS,
        }
        self._texts = {name: text for name, (_, text) in described.items()}
        self._histograms = {name: Histogram(bounds) for name, (bounds, _) in described.items()}
        self._num_ended = dict.fromkeys(map(str, FinishReason), 0)
        self._requests: dict[str, _Progress] = {}

    def added(self, request: Request) -> None:
        """See `Observer`."""
        self._requests[request.request_id] = _Progress(
            request.queued_time, [0.0] * request.params.n
        )

    def took_step(self, step: StepOutput) -> None:
        """See `Observer`."""
        now, requests = step.time, self._requests
        gaps: list[float] = []
        for request_id, index, token_ids in zip(
            step.request_ids, step.indices, step.token_ids, strict=True
        ):
            progress = requests.get(request_id)
            if progress is None or not token_ids:
                continue
            times = progress.last_token_times
            last = times[index]
            if last:
                gaps.append(now - last)
            elif not any(times):
                waited = now - progress.queued_time
                self._histograms["time_to_first_token_seconds"].observe(waited)
            times[index] = now
        # Most sequences of a step were in the previous one too, so few gaps are distinct.
        observe = self._histograms["inter_token_latency_seconds"].observe
        for gap, count in Counter(gaps).items():
            observe(gap, count)

    def finished(self, request: Request, output: RequestOutput) -> None:
        """See `Observer`."""
        self._requests.pop(request.request_id, None)
        stats, params = output.metrics, request.params
        times = request_times(stats, time.monotonic())
        prompt_len = len(request.prompt_token_ids)
        values = (
            ("request_time_per_output_token_seconds", times.per_token),
            ("e2e_request_latency_seconds", times.end_to_end),
            ("request_queue_time_seconds", times.queue),
            ("request_inference_time_seconds", times.inference),
            ("request_prefill_time_seconds", times.prefill),
            ("request_decode_time_seconds", times.decode),
            ("request_prompt_tokens", prompt_len),
            ("request_generation_tokens", stats.num_generation_tokens),
            ("request_max_num_generation_tokens", stats.max_num_generation_tokens),
            ("request_params_max_tokens", params.max_tokens),
            ("request_prefill_kv_computed_tokens", prompt_len - output.num_cached_tokens),
            ("request_params_n", params.n),
            ("request_num_preemptions", stats.num_preemptions),
        )
        histograms = self._histograms
        for name, value in values:
            if value is not None:
                histograms[name].observe(value)
        reason = output.outputs[-1].finish_reason if output.outputs else None
        self._num_ended[reason or FinishReason.ABORT] += 1

    def dropped(self, request: Request, error: Exception | None) -> None:
        """See `Observer`."""
        self._requests.pop(request.request_id, None)
        self._num_ended[FinishReason.ABORT if error is None else FinishReason.ERROR] += 1

    def collect(self) -> Iterator[Metric]:
        """The metrics of a scrape."""
        for name, histogram in self._histograms.items():
            yield family(f"vllm:{name}", self._texts[name], self._labels, histogram)
        old = self._histograms["inter_token_latency_seconds"]
        text = "The older name of vllm:inter_token_latency_seconds."
        yield family(f"vllm:{_OLD_INTER_TOKEN}", text, self._labels, old)
        ended = CounterMetricFamily(
            "vllm:request_success",
            "Requests that ended, by why they did.",
            labels=[*self._labels, "finished_reason"],
        )
        for reason, count in self._num_ended.items():
            ended.add_metric([*self._labels.values(), reason], count)
        yield ended
