"""HTTP requests by route, method and status, and their durations."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
# Polled every few seconds by monitoring.
_UNCOUNTED = frozenset(("/metrics", "/health", "/live", "/ready", "/ping", "/load", "/version"))
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


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
