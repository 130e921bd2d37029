"""The offline comparison: what is asked of the engines, what is made of their answers."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest

from jaxpage.bench import offline
from jaxpage.bench.offline import OfflineBench
from jaxpage.bench.peers import Options, PeerProcess, Work

OPTIONS = Options(threads=1, max_model_len=64, max_num_seqs=2, prefix_caching=False)
WORK = Work(prompts=[[3, 4, 5]], num_tokens=[2], static_batch=1)


def script(tmp_path: Path, reply: str) -> str:
    """A Python that is none: it answers each line of the pipe with `reply`."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\nwhile read line; do echo '{reply}'; done\n")
    path.chmod(0o755)
    return str(path)


def by_name(scale: float = 1.0) -> dict[str, offline.Workload]:
    return {w.name: w for w in offline.workloads(vocab_size=512, scale=scale)}


@pytest.mark.parametrize("name", by_name())
@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_every_request_fits_the_engines_limits(name, scale):
    for work in by_name(scale)[name].make(random.Random(0)):
        assert len(work.prompts) == len(work.num_tokens) >= 1
        for prompt, num_tokens in zip(work.prompts, work.num_tokens, strict=True):
            assert len(prompt) >= 1 and num_tokens >= 1
            assert len(prompt) + num_tokens <= offline.MAX_MODEL_LEN
            assert 3 <= min(prompt) and max(prompt) < 512
        assert 1 <= work.static_batch <= offline.MAX_NUM_SEQS


def test_decode_time_is_the_difference_of_a_long_and_a_short_run():
    workload = by_name()["decode-8"]
    short, long = workload.make(random.Random(0))
    assert (short.num_tokens, long.num_tokens) == ([1] * 8, [33] * 8)
    assert short.prompts != long.prompts, "a prefix cache must not help the second run"
    assert workload.value([short, long], [2.0, 5.2]) == pytest.approx(100.0)  # 3.2 s, 32 steps
    assert workload.speedup(ours=50.0, theirs=100.0) == 2.0


def test_throughput_counts_only_the_tokens_that_were_asked_for():
    workload = by_name()["mixed"]
    works = workload.make(random.Random(0))
    assert workload.value(works, [2.0]) == sum(works[0].num_tokens) / 2
    assert workload.speedup(ours=100.0, theirs=50.0) == 2.0
    lengths = [len(p) for p in works[0].prompts]
    assert len(lengths) == 64 and 16 <= min(lengths) < 40 < 200 < max(lengths) <= 512


def test_shared_prefix_is_shared_and_the_rest_is_not():
    (work,) = by_name()["shared-prefix"].make(random.Random(0))
    assert len({tuple(p[:512]) for p in work.prompts}) == 1
    assert len({tuple(p[512:]) for p in work.prompts}) == len(work.prompts)


def test_an_answer_with_too_few_tokens_is_an_error(tmp_path):
    with PeerProcess("jaxpage", script(tmp_path, '{"answer": [0.5, 1]}')) as peer:
        with pytest.raises(RuntimeError, match="1 tokens instead of 2"):
            peer.run(WORK)


def test_a_peers_own_error_is_shown(tmp_path):
    with PeerProcess("jaxpage", script(tmp_path, '{"error": "no such folder"}')) as peer:
        with pytest.raises(RuntimeError, match="no such folder"):
            peer.setup(tmp_path, OPTIONS)


def test_a_dead_peer_is_reported_with_its_status(tmp_path):
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\nread line\nexit 7\n")
    path.chmod(0o755)
    with PeerProcess("jaxpage", str(path)) as peer:
        with pytest.raises(RuntimeError, match="status 7"):
            peer.run(WORK)


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="transformers-generate"):
        PeerProcess("fastest")
    with pytest.raises(ValueError, match="decode-32"):
        offline.measure(bench(tmp_path, workloads=("encode",)), [])


def bench(tmp_path: Path, **options) -> OfflineBench:
    sizes = {"shape": "tiny", "scale": 0.03, "rounds": 2, "threads": 1}
    return OfflineBench(cache_dir=tmp_path, **(sizes | options))


@pytest.mark.slow
def test_jaxpage_is_a_peer_and_can_be_set_up_again(tmp_path):
    folder, _ = offline.checkpoint(bench(tmp_path))
    with PeerProcess("jaxpage") as peer:
        for prefix_caching in (False, True):
            options = dataclasses.replace(OPTIONS, prefix_caching=prefix_caching)
            assert peer.setup(folder, options)["jax"].startswith("0.")
            assert peer.run(Work(prompts=[[3, 4], [5]], num_tokens=[1, 9], static_batch=1)) > 0


@pytest.mark.slow
def test_transformers_both_ways_in_turns(tmp_path):
    report = offline.measure(
        bench(tmp_path, workloads=("decode-1", "mixed", "shared-prefix")),
        ["transformers-generate", "transformers-continuous"],
    )
    assert [r["workload"] for r in report["results"]] == ["decode-1", "mixed", "shared-prefix"]
    for result in report["results"]:
        for name in ("transformers-generate", "transformers-continuous"):
            assert len(result["seconds"][name]) == len(result["values"][name]) == 2
            assert all(s > 0 for run in result["seconds"][name] for s in run)
            assert report["versions"][name]["torch"].startswith("2.")
        assert list(result["speedup"]) == ["transformers-continuous"]
    assert json.loads(json.dumps(report))["results"] == report["results"]
    assert len(offline.table(report).splitlines()) == 4
