"""Where the time of one request went. Metrics and traces tell the same."""

from __future__ import annotations

from typing import NamedTuple

from jaxpage.outputs import RequestStateStats


class RequestTimes(NamedTuple):
    """Seconds. None: the request never got there."""

    end_to_end: float  # until its last output was made
    queue: float | None  # until it was first scheduled
    prefill: float | None  # from there to the first token
    decode: float | None  # from the first token to the last
    inference: float | None  # both
    per_token: float | None  # decode time for each token after the first, of the longest sequence


def request_times(stats: RequestStateStats, end: float) -> RequestTimes:
    """Of a request that has ended; `end` is seconds, monotonic."""
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
