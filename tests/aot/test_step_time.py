"""What is made of the compiler's numbers before they are milliseconds."""

from __future__ import annotations

import dataclasses

import pytest

from jaxpage.aot.attention_time import Rows, bundles
from jaxpage.aot.estimate import estimate
from jaxpage.aot.step_time import show_times, step_times
from jaxpage.aot.targets import CHIPS
from jaxpage.aot.tpu_schedule import Loop
from tests.aot.test_estimate import measured

HEADS = Loop(begin=20, own=100, least=100, trips=8, slots={"MXU": 32})
COPY = Loop(begin=12, own=40, least=40, num_starts=1)
CLEAR = Loop(begin=14, own=60, least=60)
ZERO = Loop(begin=16, own=5, least=5, trips=4)
DIVIDE = Loop(begin=18, own=30, least=30, trips=2, slots={"EUP": 1})
TURN = Loop(begin=10, own=600, least=150, inner=(COPY, CLEAR, ZERO, DIVIDE, HEADS))
WRITE = Loop(begin=5, own=200, least=100, num_waits=1)
PROGRAM = Loop(begin=0, own=300, least=200, inner=(WRITE, TURN))
TILES = {"tile_q": 32, "tile_tokens": 32, "tile_kv": 512, "fetch_kv": 512, "block_size": 128}
ONE_QUERY = {"tile_q": 1, "tile_tokens": 16}


def test_the_loops_of_the_kernel_run_as_often_as_there_is_work():
    rows = Rows(count=64, query_len=1, kv_len=1024, **TILES | ONE_QUERY)
    # All but the first rows write their tokens when their turns begin.
    assert (rows.num_units, rows.num_turns, rows.num_chunks) == (64, 128, 6)
    turn, unit = 150 + 8 * 100 + 4 * 40, 600 - 150 + 2 * 30 + 4 * 5 / 16
    assert bundles(PROGRAM, rows) == 300 + 6 * 200 + 128 * turn + 64 * unit


def test_queries_of_a_chunk_see_the_keys_before_them():
    rows = Rows(count=1, query_len=1024, kv_len=2048, **TILES)
    assert rows.num_units == 32
    # Sixteen tiles of queries end at up to 1536 keys, sixteen at up to 2048.
    assert rows.num_turns == 16 * 3 + 16 * 4
    assert rows.num_chunks == 1024 / 16


def test_a_launch_that_writes_nothing_has_no_rows():
    """That of the rows with one query, in a step with prompts."""
    rows = Rows(count=1, query_len=1024, kv_len=2048, **TILES)
    assert bundles(dataclasses.replace(PROGRAM, inner=(TURN,)), rows) == 300


def of_tpu(**time) -> dict:
    kernel = {"name": "paged_attention", "count": 28, "program": dataclasses.asdict(PROGRAM)}
    parts = [{"what": "dot", "count": 28, "cycles": 900_000}]
    found = {"cycles": 1_000_000, "in_other_branches": 0, "parts": parts, "kernels": [kernel]}
    programs = [
        {"name": "layers R=64", "time": found | time},
        {"name": "forward T=2048", "time": found},
        {"name": "sample R=64", "time": found | {"kernels": []}},
    ]
    tiles = {"decode": TILES | ONE_QUERY, "prefill": TILES}
    chip = dataclasses.asdict(CHIPS["v6e"])
    values = measured(chip=chip, programs=programs, attention_tiles=tiles)
    values["config"] |= {"max_num_batched_tokens": 2048, "block_size": 128}
    return values


def test_a_kernel_takes_the_greater_of_its_bundles_and_its_bytes():
    values = of_tpu()
    times = step_times(values, estimate(values))
    assert [each.name for each in times][-1] == "prefill 2048 tokens"
    (step, *_) = times
    clock = CHIPS["v6e"].clock
    xla = [
        part.ms for part in step.parts if "attention" not in part.what and part.what != "exchange"
    ]
    assert sum(xla) == pytest.approx(1000 * 2_000_000 / clock)
    values["block_bytes"] *= 10**6
    (more, *_) = step_times(values, estimate(values))
    (attention,) = [part for part in more.parts if part.what == "attention (bytes)"]
    batch, length = map(int, more.name.split(",")[0].removeprefix("decode ").split(" x "))
    num_bytes = batch * -(-length // 128) * values["block_bytes"]
    assert attention.ms == pytest.approx(1000 * num_bytes / values["chip"]["bytes_per_second"])


def test_what_was_not_compiled_takes_no_time():
    values = measured()
    assert step_times(values, estimate(values)) == []
    assert show_times([], explain=True, is_gpu=False) == []


def test_ten_parts_are_explained():
    parts = [{"what": f"part {i}", "count": 1, "cycles": 1000 - i} for i in range(30)]
    values = of_tpu(parts=parts, cycles=100_000)
    lines = show_times(step_times(values, estimate(values)), explain=True, is_gpu=False)
    tables = [i for i, line in enumerate(lines) if line.endswith("part")]
    assert len(tables) == len(step_times(values, estimate(values)))
    assert lines[tables[0] + 11] == "" and lines[-1].startswith("not modelled: ")
