"""The cost of steps, and how well they filled their programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import Metric

from jaxpage.engine.step_output import StepOutput
from jaxpage.server.histogram import STEP_TOKENS, Histogram, family, family_by

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_FILL = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1)


class StepMetrics:
    """Observes steps; a collector for prometheus_client. `labels` apply to all metrics."""

    def __init__(self, labels: Mapping[str, str]):
        self._labels = labels
        self._num_tokens = Histogram(STEP_TOKENS)
        # By program.
        self._seconds: dict[str, Histogram] = {}
        self._fill: dict[str, Histogram] = {}
        self._last_times: dict[int, float] = {}  # when each replica's last step was collected

    def took_step(self, step: StepOutput) -> None:
        """See `Observer`."""
        if step.result is None:
            return
        # A step is launched while the previous one still runs.
        start = max(step.launch_time, self._last_times.get(step.replica, 0.0))
        self._last_times[step.replica] = step.time
        self._num_tokens.observe(step.num_tokens)
        program = step.result.program
        if program not in self._seconds:
            self._seconds[program] = Histogram(_SECONDS)
        self._seconds[program].observe(step.time - start)
        if step.result.fill:
            if program not in self._fill:
                self._fill[program] = Histogram(_FILL)
            self._fill[program].observe(step.result.fill)

    def collect(self) -> Iterator[Metric]:
        """The metrics of a scrape."""
        yield family(
            "vllm:iteration_tokens_total",
            "Tokens that a step computed, of prompts and of answers.",
            self._labels,
            self._num_tokens,
        )
        yield family_by(
            "program",
            "jaxpage:step_time_seconds",
            "Time of a step, from its launch or the end of the step before it.",
            self._labels,
            self._seconds,
        )
        yield family_by(
            "program",
            "jaxpage:step_bucket_fill",
            "Share of a program's padded tokens that a step used, 0 to 1.",
            self._labels,
            self._fill,
        )
