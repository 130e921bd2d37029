"""The dashboard asks for nothing that is not there."""

from __future__ import annotations

import asyncio
import json
import re
from importlib.resources import files
from types import SimpleNamespace

import jax
import pytest

from jaxpage.server.metrics import Metrics
from tests.server.stubs import Scrape, StubLLM, make_request, make_step

METRIC = re.compile(r"\b(?:vllm:|jaxpage:|http_)\w+")


@pytest.fixture(scope="module")
def dashboard():
    return json.loads(files("jaxpage.server").joinpath("grafana.json").read_text())


def queries(dashboard) -> list[str]:
    targets = [t for panel in dashboard["panels"] for t in panel.get("targets", [])]
    variables = [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    return [target["expr"] for target in targets] + variables


async def _silent(scope, receive, send) -> None:
    """An application."""


def exposed(monkeypatch) -> set[str]:
    """The names of all samples, once there is something of each kind."""
    memory = dict.fromkeys(("bytes_in_use", "peak_bytes_in_use", "bytes_limit"), 1)
    device = SimpleNamespace(id=0, memory_stats=lambda: memory)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    metrics = Metrics(StubLLM(), "demo")
    metrics.added(make_request())
    metrics.took_step(make_step(11.0, {("r#0", 0): 1}, fill=0.5))
    metrics.rejected()
    asyncio.run(metrics.http.middleware(_silent)({"type": "http", "method": "GET"}, None, None))
    return Scrape(metrics.render()).names


def test_every_query_names_metrics_that_are_exposed(dashboard, monkeypatch):
    found = {name for query in queries(dashboard) for name in METRIC.findall(query)}
    assert len(found) > 30
    assert found - exposed(monkeypatch) == set()


def test_every_panel_has_a_query_and_every_query_a_metric(dashboard):
    for panel in dashboard["panels"]:
        assert panel["type"] == "row" or panel["targets"], panel["title"]
    assert all(METRIC.search(query) for query in queries(dashboard))


def test_panels_do_not_overlap(dashboard):
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
