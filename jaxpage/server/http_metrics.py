"""HTTP requests by route, method and status, and their durations; how many were refused because too many wait."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
# Polled every few seconds by monitoring.
_UNCOUNTED = frozenset(("/metrics", "/health", "/live", "/ready", "/ping", "/load", "/version"))
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class ServerMetrics:
    """What `/metrics` of every server has. Independent of other servers in the process.

    Its `http.middleware` is for the application.
    """

    content_type = CONTENT_TYPE_LATEST  # of what `render` returns

    def __init__(self, labels: Mapping[str, str], collectors: Iterable[Collector]):
        """collectors: of the other metrics, which the text begins with."""
        self._labels, self._registry = labels, CollectorRegistry()
        for collector in collectors:
            self._registry.register(collector)
        self.http = HttpMetrics(self._registry)
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused because too many wait, by which limit.",
            (*labels, "reason"),
            registry=self._registry,
        )

    def render(self) -> bytes:
        """The text of a scrape. Reads the engine's counters: a few milliseconds."""
        return generate_latest(self._registry)

    def rejected(self, reason: str = "max_num_queued_reqs") -> None:
        """A request was rejected because too many wait; `reason` is the option with the limit."""
        self._rejections.labels(*self._labels.values(), reason).inc()


def labels_of(model_name: str) -> dict[str, str]:
    """Of all metrics but those of HTTP. `model_name`: the server's name for the model."""
    return {"model_name": model_name, "engine": "0"}


class HttpMetrics:
    """Labels have few values, whatever clients send: only declared routes and standard methods."""

    def __init__(self, registry: CollectorRegistry):
        self._requests = Counter(
            "http_requests",
            "HTTP requests that were answered.",
            ("handler", "method", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Time from the head of an HTTP request to the end of the answer.",
            ("handler", "method"),
            registry=registry,
            buckets=_SECONDS,
        )

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """The application with counting: `app.add_middleware(metrics.http.middleware)`."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            start = time.perf_counter()
            status = 499  # no answer: the client disconnected

            async def send_noting_status(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await app(scope, receive, send_noting_status)
            except Exception:
                status = 500
                raise
            finally:
                self._count(scope, status, time.perf_counter() - start)

        return counted

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        # Set by the router; "none": no route for this path.
        handler = getattr(scope.get("route"), "path", "none")
        if handler in _UNCOUNTED:
            return
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._requests.labels(handler, method, str(status)).inc()
        self._seconds.labels(handler, method).observe(seconds)
