"""Latency of one batch: what is asked of the engine, and what is said of its times."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from jaxpage import cli
from jaxpage.bench import engines, latency
from jaxpage.bench.latency import LatencyBench
from jaxpage.demo import checkpoint
from jaxpage.flags import EngineFlags, check_writable


@pytest.fixture
def made(monkeypatch):
    """Engines that take a second more at each call."""
    found = []

    class StubLLM:
        def __init__(self, model, **options):
            self.options, self.calls = options, []
            found.append(self)

        def wait_until_warm(self):
            self.is_warm = True

        def generate(self, prompts, params, use_tqdm):
            assert self.is_warm
            self.calls.append((prompts, params))
            clock.append(clock[-1] + len(self.calls))
            answer = SimpleNamespace(token_ids=[1] * params[0].max_tokens)
            return [SimpleNamespace(outputs=[answer]) for _ in prompts]

    clock = [0.0]
    monkeypatch.setattr(engines.time, "perf_counter", lambda: clock[-1])
    monkeypatch.setattr("jaxpage.llm.LLM", StubLLM)
    return found


def test_percentiles_are_of_the_iterations_that_count(made):
    bench = LatencyBench(
        model=checkpoint(),
        input_len=5,
        output_len=3,
        batch_size=2,
        num_iters_warmup=2,
        num_iters=11,
        engine=EngineFlags(decode_steps=1),
    )
    report = latency.measure(bench)
    assert report["latencies"] == [float(i) for i in range(3, 14)]
    assert report["avg_latency"] == 8.0
    assert report["percentiles"] == pytest.approx(
        {"10": 4.0, "25": 5.5, "50": 8.0, "75": 10.5, "90": 12.0, "99": 12.9}
    )
    (llm,) = made
    assert llm.options == {
        "max_model_len": 8,
        "max_num_seqs": 2,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "decode_steps": 1,
    }
    for prompts, params in llm.calls:
        assert [len(p["prompt_token_ids"]) for p in prompts] == [5, 5]
        assert [(p.max_tokens, p.ignore_eos) for p in params] == [(3, True)] * 2
    lines = latency.show(report).splitlines()
    assert lines[0] == "Avg latency: 8.0000 seconds"
    assert lines[-1] == "99% percentile latency: 12.9000 seconds" and len(lines) == 8


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--batch-size 0", "--batch-size must be at least 1, got 0"),
        ("--num-iters 0", "--num-iters must be at least 1, got 0"),
        ("--num-iters-warmup -1", "--num-iters-warmup must be at least 0, got -1"),
        ("--json nowhere/x.json", "--json nowhere/x.json cannot be written: No such file"),
        ("--json .", "--json . cannot be written: Is a directory"),
    ],
)
def test_what_cannot_be_measured_or_written_is_refused(made, capsys, flags, told):
    command = f"bench latency --model {checkpoint()} {flags}"
    assert cli.main(command.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"jaxpage: {told}") and error.count("\n") == 1 and made == []


def test_a_link_to_a_file_in_no_folder_is_refused(tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "nowhere" / "x.json")
    with pytest.raises(ValueError, match="link.json cannot be written: No such file"):
        check_writable(link)
    (tmp_path / "nowhere").mkdir()
    check_writable(link)
    assert list((tmp_path / "nowhere").iterdir()) == []


@pytest.mark.slow
def test_a_real_engine(tmp_path, capsys):
    path = tmp_path / "times.json"
    command = f"bench latency --model {checkpoint()} --input-len 8 --output-len 4 --batch-size 2"
    command += " --max-num-batched-tokens 16"  # fewer programs
    drafts = ["--speculative-config", '{"num_speculative_tokens": 2, "prompt_lookup_max": 1}']
    assert (
        cli.main([*f"{command} --num-iters-warmup 1 --num-iters 3 --json {path}".split(), *drafts])
        == 0
    )
    found = json.loads(path.read_text())
    assert len(found["latencies"]) == 3 and all(s > 0 for s in found["latencies"])
    shown = capsys.readouterr().out
    assert "50% percentile latency: " in shown
    assert f"Accepted drafts: {found['drafts']['num_accepted']} of " in shown
