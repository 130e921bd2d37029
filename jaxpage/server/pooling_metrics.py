"""`/metrics` of a pooling model, in Prometheus' text format. vLLM's names where it has them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from jaxpage.pooling.async_pooler import AsyncPooler
from jaxpage.server.http_metrics import ServerMetrics, labels_of


class PoolingMetrics(ServerMetrics):
    """Replaces `Metrics` for a pooling model."""

    def __init__(self, llm: AsyncPooler, model_name: str):
        labels = labels_of(model_name)
        super().__init__(labels, (_EngineCounts(llm, labels),))


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
