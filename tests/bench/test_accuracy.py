"""The accuracy benchmark: distances that one can check by hand, and the real thing on a few questions."""

from __future__ import annotations

import json
import logging
import math
from types import SimpleNamespace

import pytest

from jaxpage.bench import accuracy
from jaxpage.bench.accuracy import KV_DTYPES, AccuracyBench
from jaxpage.outputs import Logprob
from tests.few_programs import few_programs

VOCAB = 4


class Engine:
    """Its next token is the sum of all tokens so far, modulo 4; of the others it thinks less, by `spread` a place."""

    def __init__(self, spread: float):
        self.spread = spread

    def next_logprobs(self, token_ids: list[int]) -> dict[int, float]:
        places = [-self.spread * ((i - sum(token_ids)) % VOCAB) for i in range(VOCAB)]
        total = math.log(sum(map(math.exp, places)))
        return {token_id: place - total for token_id, place in enumerate(places)}

    def generate(self, prompts, params, use_tqdm):
        outputs = []
        for prompt in prompts:
            token_ids, rows = [], []
            for _ in range(params.max_tokens):
                logprobs = self.next_logprobs([*prompt, *token_ids])
                best = sorted(logprobs, key=logprobs.__getitem__, reverse=True)
                token_ids.append(best[0])
                kept = best if params.logprobs == -1 else best[: params.logprobs]
                rows.append({i: Logprob(logprob=logprobs[i]) for i in kept})
            completion = SimpleNamespace(token_ids=token_ids, logprobs=rows)
            outputs.append(SimpleNamespace(outputs=[completion]))
        return outputs


def test_every_prefix_of_the_continuations_is_asked_about(monkeypatch):
    monkeypatch.setattr(accuracy, "NUM_BEST", 2)
    asked = accuracy.prefixes(Engine(1.0), [[1], [1, 1]], num_tokens=3)
    token_ids = [prefix for prefix, _ in asked]
    assert token_ids == [[1], [1, 1], [1, 1, 2], [1, 1], [1, 1, 2], [1, 1, 2, 0]]
    assert [set(likely) for _, likely in asked[:3]] == [{1, 2}, {2, 3}, {0, 1}]
    assert accuracy.distances(Engine(1.0), asked) == {"max": 0.0, "mean": 0.0}


def test_distances_are_those_of_the_same_ids_after_the_same_prefixes(monkeypatch):
    """The engine of another pool would choose alike, so only its confidence differs."""
    spreads = {kv_cache_dtype: 1.0 + 0.1 * i for i, kv_cache_dtype in enumerate(KV_DTYPES)}
    monkeypatch.setattr(accuracy, "NUM_BEST", 2)
    monkeypatch.setattr(
        accuracy, "LLM", lambda *_, **options: Engine(spreads[options["kv_cache_dtype"]])
    )
    found = accuracy.differences({}, AccuracyBench(num_tokens=2))
    assert list(found) == list(KV_DTYPES)
    for kv_cache_dtype, spread in spreads.items():
        ours, theirs = (Engine(s).next_logprobs([0]) for s in (spread, 1.0))
        distances = [abs(ours[token_id] - theirs[token_id]) for token_id in (0, 1)]
        assert found[kv_cache_dtype]["max"] == pytest.approx(max(distances))
        assert found[kv_cache_dtype]["mean"] == pytest.approx(sum(distances) / 2)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"questions": 0}, "--questions must be at least 1, got 0"),
        ({"num_tokens": 0}, "--num-tokens must be at least 1, got 0"),
        ({"suites": ("look-up 8", "chess")}, r"no suite \['chess'\]; there are look-up 1,"),
    ],
)
def test_what_measures_nothing_is_refused(options, match):
    with pytest.raises(ValueError, match=match):
        accuracy.measure(AccuracyBench(**options))


@pytest.mark.slow
def test_everything_is_measured_printed_and_written(monkeypatch, tmp_path, capsys, caplog):
    """And an int8 pool loses no look-up."""
    caplog.set_level(logging.WARNING, "jaxpage")  # as `main` does, but for this test only
    monkeypatch.setattr(accuracy, "KV_DTYPES", ("auto", "int8", "int4"))
    gemma = accuracy.FAMILIES["Gemma 3"]
    gemma = gemma | {"num_hidden_layers": 3, "layer_types": gemma["layer_types"][:3]}
    monkeypatch.setattr(accuracy, "FAMILIES", {"Gemma 3": gemma})
    path = tmp_path / "report.json"
    with few_programs():
        accuracy.main(AccuracyBench(questions=15, suites=("look-up 8",), num_tokens=4, json=path))
    report = json.loads(path.read_text())
    assert capsys.readouterr().out.strip() == accuracy.show(report)
    found = report["results"].values()
    exact, int8, int4 = (x["accuracy"]["look-up 8"] for x in found)
    assert int8 >= exact >= 0.95 > int4
    exact, int8, int4 = (x["differences"]["Gemma 3"]["max"] for x in found)
    assert exact < 1e-3 < int8 < 0.5 and 4 * int8 < int4
