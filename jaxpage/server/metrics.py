"""`/metrics`: all metrics of one server, in Prometheus' text format.

Names, types, labels and buckets are vLLM's; metrics of jaxpage only begin with `jaxpage:`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxpage.engine.step_output import StepOutput
from jaxpage.outputs import RequestOutput
from jaxpage.request import Request
from jaxpage.server.engine_metrics import EngineMetrics
from jaxpage.server.http_metrics import ServerMetrics, labels_of
from jaxpage.server.request_metrics import RequestMetrics
from jaxpage.server.step_metrics import StepMetrics

if TYPE_CHECKING:
    from jaxpage.async_llm import AsyncLLM


class Metrics(ServerMetrics):
    """The metrics of a server of an LLM. Pass it to `llm.observe`."""

    def __init__(self, llm: AsyncLLM, model_name: str):
        """`model_name`: the value of that label, the server's name for the model."""
        labels = labels_of(model_name)
        self._requests = RequestMetrics(labels, llm.config.max_model_len)
        self._steps = StepMetrics(labels)
        super().__init__(labels, (EngineMetrics(llm, labels), self._requests, self._steps))

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
