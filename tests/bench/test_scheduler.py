"""The scheduler benchmark drives a real LLM, scheduler and packer, and reports every step."""

from __future__ import annotations

import json

import pytest

from jaxpage.bench import scheduler
from jaxpage.bench.scheduler import SchedulerBench


def test_every_step_of_every_size_is_timed_and_written(tmp_path, capsys):
    path = tmp_path / "times.json"
    # Steps enough that each row needs new blocks on the way: a step must not outgrow its bucket.
    scheduler.main(SchedulerBench(rows=(2, 5), context=7, steps=20, block_size=4, json=path))
    report = json.loads(path.read_text())
    assert [result["rows"] for result in report["results"]] == [2, 5]
    for result in report["results"]:
        assert list(result["microseconds"]) == ["schedule", "pack", "update", "outputs"]
        for times in result["microseconds"].values():
            assert len(times) == 20 and min(times) > 0
    assert report["requests"] == []
    assert capsys.readouterr().out.strip() == scheduler.show(report)


def test_table_shows_median_and_90th_percentile():
    times = [float(t) for t in range(1, 12)]  # median 6, p90 10
    parts = {"schedule": times, "pack": [1.0] * 11, "update": times[::-1], "outputs": [2.0] * 11}
    report = {"context": 7, "results": [{"rows": 3, "microseconds": parts}], "requests": []}
    assert scheduler.show(report).splitlines()[-1].split() == (
        "3 6 (10) 1 (1) 6 (10) 2 (2) 7 (11) 15 (15)".split()
    )


def test_requests_of_every_kind_are_timed_with_the_most_rows():
    report = scheduler.measure(SchedulerBench(rows=(1, 3), context=8, steps=4, requests=True))
    assert len(report["requests"]) == 3 * len(scheduler.REQUEST_KINDS)
    assert {found["rows"] for found in report["requests"]} == {3}
    lines = scheduler.show(report).splitlines()
    assert lines[-1].startswith("   3  ") and "FINAL_ONLY, text, 5 logprobs" in lines[-1]


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"rows": ()}, "--rows must be at least 1, got none"),
        ({"rows": (0,)}, "--rows must be at least 1, got 0"),
        ({"context": 1}, "--context must be at least 2, got 1"),
        ({"steps": 0}, "--steps must be at least 1, got 0"),
    ],
)
def test_sizes_that_measure_nothing_are_refused(sizes, told):
    with pytest.raises(ValueError, match=f"^{told}$"):
        scheduler.measure(SchedulerBench(**sizes))
