"""Many clients at once, some of which go away: no token is lost or said twice, and nothing is left behind.

`-m deep` does it with 512 clients for five minutes, and looks at memory and at the event loop's lag too.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jaxpage import SamplingParams
from jaxpage.server.options import ServerOptions
from jaxpage.server.run import bind, make_http
from tests.server.conftest import Lasting
from tests.server.load_client import REQUESTS


@pytest.fixture(scope="module")
def expected(llm) -> list[list[str]]:
    """The texts of each request, from the engine itself."""
    futures = [
        llm.submit(r["prompt"], SamplingParams(**{k: v for k, v in r.items() if k != "prompt"}))
        for r in REQUESTS
    ]
    return [[c.text for c in future.result(300).outputs] for future in futures]


def run_clients(url: str, num_clients: int, seconds: float, share_leaving: float) -> dict:
    script = Path(__file__).with_name("load_client.py")
    arguments = [url, str(num_clients), str(seconds), str(share_leaving)]
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def check(llm, found: dict, expected: list[list[str]]) -> None:
    assert found["errors"] == []
    wrong = [(which, texts) for which, texts in found["ended"] if texts != expected[which]]
    assert wrong == []
    deadline = time.monotonic() + 30
    while llm.stats().num_running or llm.stats().num_waiting or llm.stats().num_blocks_used:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not llm._tasks._ids and not llm._tasks.outputs._requests


@pytest.mark.slow
def test_every_stream_is_the_engine_s_answer(llm, url, expected):
    found = run_clients(url, 64, 8.0, 0.1)
    check(llm, found, expected)
    assert len(found["ended"]) > 64 and found["num_left"] > 3


@pytest.mark.deep
def test_five_minutes_of_512_clients(llm, expected, record_property):
    options = ServerOptions(port=0)
    bound = bind(options)
    bound.listen(1024)
    http = make_http(Lasting(llm), options)
    lags: list[float] = []

    async def serve() -> None:
        probe = asyncio.ensure_future(measure_lag(lags))
        await http.serve([bound])
        probe.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    check(llm, run_clients(url, 512, 30.0, 0.1), expected)  # until caches and pools have their size
    before = resident_bytes()
    lags.clear()
    found = run_clients(url, 512, 300.0, 0.1)
    check(llm, found, expected)
    grown = resident_bytes() - before
    http.should_exit = True
    thread.join(20)
    p99 = float(np.percentile(lags, 99))
    report = (
        f"{len(found['ended'])} streams read, {found['num_left']} left; memory {grown / 2**20:+.0f} MiB; "
        f"lag of the event loop p50 {np.percentile(lags, 50) * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms"
    )
    print(report)
    record_property("load", report)
    assert grown < 64 * 2**20
    assert p99 < 0.05, report


async def measure_lag(lags: list[float], interval: float = 0.01) -> None:
    """How much later than asked for the loop comes back, in seconds."""
    while True:
        start = time.perf_counter()
        await asyncio.sleep(interval)
        lags.append(time.perf_counter() - start - interval)


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096
