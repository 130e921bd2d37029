"""The sampling benchmark times what it says it times."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxpage.bench import sampling
from jaxpage.bench.sampling import SamplingBench
from jaxpage.sampling.constraints import CONSTRAINTS
from jaxpage.sampling.features import bits, processor_bits
from jaxpage.sampling.keys import RANDOM
from jaxpage.sampling.logprobs import LOGPROBS, TOP_LOGPROBS
from jaxpage.sampling.penalties import PENALTIES
from jaxpage.sampling.thinking import THINKING
from jaxpage.sampling.truncation import TRUNCATION

SMALL = SamplingBench(vocab_size=1024, rows=2, context=8)


@pytest.mark.slow
def test_each_case_asks_for_the_features_that_it_names():
    wanted = [(), (CONSTRAINTS,), (PENALTIES,), (), (RANDOM,)]
    wanted += [(RANDOM, TRUNCATION)] * 3
    wanted += [(PENALTIES, RANDOM, TRUNCATION), (LOGPROBS, TOP_LOGPROBS)]
    cases = sampling.cases(SMALL.vocab_size)
    for case, features in zip(cases, wanted, strict=True):
        state, asked = sampling._admitted(case, SMALL)
        assert int(asked) == bits(*features) | sum(processor_bits(case.processors)), case.name
        assert (case.processors == (THINKING,)) == (case.name == "thinking budget")
        assert state["finished"].tolist() == [True, False, False]
        temperature = case.options.get("temperature", 0.0)
        assert (temperature > 0) == (RANDOM in features)
        assert np.unique(state["temperature"][1:]).tolist() == [np.float32(temperature)]


def test_the_made_up_tokenizer_has_the_size_asked_for_and_spells_any_text():
    tokenizer = sampling.make_tokenizer(3000)
    assert len(tokenizer) == 3000
    text = 'the rest is {"age": 41}, für später'
    ids = tokenizer.encode(text)
    assert len(ids) < len(text.encode()) and tokenizer.decode(ids) == text


def test_medians_are_compared_with_the_plain_step_and_with_the_floor():
    report = {
        "rows": 2,
        "vocab_size": 1024,
        "context": 8,
        "device": "abacus",
        "bandwidth": sampling.WEIGHT_BYTES * 100,  # 10 ms
        "milliseconds": {"greedy": [9.0, 1.0, 2.0], "random": [5.0]},
        "microseconds": {"regex": [7.0] * 99 + [70.0]},
    }
    lines = [line.split() for line in sampling.show(report).splitlines()]
    assert ["greedy", "2.00", "20.0", "%"] in lines
    assert ["random", "5.00", "3.00", "50.0", "%"] in lines
    assert lines[-1] == ["regex", "7", "8"]


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"rows": 0}, "--rows must be at least 1, got 0"),
        ({"context": 1}, "--context must be at least 2, got 1"),
        ({"masks": 0}, "--masks must be at least 1, got 0"),
        ({"vocab_size": 500}, "--vocab-size must be at least 1024, got 500"),
    ],
)
def test_sizes_that_measure_nothing_are_refused(sizes, told):
    with pytest.raises(ValueError, match=f"^{told}$"):
        sampling.measure(SamplingBench(**sizes))


@pytest.mark.slow
def test_everything_is_timed_and_written(tmp_path, capsys):
    path = tmp_path / "times.json"
    sampling.main(SamplingBench(tiny=True, json=path))
    report = json.loads(path.read_text())
    names = [case.name for case in sampling.cases(report["vocab_size"])]
    assert list(report["milliseconds"])[: len(names)] == names and report["bandwidth"] > 0
    assert [len(times) for times in report["milliseconds"].values()] == [2] * (len(names) + 2)
    assert [len(times) for times in report["microseconds"].values()] == [20, 20]
    assert min(min(t) for key in ("milliseconds", "microseconds") for t in report[key].values()) > 0
    assert capsys.readouterr().out.strip() == sampling.show(report)
