"""OpenTelemetry traces: a span for each finished request. The packages are in the extra `otlp`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxpage.engine.step_output import StepOutput
from jaxpage.outputs import RequestOutput
from jaxpage.request import Request
from jaxpage.server.request_times import request_times

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import SpanExporter

_TRACE_HEADERS = ("traceparent", "tracestate")


def trace_headers(headers: Mapping[str, str]) -> dict[str, str] | None:
    """The W3C trace context in the headers of an HTTP request, for `AsyncLLM.generate`; None if there is none.

    `headers` must have lower-case names, or ignore case.
    """
    found = {name: headers[name] for name in _TRACE_HEADERS if name in headers}
    return found if "traceparent" in found else None


class Traces:
    """An observer that creates a span `llm_request` for every finished request, and exports it.

    A span's parent is in the request's `trace_headers`, if any.
    """

    def __init__(self, exporter: SpanExporter, model_name: str):
        """`model_name`: the server's name for the model."""
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model_name = model_name
        self._provider = TracerProvider(resource=_resource())
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jaxpage")
        self._contexts = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str, model_name: str) -> Traces:
        """Export to a collector: by gRPC to `http://host:4317`, by HTTP to a URL with a path.

        Raises ValueError if the packages for that are missing.
        """
        try:
            return cls(_otlp_exporter(endpoint), model_name)
        except ImportError as error:
            raise ValueError(
                f"otlp_traces_endpoint={endpoint!r} needs packages that are not installed ({error}): "
                'pip install "jaxpage[otlp]"'
            ) from None

    def shutdown(self) -> None:
        """Export the remaining spans. May take some seconds if the collector does not respond."""
        self._provider.shutdown()

    def added(self, request: Request) -> None:
        """See `Observer`."""

    def took_step(self, step: StepOutput) -> None:
        """See `Observer`."""

    def dropped(self, request: Request, error: Exception | None) -> None:
        """See `Observer`."""

    def finished(self, request: Request, output: RequestOutput) -> None:
        """See `Observer`."""
        from opentelemetry.trace import SpanKind

        stats = output.metrics
        times = request_times(stats, time.monotonic())
        span = self._tracer.start_span(
            "llm_request",
            kind=SpanKind.SERVER,
            context=self._contexts.extract(request.trace_headers or {}),
            start_time=_nanoseconds(stats.arrival_time),
        )
        params = request.params
        attributes = {
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": output.request_id,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.n": params.n,
            "gen_ai.usage.num_sequences": params.n,
            "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
            "gen_ai.usage.completion_tokens": stats.num_generation_tokens,
            "gen_ai.latency.time_in_queue": times.queue,
            "gen_ai.latency.time_to_first_token": stats.first_token_latency or None,
            "gen_ai.latency.e2e": times.end_to_end,
            "gen_ai.latency.time_in_model_prefill": times.prefill,
            "gen_ai.latency.time_in_model_decode": times.decode,
            "gen_ai.latency.time_in_model_inference": times.inference,
        }
        span.set_attributes({name: x for name, x in attributes.items() if x is not None})
        span.end(_nanoseconds(stats.arrival_time + times.end_to_end))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _resource() -> Resource:
    """The environment's attributes for this process; its default name is jaxpage."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    named = Resource.create({"service.name": "jaxpage"})
    return named.merge(OTELResourceDetector().detect())


def _otlp_exporter(endpoint: str) -> SpanExporter:
    """Raises ImportError."""
    if "/" in endpoint.rpartition("://")[2].rstrip("/"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint, insecure=not endpoint.startswith("https://"))
