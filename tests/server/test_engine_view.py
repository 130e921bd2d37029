"""The live view: what it says of requests and blocks, and what it costs."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request

import numpy as np
from fastapi.testclient import TestClient

from jaxpage import SamplingParams
from jaxpage.async_llm import EngineDeadError
from jaxpage.engine.activity import Activity, SequenceProgress, joined, take_activity
from jaxpage.server.engine_view import MAX_CELLS, MAX_LISTED, EngineView, describe
from tests.engine.harness import make_engine
from tests.fakes import make_request
from tests.server.fake_llm import FakeLLM
from tests.server.stub import Stub

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def view_of(engine):
    return describe(take_activity(engine.scheduler, MAX_LISTED))


def test_blocks_are_told_apart_by_who_holds_them():
    engine = make_engine(num_blocks=12)
    engine.add(make_request("a#0", PROMPT, n=2, max_tokens=9, ignore_eos=True))
    engine.step()
    engine.step()  # both hold blocks 1 and 2, the first has a copy of block 3
    view = view_of(engine)
    assert view["pool"] | {"block_size": 4, "blocks": 11} == view["pool"]
    assert {k: view["pool"][k] for k in ("own", "shared", "cached", "empty")} == {
        "own": 2,
        "shared": 2,
        "cached": 0,
        "empty": 7,
    }
    assert view["cells"]["blocks"] == 1
    assert view["cells"]["shared"] == [1, 1, *[0] * 9]
    assert view["cells"]["own"] == [0, 0, 1, 1, *[0] * 7]
    assert view["cells"]["owners"] == [-1, -1, 1, 0, *[-1] * 7]
    first, second = view["running"]
    assert (first["id"], first["index"], second["index"]) == ("a", 0, 1)
    assert first["blocks"] == 3 and first["shared_blocks"] == 2
    assert first["prompt_tokens"] == 10 and first["output_tokens"] == 2


def test_blocks_of_ended_requests_are_cached_until_they_are_forgotten():
    engine = make_engine(num_blocks=12)
    engine.add(make_request("a", PROMPT, max_tokens=1))
    while engine.has_unfinished_requests():
        engine.step()
    assert view_of(engine)["pool"]["cached"] == 2  # a third was not full
    assert engine.reset_prefix_cache()
    assert view_of(engine)["pool"]["empty"] == 11


def test_requests_that_wait_are_listed_up_to_a_limit():
    engine = make_engine(num_blocks=12, max_num_seqs=1)
    for number in range(MAX_LISTED + 7):
        engine.add(make_request(f"{'x' * 100}{number}", PROMPT, max_tokens=1))
    engine.step()
    view = view_of(engine)
    assert len(view["waiting"]) == MAX_LISTED
    assert max(len(request["id"]) for request in view["waiting"]) == 64


def test_sequences_that_were_swapped_out_say_so():
    engine = make_engine(num_blocks=6, num_host_blocks=6, preemption_mode="swap", max_model_len=20)
    engine.add(make_request("a", PROMPT[:8], max_tokens=12, ignore_eos=True))
    engine.add(make_request("b", PROMPT[2:], max_tokens=12, ignore_eos=True))
    while not any(sequence.host_tables for sequence in engine.scheduler.waiting):
        engine.step()
    view = view_of(engine)
    assert view["waiting"][0]["host_blocks"] > 0
    assert view["pool"]["host_blocks"] == 6 and view["pool"]["host_blocks_used"] > 0


def test_replicas_are_shown_as_one_pool():
    engines = [make_engine(num_blocks=12), make_engine(num_blocks=9)]
    for number, engine in enumerate(engines):
        engine.add(make_request(f"a#{number}", [number] * (5 + 4 * number), max_tokens=3))
        engine.step()
    first, second = (take_activity(engine.scheduler, MAX_LISTED) for engine in engines)
    both = joined([first, second])
    view = describe(both)
    assert view["pool"]["blocks"] == 11 + 8 and view["pool"]["own"] == 2 + 3
    assert [sequence["blocks"] for sequence in view["running"]] == [2, 3]
    own = [describe(part)["cells"]["own"] for part in (first, second)]
    assert view["cells"]["own"] == own[0] + own[1]
    assert {-1, 0, 1} == set(view["cells"]["owners"])
    assert both.references[1:] == first.references[1:] + second.references[1:]
    assert joined([first]) is first


def make_activity(num_blocks: int, num_running: int, blocks_each: int) -> Activity:
    """A pool in which neighbouring sequences share a block, and half of the rest is cached."""
    references = [0] * num_blocks
    running = []
    for row in range(num_running):
        first = 1 + row * (blocks_each - 1)
        table = list(range(first, first + blocks_each))
        for block_id in table:
            references[block_id] += 1
        progress = SequenceProgress(
            request_id=f"cmpl-{row}#{row}",
            index=0,
            num_prompt_tokens=100,
            num_output_tokens=1,
            num_computed_tokens=100,
            age=1.0,
            block_tables=[table],
            num_host_blocks=0,
        )
        running.append(progress)
    hashes = [bytes(32) if i % 2 else None for i in range(num_blocks)]
    return Activity(
        time=0.0,
        block_size=16,
        running=running,
        waiting=[],
        references=references,
        hashes=hashes,
        num_host_blocks=0,
        num_host_blocks_used=0,
    )


def test_a_large_pool_is_told_in_few_cells_and_quickly():
    activity = make_activity(100_001, num_running=256, blocks_each=300)
    start = time.process_time()
    view = describe(activity)
    body = json.dumps(view, separators=(",", ":"))
    assert time.process_time() - start < 0.5  # some 20 ms
    assert len(body) < 100_000
    pool, cells = view["pool"], view["cells"]
    assert len(cells["own"]) <= MAX_CELLS and len(view["running"]) == MAX_LISTED
    for kind in ("own", "shared", "cached"):
        assert sum(cells[kind]) == pool[kind]
    assert (
        pool["own"] + pool["shared"] + pool["cached"] + pool["empty"] == pool["blocks"] == 100_000
    )
    assert pool["shared"] == 255


def test_a_cell_belongs_to_whoever_owns_most_of_it():
    activity = make_activity(2 * MAX_CELLS * 10 + 1, num_running=50, blocks_each=300)
    cells = describe(activity)["cells"]
    assert cells["blocks"] == 20
    owners = np.full(2 * MAX_CELLS * 10, -1)
    for row, sequence in enumerate(activity.running):
        for block_id in sequence.block_tables[0]:
            if activity.references[block_id] == 1:
                owners[block_id - 1] = row
    for cell, owner in enumerate(cells["owners"]):
        found = [o for o in owners[cell * 20 : cell * 20 + 20] if o >= 0]
        assert (owner == -1) == (not found)
        assert not found or found.count(owner) == max(map(found.count, found))


def test_one_look_serves_all_who_ask_within_a_second():
    llm = FakeLLM()
    view = EngineView(llm)

    async def ask():
        leaving = asyncio.create_task(view.body())
        others = [asyncio.create_task(view.body()) for _ in range(20)]
        await asyncio.sleep(0)
        leaving.cancel()  # takes the view from nobody else
        bodies = await asyncio.gather(*others)
        return {*bodies, await view.body()}

    assert len(asyncio.run(ask())) == 1
    assert llm.num_looks == 1
    view._taken -= 1.0
    asyncio.run(view.body())
    assert llm.num_looks == 2


def test_a_dead_engine_is_told_and_asked_again():
    llm = FakeLLM()
    llm.error = EngineDeadError("3 steps failed in a row")
    with TestClient(Stub(llm=llm).app) as client:
        response = client.get("/page/engine")
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "3 steps failed in a row"
        llm.error = None
        response = client.get("/page/engine")
        assert response.status_code == 200 and response.headers["cache-control"] == "no-store"


def test_the_view_of_a_real_engine_has_no_text_of_its_requests(llm):
    async def look():
        params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)
        stream = await llm.start("the secret of the old house", params, "call-7")
        await anext(stream)
        snapshot = await llm.kv_snapshot()
        body = await EngineView(llm).body()
        stream.close()
        return snapshot, body

    snapshot, body = asyncio.run(look())
    view = json.loads(body)
    assert "call-7" in [request["id"] for request in view["running"]]
    assert view["pool"]["own"] >= 1 and view["stats"]["num_running"] >= 1
    assert sum(program["calls"] for program in view["programs"]) >= 2
    assert any(name.startswith("call-7#") for name, _ in snapshot.sequences)
    assert b"secret" not in body


def test_the_server_has_the_page_and_its_view(url):
    with urllib.request.urlopen(url) as response:
        assert response.headers["content-type"] == "text/html; charset=utf-8"
    with urllib.request.urlopen(f"{url}/page/engine") as response:
        assert json.load(response)["pool"]["blocks"] > 0
