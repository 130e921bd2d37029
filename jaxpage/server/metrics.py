"""`/metrics`: all metrics of one server, in Prometheus' text format.

Names, types, labels and buckets are vLLM's; metrics of jaxpage only begin with `jaxpage:`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest

from jaxpage.engine.step_output import StepOutput
from jaxpage.outputs import RequestOutput
from jaxpage.request import Request
from jaxpage.server.engine_metrics import EngineMetrics
from jaxpage.server.http_metrics import HttpMetrics
from jaxpage.server.request_metrics import RequestMetrics
from jaxpage.server.step_metrics import StepMetrics

if TYPE_CHECKING:
    from jaxpage.async_llm import AsyncLLM


class Metrics:
    """The metrics of one server, independent of others in the process.

    Pass it to `llm.observe`, and its `http.middleware` to the application.
    """

    content_type = CONTENT_TYPE_LATEST  # of what `render` returns

    def __init__(self, llm: AsyncLLM, model_name: str):
        """`model_name`: the value of that label, the server's name for the model."""
        labels = {"model_name": model_name, "engine": "0"}
        self._registry = CollectorRegistry()
        self._requests = RequestMetrics(labels, llm.config.max_model_len)
        self._steps = StepMetrics(labels)
        for collector in (EngineMetrics(llm, labels), self._requests, self._steps):
            self._registry.register(collector)
        self.http = HttpMetrics(self._registry)
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused because too many wait, by which limit.",
            (*labels, "reason"),
            registry=self._registry,
        )
        self._labels = labels

    def render(self) -> bytes:
        """The text of a scrape. Reads the engine's counters: a few milliseconds."""
        return generate_latest(self._registry)

    def rejected(self, reason: str = "max_num_queued_reqs") -> None:
        """A request was rejected because too many wait; `reason` is the option with the limit."""
        self._rejections.labels(*self._labels.values(), reason).inc()

    def added(self, request: Request) -> None:
        """See `Observer`."""
        self._requests.added(request)

    def took_step(self, step: StepOutput) -> None:
        """See `Observer`."""
        self._requests.took_step(step)
        self._steps.took_step(step)

    def finished(self, request: Request, output: RequestOutput) -> None:
        """See `Observer`."""
        self._requests.finished(request, output)

    def dropped(self, request: Request, error: Exception | None) -> None:
        """See `Observer`."""
        self._requests.dropped(request, error)
