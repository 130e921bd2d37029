"""Spans of requests: their attributes, times and parents."""

from __future__ import annotations

import sys

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from jaxpage.server.tracing import Traces, trace_headers
from tests.server.stubs import make_output, make_request, now

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


def span_of(request, output):
    exporter = InMemorySpanExporter()
    traces = Traces(exporter, "demo")
    traces.finished(request, output)
    traces.shutdown()
    (span,) = exporter.get_finished_spans()
    return span


def test_a_span_tells_what_a_request_was_and_where_its_time_went():
    request = make_request(queued=now() - 5.0, max_tokens=9, temperature=0.5, top_p=0.75, n=2)
    span = span_of(request, make_output(request, (3, 2)))
    assert span.name == "llm_request" and span.kind is SpanKind.SERVER
    assert span.parent is None
    assert span.resource.attributes["service.name"] == "jaxpage"
    attributes = dict(span.attributes or {})
    e2e = attributes.pop("gen_ai.latency.e2e")
    assert 5.0 <= e2e < 15.0
    assert span.start_time == 10**18 and span.end_time == pytest.approx(10**18 + e2e * 1e9, abs=1e3)
    assert attributes == {
        "gen_ai.response.model": "demo",
        "gen_ai.request.id": "caller's name",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.n": 2,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.usage.prompt_tokens": 5,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.latency.time_in_queue": pytest.approx(1.0),
        "gen_ai.latency.time_to_first_token": 2.0,
        "gen_ai.latency.time_in_model_prefill": pytest.approx(1.0),
        "gen_ai.latency.time_in_model_decode": pytest.approx(2.0),
        "gen_ai.latency.time_in_model_inference": pytest.approx(3.0),
    }


def test_a_request_that_was_never_scheduled_has_a_span_without_phases():
    request = make_request(queued=now())
    attributes = span_of(request, make_output(request, (0,), seconds=None)).attributes or {}
    latencies = {name for name in attributes if name.startswith("gen_ai.latency.")}
    assert latencies == {"gen_ai.latency.e2e"}


def test_the_parent_is_what_the_callers_headers_name():
    request = make_request(queued=now())
    request.trace_headers = trace_headers({"traceparent": TRACEPARENT, "host": "x"})
    span = span_of(request, make_output(request))
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}" == f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == SPAN_ID


def test_headers_that_name_nothing_begin_a_trace():
    request = make_request(queued=now())
    request.trace_headers = {"traceparent": "nonsense"}
    assert span_of(request, make_output(request)).parent is None


def test_only_trace_headers_are_taken():
    headers = {"authorization": "secret", "tracestate": "a=b"}
    assert trace_headers(headers) is None
    assert trace_headers(headers | {"traceparent": TRACEPARENT}) == {
        "traceparent": TRACEPARENT,
        "tracestate": "a=b",
    }


@pytest.mark.parametrize(
    ("endpoint", "module"),
    [
        ("http://127.0.0.1:4317", "grpc"),
        ("127.0.0.1:4317", "grpc"),
        ("https://127.0.0.1:4317/", "grpc"),
        ("http://127.0.0.1:4318/v1/traces", "http"),
    ],
)
def test_the_endpoint_says_how_spans_travel(endpoint, module):
    from jaxpage.server.tracing import _otlp_exporter

    exporter = _otlp_exporter(endpoint)
    assert f".{module}." in type(exporter).__module__
    exporter.shutdown()


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ValueError, match=r'pip install "jaxpage\[otlp\]"'):
        Traces.to("http://127.0.0.1:4317", "demo")
