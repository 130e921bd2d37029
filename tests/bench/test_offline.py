"""The offline comparison: what is asked of the engines, what is made of their answers."""

from __future__ import annotations

import json
import random
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import tyro
from safetensors.numpy import load_file

from jaxpage import tiny
from jaxpage.bench import llama, offline, peaks
from jaxpage.bench.engines import Work
from jaxpage.bench.offline import OfflineBench
from jaxpage.bench.workloads import UNCACHED, Workload, run_interleaved, workloads


def by_name(scale: float = 1.0) -> dict[str, Workload]:
    return workloads(vocab_size=512, scale=scale)


@pytest.mark.parametrize("name", by_name())
@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_every_request_fits_the_engines_limits(name, scale):
    workload = by_name(scale)[name]
    options = workload.options
    for work in workload.make(random.Random(0)):
        assert len(work.prompts) == len(work.num_tokens) >= 1
        for prompt, num_tokens in zip(work.prompts, work.num_tokens, strict=True):
            assert len(prompt) >= 1 and num_tokens >= 1
            assert len(prompt) + num_tokens <= options.max_model_len
            assert 3 <= min(prompt) and max(prompt) < 512
        assert 1 <= work.static_batch <= options.max_num_seqs


def test_decode_time_is_the_difference_of_a_long_and_a_short_run():
    workload = by_name()["decode-8"]
    short, long = workload.make(random.Random(0))
    assert (short.num_tokens, long.num_tokens) == ([1] * 8, [33] * 8)
    assert {len(prompt) for prompt in short.prompts + long.prompts} == {256}
    assert short.prompts != long.prompts, "a prefix cache must not help the second run"
    assert workload.value([short, long], [2.0, 5.2]) == pytest.approx(100.0)  # 3.2 s, 32 steps
    assert workload.speedup(ours=50.0, theirs=100.0) == 2.0


def test_prefill_counts_the_tokens_of_the_prompts():
    workload = by_name()["prefill-8"]
    works = workload.make(random.Random(0))
    assert works[0].num_tokens == [1] * 8
    assert workload.value(works, [2.0]) == 8 * 256 / 2


def test_throughput_counts_only_the_tokens_that_were_asked_for():
    workload = by_name()["mixed"]
    works = workload.make(random.Random(0))
    assert workload.value(works, [2.0]) == sum(works[0].num_tokens) / 2
    assert workload.speedup(ours=100.0, theirs=50.0) == 2.0
    lengths = [len(p) for p in works[0].prompts]
    assert len(lengths) == 64 and 16 <= min(lengths) < 40 < 200 < max(lengths) <= 512
    assert 8 <= min(works[0].num_tokens) < 20 < 100 < max(works[0].num_tokens) <= 256


def test_questions_share_their_table_and_no_round_has_seen_it():
    workload = by_name()["questions"]
    (work,), (other,) = (workload.make(random.Random(seed)) for seed in (0, 1))
    assert len(work.prompts) == 32
    assert len({tuple(p[:1500]) for p in work.prompts}) == 1
    assert len({tuple(p[1500:]) for p in work.prompts}) == 32
    assert work.prompts[0][:16] != other.prompts[0][:16]
    assert workload.options.enable_prefix_caching and workload.also == (UNCACHED,)


@pytest.mark.parametrize("words", ["transformers,vllm", "transformers vllm"])
def test_lists_may_have_commas_or_spaces(words):
    bench = tyro.cli(OfflineBench, args=["--compare", *words.split()])
    assert offline.split(bench.compare) == ["transformers", "vllm"]


def test_an_engine_may_have_a_python_of_its_own():
    python = offline.pythons(["vllm=/a/python,llama.cpp=/b/python"])
    assert (python["vllm"], python["llama.cpp"]) == ("/a/python", "/b/python")
    assert python["jaxpage"] == python["transformers"]
    for wrong in ("/a/python", "vllm=", "jaxpage-int8=/a/python"):
        with pytest.raises(ValueError, match=r"ENGINE one of jaxpage, .*vllm.*; got"):
            offline.pythons([wrong])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(offline, "CACHE", tmp_path)


def bench(**options) -> OfflineBench:
    sizes = {"shape": "tiny", "scale": 0.03, "rounds": 2, "threads": 1}
    return OfflineBench(**(sizes | options))


@pytest.mark.slow
def test_unknown_names_and_engines_that_are_not_there_are_refused(monkeypatch):
    monkeypatch.setattr(peaks, "memory_bandwidth", lambda threads: {"copy": 4e9, "read": 2e9})
    with pytest.raises(ValueError, match="fastest.*transformers, vllm"):
        offline.main(bench(compare=("fastest",)))
    with pytest.raises(ValueError, match="vllm: .*--python vllm="):
        offline.main(bench(compare=("vllm",)))
    with pytest.raises(ValueError, match="/no/python is not an executable Python"):
        offline.main(bench(compare=("vllm",), python=("vllm=/no/python",)))


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ({"scale": 0.0}, "--scale must be a finite number above 0, got 0.0"),
        ({"scale": float("inf")}, "--scale must be a finite number above 0, got inf"),
        ({"rounds": 0}, "--rounds must be at least 1, got 0"),
        ({"python": ("x",)}, "python must be ENGINE=EXECUTABLE"),
        ({"workloads": ("encode",)}, r"no workload \['encode'\]; .*decode-32.*questions"),
    ],
)
def test_bad_flags_are_refused_before_a_checkpoint_is_written(flag, told, monkeypatch):
    monkeypatch.setattr(offline, "checkpoint", lambda *args: pytest.fail("written"))
    with pytest.raises(ValueError, match=told):
        offline.measure(OfflineBench(**flag), ["jaxpage"])


def test_rounds_alternate_and_the_first_does_not_count():
    calls = []
    works = [[Work(prompts=[[i]], num_tokens=[1], static_batch=1)] for i in range(3)]

    def runner(name):
        return lambda work: calls.append((name, work)) or float(work.prompts[0][0])

    found = run_interleaved({"a": runner("a"), "b": runner("b")}, works)
    assert "".join(name for name, _ in calls) == "baabba"
    assert [work for _, work in calls] == [works[i][0] for i in (0, 0, 1, 1, 2, 2)]
    assert found == {"a": [[1.0], [2.0]], "b": [[1.0], [2.0]]}
    found = run_interleaved({"a": runner("a")}, works, time_limit=0)
    assert found == {"a": [[1.0]]}


def test_every_peer_gets_the_same_work_in_turns(tmp_path, monkeypatch):
    asked = []

    class StubProcess:
        def __init__(self, name, python, threads):
            self.name = name

        def __enter__(self):
            return self

        def __exit__(self, *_):
            asked.append((self.name, "end"))

        def setup(self, folder, options):
            asked.append((self.name, options))
            return {"version": "1"}

        def run(self, work):
            asked.append((self.name, work))
            return {"jaxpage": 1.0, UNCACHED: 8.0}.get(self.name, 2.0) * sum(work.num_tokens)

    monkeypatch.setattr(offline, "PeerProcess", StubProcess)
    monkeypatch.setattr(peaks, "memory_bandwidth", lambda threads: {"copy": 4e9, "read": 2e9})
    peers = ["jaxpage", "transformers-generate"]
    report = offline.measure(bench(workloads=("decode-8,questions",), rounds=1), peers)

    decode, questions = report["results"]
    assert decode["speedup"] == {"transformers-generate": 2.0}
    assert questions["speedup"] == {"transformers-generate": 2.0, UNCACHED: 8.0}
    work_of = {name: [x for n, x in asked if n == name and hasattr(x, "prompts")] for name in peers}
    assert work_of["jaxpage"] == work_of["transformers-generate"]
    assert len(work_of["jaxpage"]) == 2 * (2 + 1)  # the round that is not counted, and one
    names = [name for name, x in asked if x == "end"]
    assert names == [*peers[::-1], UNCACHED, *peers[::-1]], "one set of processes for each options"

    first, _, row, memory, steps = offline.show(report).splitlines()
    assert first.split() == ["workload", "unit", *peers, UNCACHED]
    assert row.split()[0] == "questions" and row.endswith("(8.00x)")
    assert "4.0 GB/s" in memory
    once = report["weight_bytes"] / 4e9 * 1e3
    assert f"jaxpage {8e3 / once:.2f}, transformers-generate {16e3 / once:.2f}" in steps


def test_the_weights_of_a_step_leave_out_an_embedding_that_is_only_looked_up(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    config = {"vocab_size": 10, "hidden_size": 5}
    assert offline.weight_bytes(tmp_path, config) == 1000 - 2 * 10 * 5
    assert offline.weight_bytes(tmp_path, config | {"tie_word_embeddings": True}) == 1000


def test_bandwidth_is_bytes_over_seconds_of_all_threads(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(peaks.time, "perf_counter", lambda: next(clock))
    found = peaks.memory_bandwidth(2, num_bytes=1600, repeats=3)
    assert found == {"copy": 2 * 1600, "read": 1600}


def test_a_checkpoint_becomes_gguf(tmp_path, monkeypatch):
    """Bits of bfloat16, and vectors in float32. The names are the business of the library, which is not here."""
    written = {}

    def add_tensor(name, tensor, raw_dtype=None):
        written[name] = (tensor, raw_dtype)

    names = SimpleNamespace(get_name=lambda name, try_suffixes: name)
    gguf = MagicMock(get_tensor_name_map=lambda *_: names)
    gguf.GGUFWriter.return_value.add_tensor = add_tensor
    gguf.GGMLQuantizationType.BF16 = "BF16"
    monkeypatch.setitem(sys.modules, "gguf", gguf)
    folder = tiny.write_checkpoint(tmp_path / "tiny", tiny.TINY_CONFIG)
    llama.write_gguf(folder, tmp_path / "gguf")
    wanted = load_file(folder / "model.safetensors")
    assert written.keys() == wanted.keys()
    for name, (tensor, kind) in written.items():
        array = wanted[name]
        expected = array.astype(np.float32) if array.ndim == 1 else array.view(np.uint8)
        np.testing.assert_array_equal(tensor, expected)
        assert kind == (None if array.ndim == 1 else "BF16")


@pytest.mark.slow
def test_transformers_both_ways_in_turns():
    names = ["transformers-generate", "transformers-continuous"]
    report = offline.measure(bench(workloads=("decode-1",)), names)
    assert [r["workload"] for r in report["results"]] == ["decode-1"]
    for result in report["results"]:
        for name in names:
            assert len(result["seconds"][name]) == len(result["values"][name]) == 2
            assert all(s > 0 for run in result["seconds"][name] for s in run)
            assert report["versions"][name]["torch"].startswith("2.")
        assert list(result["speedup"]) == ["transformers-continuous"]
    assert json.loads(json.dumps(report))["results"] == report["results"]
    assert len(offline.table(report["results"]).splitlines()) == 2
