"""Throughput with adapters: what the two engines are asked, and what is said of their times."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from jaxpage import cli
from jaxpage.bench import engines, lora, workloads
from jaxpage.bench.lora import LoraBench
from jaxpage.demo import checkpoint
from jaxpage.weights.peft import AdaptedLayers, read_adapter
from jaxpage.weights.safetensors import open_checkpoint

SMALL = {"num_adapters": 2, "rank": 3, "batch_size": 5, "input_len": 4, "output_len": 6}


@pytest.fixture
def made(monkeypatch):
    """Engines that take 8 seconds a call without adapters, and 10 with them."""
    found = []

    class StubLLM:
        def __init__(self, model, **options):
            self.options, self.calls, self.loras, self.is_warm = options, [], [], False
            found.append(self)

        def add_lora(self, request):
            self.loras.append(request)

        def wait_until_warm(self):
            self.is_warm = True

        def generate(self, prompts, params, use_tqdm, lora_request):
            assert self.is_warm
            self.calls.append((prompts, lora_request))
            clock.append(clock[-1] + (10 if lora_request else 8))
            answer = SimpleNamespace(token_ids=[1] * params[0].max_tokens)
            return [SimpleNamespace(outputs=[answer]) for _ in prompts]

    clock = [0.0]
    for module in (engines, workloads):
        monkeypatch.setattr(module.time, "perf_counter", lambda: clock[-1])
    monkeypatch.setattr("jaxpage.LLM", StubLLM)
    return found


def test_both_engines_answer_the_same_requests(made):
    report = lora.measure(LoraBench(model=checkpoint(), rounds=3, **SMALL))
    assert report["seconds"] == {"no adapters": [8.0] * 3, "adapters": [10.0] * 3}
    assert report["tokens_per_second"] == pytest.approx({"no adapters": 30 / 8, "adapters": 3.0})
    assert report["ratio"] == pytest.approx(0.8)
    plain, adapted = made
    assert "enable_lora" not in plain.options and plain.loras == []
    assert adapted.options["max_loras"] == 2 and adapted.options["max_lora_rank"] == 3
    assert [prompts for prompts, _ in plain.calls] == [prompts for prompts, _ in adapted.calls]
    assert {numbers for _, numbers in plain.calls} == {None}
    assert [r.lora_int_id for r in adapted.calls[0][1]] == [1, 2, 1, 2, 1]
    assert "with adapters: 0.80 of the throughput without" in lora.show(report)


def test_the_adapters_are_whole(tmp_path):
    """Every linear layer of attention and MLP has both halves."""
    folder = checkpoint()
    ends = tuple(f".{name}.weight" for name in lora._TARGETS)
    tensors = open_checkpoint(folder).items()
    shapes = {n.removesuffix(".weight"): x.shape for n, x in tensors if n.endswith(ends)}
    path = lora.save_adapter(tmp_path / "a", folder, 3, seed=1)
    read = read_adapter(str(path), AdaptedLayers(shapes=shapes, rename=lambda n: n), max_rank=3)
    assert set(read) == set(shapes) and len(shapes) % 7 == 0
    assert all(half.a.any() and half.b.any() for half in read.values())


def test_sizes_and_options_are_checked(made, capsys):
    with pytest.raises(ValueError, match="--rank must be at least 1, got 0"):
        lora.measure(LoraBench(model=checkpoint(), **SMALL | {"rank": 0}))
    assert cli.main(["bench", "lora", "--model", str(checkpoint()), "--options", "[1]"]) == 2
    assert "options must be a JSON object" in capsys.readouterr().err


def test_times_go_to_a_file(made, tmp_path, capsys):
    file = tmp_path / "times.json"
    arguments = ["--model", str(checkpoint()), "--json", str(file), "--rounds", "2"]
    assert not cli.main(["bench", "lora", *arguments])
    assert json.loads(file.read_text())["ratio"] == pytest.approx(0.8)
    assert "output tokens/s" in capsys.readouterr().out
