"""The phases of a request and their durations, for metrics and traces."""

from __future__ import annotations

from typing import NamedTuple

from jaxpage.outputs import RequestStateStats


class RequestTimes(NamedTuple):
    """Seconds. None: the request did not reach this phase."""

    end_to_end: float  # until its last output
    queue: float | None  # until it was first scheduled
    prefill: float | None  # from then to the first token
    decode: float | None  # from the first token to the last
    inference: float | None  # prefill and decode
    per_token: float | None  # decode time per token after the first, in the longest sequence


def request_times(stats: RequestStateStats, end: float) -> RequestTimes:
    """The times of a finished request; `end`: seconds, monotonic."""
    queued, scheduled = stats.queued_ts, stats.scheduled_ts
    first, last = stats.first_token_ts, stats.last_token_ts
    has_tokens = scheduled > 0 and first > 0
    decode = last - first if has_tokens else None
    num_further = stats.max_num_generation_tokens - 1
    return RequestTimes(
        end_to_end=end - queued,
        queue=scheduled - queued if scheduled > 0 else None,
        prefill=first - scheduled if has_tokens else None,
        decode=decode,
        inference=last - scheduled if has_tokens else None,
        per_token=decode / num_further if decode is not None and num_further > 0 else None,
    )
