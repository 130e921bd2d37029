"""`/metrics` of a pooling model, in Prometheus' text format. vLLM's names where it has them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from jaxpage.pooling.async_pooler import AsyncPooler
from jaxpage.server.http_metrics import HttpMetrics


class PoolingMetrics:
    """Replaces `Metrics` for a pooling model."""

    content_type = CONTENT_TYPE_LATEST  # of what `render` returns

    def __init__(self, llm: AsyncPooler, model_name: str):
        labels = {"model_name": model_name, "engine": "0"}
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCounts(llm, labels))
        self.http = HttpMetrics(self._registry)
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused because too many wait, by which limit.",
            (*labels, "reason"),
            registry=self._registry,
        )
        self._labels = labels

    def render(self) -> bytes:
        """The text of a scrape."""
        return generate_latest(self._registry)

    def rejected(self, reason: str = "max_num_queued_reqs") -> None:
        """A request was rejected because too many wait; `reason` is the option with the limit."""
        self._rejections.labels(*self._labels.values(), reason).inc()


class _EngineCounts:
    """A collector for prometheus_client that reads the engine's counters."""

    def __init__(self, llm: AsyncPooler, labels: dict[str, str]):
        self._llm, self._labels = llm, labels

    def collect(self) -> Iterator[Metric]:
        """The metrics of a scrape."""
        stats = self._llm.stats()
        for name, value, text in (
            ("vllm:prompt_tokens", stats.num_tokens, "Tokens of texts that were computed."),
            ("vllm:request_success", stats.num_texts, "Texts that were computed."),
            ("jaxpage:padded_tokens", stats.num_padded_tokens, "Tokens of launches, with padding."),
            ("jaxpage:launches", stats.num_launches, "Launches of a program."),
        ):
            family = CounterMetricFamily(name, text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family
