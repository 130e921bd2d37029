"""The report of a load test: vLLM's figures under vLLM's names, and their table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpage.bench.serve_client import Outcome

ROWS = {  # of the table: figures and options, by label
    "Successful requests": "completed",
    "Failed requests": "failed",
    "Maximum request concurrency": "max_concurrency",
    "Request rate configured (RPS)": "request_rate",
    "Benchmark duration (s)": "duration",
    "Total input tokens": "total_input_tokens",
    "Total generated tokens": "total_output_tokens",
    "Request throughput (req/s)": "request_throughput",
    "Request goodput (req/s)": "request_goodput",
    "Output token throughput (tok/s)": "output_throughput",
    "Peak output token throughput (tok/s)": "max_output_tokens_per_s",
    "Peak concurrent requests": "max_concurrent_requests",
    "Total token throughput (tok/s)": "total_token_throughput",
    "Processor time of this client (s)": "client_cpu_seconds",
}
TIMES = {  # figures with a mean, a median and percentiles
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
GOODPUT = ("ttft", "tpot", "e2el")  # figures that may have a limit
WIDTH = 50


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a load test."""

    settings: Mapping[str, Any]  # options, model, date
    outcomes: Sequence[Outcome]  # of the requests that ended, in the order in which they were sent
    duration: float  # seconds until the last request ended, or until the test was stopped
    limits: Mapping[str, float]  # milliseconds, by names of `GOODPUT`
    num_unfinished: int  # requests in flight when the test was stopped
    num_unsent: int  # requests not sent yet when the test was stopped
    client_cpu: float  # seconds of processor time

    @property
    def answered(self) -> list[Outcome]:
        return [o for o in self.outcomes if not o.error]

    @property
    def was_stopped(self) -> bool:
        return self.num_unfinished + self.num_unsent > 0

    def metrics(self) -> dict[str, Any]:
        """All figures. None where there is nothing to measure, without answered requests or without limits."""
        done, seconds = self.answered, self.duration
        num_input, num_output = sum(o.num_input for o in done), sum(o.num_output for o in done)
        good = sum(is_good(o, self.limits) for o in done)
        return {
            "duration": seconds,
            "completed": len(done),
            "failed": len(self.outcomes) - len(done),
            "total_input_tokens": num_input,
            "total_output_tokens": num_output,
            "request_throughput": len(done) / seconds,
            "request_goodput": good / seconds if self.limits else None,
            "output_throughput": num_output / seconds,
            "total_token_throughput": (num_input + num_output) / seconds,
            "max_output_tokens_per_s": peak_throughput(done),
            "max_concurrent_requests": peak_concurrency(done),
            **statistics("ttft", [o.ttft for o in done]),
            **statistics("tpot", [o.tpot for o in done if o.tpot is not None]),
            **statistics("itl", [itl for o in done for itl in o.itls]),
            **statistics("e2el", [o.latency for o in done]),
            "client_cpu_seconds": self.client_cpu,
        }

    def as_dict(self) -> dict[str, Any]:
        """Options, figures, and everything about each request; the times of failed requests are empty."""
        begin = min((o.start for o in self.outcomes), default=0.0)
        return {
            **self.settings,
            **self.metrics(),
            "unfinished": self.num_unfinished,
            "unsent": self.num_unsent,
            "input_lens": [o.num_input for o in self.outcomes],
            "output_lens": [o.num_output for o in self.outcomes],
            "start_times": [o.start - begin for o in self.outcomes],
            "ttfts": [None if o.error else o.ttft for o in self.outcomes],
            "itls": [[] if o.error else o.itls for o in self.outcomes],
            "generated_texts": [o.text for o in self.outcomes],
            "errors": [o.error for o in self.outcomes],
        }

    def __str__(self) -> str:
        """vLLM's table; below it the failures."""
        found = self.settings["options"] | self.metrics()
        rows = [(label, found[key]) for label, key in ROWS.items()]
        lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
        # Options that were not given have no row.
        lines += [_row(label, value) for label, value in rows if value not in (None, "Infinity")]
        for name, title in TIMES.items():
            lines.append(title.center(WIDTH, "-"))
            for word in ("Mean", "Median", "P99"):
                lines.append(
                    _row(f"{word} {name.upper()} (ms)", found[f"{word.lower()}_{name}_ms"])
                )
        lines.append("=" * WIDTH)
        if self.was_stopped:
            in_flight = f"{self.num_unfinished} requests were in flight"
            lines.append(f"stopped: {in_flight}, {self.num_unsent} not sent")
        if uncounted := sum(o.usage is None for o in self.answered):
            lines.append(f"{uncounted} answers had no usage: their chunks are counted as tokens")
        errors = Counter(o.error for o in self.outcomes if o.error)
        lines += [f"{count} failed: {error}" for error, count in errors.most_common(10)]
        return "\n".join(lines)


def _row(label: str, value: Any) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else "n/a" if value is None else value
    return f"{label + ':':<40} {shown}"


def statistics(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, standard deviation and 99th percentile (interpolated) in milliseconds, under vLLM's names."""
    ms = np.asarray(seconds) * 1e3
    words = {
        "mean": np.mean,
        "median": np.median,
        "std": np.std,
        "p99": lambda x: np.percentile(x, 99),
    }
    return {f"{word}_{name}_ms": float(of(ms)) if len(ms) else None for word, of in words.items()}


def is_good(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """Whether an answer met all limits, in milliseconds. One of a single token meets any limit of time per token."""
    found = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    return all(found[name] * 1e3 <= limit for name, limit in limits.items())


def parse_limits(pairs: Sequence[str]) -> dict[str, float]:
    """`("ttft:500", "tpot:50")`, in milliseconds. Raises ValueError."""
    limits = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if name not in GOODPUT or not limits[name] >= 0:
            known = ", ".join(GOODPUT)
            raise ValueError(
                f"goodput must be NAME:MILLISECONDS, NAME one of {known}; got {pair!r}"
            )
    return limits


def peak_throughput(outcomes: Sequence[Outcome]) -> float:
    """The most tokens in any second, counted from the start. Each chunk of an answer counts as equally many tokens."""
    begin = min((o.start for o in outcomes), default=0.0)
    seconds = [int(time - begin) for o in outcomes for time in o.times]
    tokens = [o.num_output / len(o.times) for o in outcomes for _ in o.times]
    return float(np.bincount(seconds, tokens).max()) if seconds else 0.0


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """The most requests in flight at once. A request that ends as another begins does not overlap with it."""
    events = sorted(e for o in outcomes for e in ((o.start, 1), (o.times[-1], -1)))
    return int(max(np.cumsum([change for _, change in events]), default=0))
