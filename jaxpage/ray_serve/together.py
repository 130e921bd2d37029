"""Merges the answers of all replicas, for administrative paths and `/metrics`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.responses import Response

from jaxpage.ray_serve.call import WholeAnswer
from jaxpage.server.limits import ADMIN_PATHS

EVERYWHERE = (*ADMIN_PATHS, "/metrics")  # paths that are sent to every replica


def together(path: str, answers: Sequence[WholeAnswer]) -> Response:
    """One answer: the first error, else metrics with the label `replica`, or sums of counts."""
    worst = max(answers, key=lambda answer: answer.status)
    body = worst.body
    if worst.status < 300 and path == "/metrics":
        body = merged_metrics(answers)
    elif worst.status < 300 and body:
        body = json.dumps(_summed([json.loads(answer.body) for answer in answers])).encode()
    response = Response(body, worst.status)
    length = (b"content-length", str(len(body)).encode())
    kept = [(name, value) for name, value in worst.headers if name.lower() != length[0]]
    response.raw_headers = [*kept, length]
    return response


def merged_metrics(answers: Iterable[WholeAnswer]) -> bytes:
    """Prometheus' text from several replicas; each sample gets one more label, its replica."""
    families: dict[str, Metric] = {}
    for answer in answers:
        for family in text_string_to_metric_families(answer.body.decode()):
            merged = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            merged.samples += [
                sample._replace(labels={**sample.labels, "replica": answer.replica})
                for sample in family.samples
            ]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(list(families.values())))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: list[Metric]):
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def _summed(bodies: Sequence[dict]) -> dict:
    return {
        name: sum(body[name] for body in bodies) if type(value) is int else value
        for name, value in bodies[0].items()
    }
