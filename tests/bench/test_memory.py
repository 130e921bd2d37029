"""The memory benchmark: waste that one can count on paper, capacity read from arrays, and rounds in turns."""

from __future__ import annotations

import functools
import json

import pytest

import jaxpage
from jaxpage.bench import memory, offline
from jaxpage.bench.engines import Work
from jaxpage.bench.memory import MemoryBench


def test_waste_of_one_request_counted_on_paper():
    work = Work(prompts=[[3] * 5], num_tokens=[5], static_batch=1)
    found = memory.waste(work, block_size=4, decode_steps=1)
    # 5, 6, 7, 8 and 9 tokens computed, in 2, 2, 2, 2 and 3 blocks of 4
    assert (found["num_launches"], found["num_blocks"]) == (5, 3)
    assert found["mean"] == (3 + 2 + 1 + 0 + 3) / (8 + 8 + 8 + 8 + 12)
    assert found["max"] == 3 / 8
    assert found["causes"] == {"partial": found["mean"], "ahead": 0}
    assert found["mean_of_launches"] == found["mean"]


def test_waste_of_launches_of_several_steps_is_told_apart():
    work = Work(prompts=[[3] * 4], num_tokens=[10], static_batch=1)
    found = memory.waste(work, block_size=4, decode_steps=8)
    # 4 tokens in a block; then 8 steps in 3 blocks, 5 to 12 tokens; then one more in a fourth
    partial, ahead = 0 + (3 + 2 + 1 + 0) * 2 + 3, 4 * 4
    assert found["causes"] == {"partial": partial / 116, "ahead": ahead / 116}
    assert found["mean"] == pytest.approx((partial + ahead) / (4 + 8 * 12 + 16))
    assert found["mean_of_launches"] == (0 + 7 + 3) / (4 + 12 + 16)


def test_in_a_scarce_pool_few_blocks_are_held_ahead():
    work = Work(prompts=[[3] * 4] * 4, num_tokens=[30] * 4, static_batch=4)
    plenty = memory.waste(work, block_size=4, decode_steps=8)
    scarce = memory.waste(work, block_size=4, decode_steps=8, num_blocks=20)
    assert scarce["num_blocks"] <= 20 < plenty["num_blocks"]
    assert scarce["causes"]["ahead"] < plenty["causes"]["ahead"] / 4


def test_a_window_holds_few_blocks_of_a_long_sequence():
    assert memory.blocks_of_long_sequence((None,) * 6, 16) == 6 * 32768 // 16
    # Most while the prompt is computed: of it one layer keeps all, five 1023 tokens and those of a step.
    most = (32768 - 64) // 16 + 5 * -(-(1023 + 2048) // 16)
    assert memory.blocks_of_long_sequence(memory.GEMMA, 16) == most


def test_a_gib_holds_as_many_tokens_as_the_arrays_say():
    found = memory.tokens_per_gib((2, 1, 128), block_size=16)
    assert found["bfloat16"] == 2**30 // (2 * 2 * 128 * 2)  # layers, K and V, head_dim, bytes
    assert found["fp8_e4m3"] == found["fp8_e5m2"] == 2 * found["bfloat16"]
    assert found["int8"] > 1.85 * found["bfloat16"] and found["int4"] > 3.2 * found["bfloat16"]


def test_overhead_is_the_median_of_rounds():
    seconds = {"on": [2.2, 3.3, 9.0], "off": [2.0, 3.0, 3.0], "num_tokens": [10**6] * 3}
    found = memory.overhead(seconds)
    assert found == pytest.approx({"on": 3.3, "off": 3.0, "slower": 0.1})


def test_everything_is_printed_and_written(tmp_path, capsys):
    path = tmp_path / "report.json"
    memory.main(MemoryBench(rounds=1, scale=0.1, json=path))
    report = json.loads(path.read_text())
    printed = capsys.readouterr().out.strip()
    assert printed == memory.show(report)
    for word in ("decode_steps", "bfloat16", "int4", "never hits"):
        assert word in printed
    assert [found["decode_steps"] for found in report["waste"]] == [1, 8, 8]


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"rounds": 0}, "--rounds must be at least 1, got 0"),
        ({"scale": 0}, "--scale must be a finite number above 0, got 0"),
        ({"decode_steps": ()}, "--decode-steps must be at least 1, got none"),
    ],
)
def test_sizes_that_measure_nothing_are_refused(sizes, told):
    with pytest.raises(ValueError, match=f"^{told}$"):
        memory.measure(MemoryBench(**sizes))


@pytest.mark.slow
def test_whole_engines_are_measured_too(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(offline, "CACHE", tmp_path)
    # Only the programs that are used.
    monkeypatch.setattr(jaxpage, "LLM", functools.partial(jaxpage.LLM, enforce_eager=True))
    memory.main(MemoryBench(rounds=1, scale=0.02, shape="tiny", decode_steps=(1,)))
    assert "engine, tiny:" in capsys.readouterr().out
