"""The suite: verdicts, parts in processes of their own, whatever becomes of them, and every part at tiny sizes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file

from jaxpage import cli, tiny
from jaxpage.bench import (
    attention,
    attention_peers,
    delta_rule,
    device_time,
    kernels,
    oracle,
    peaks,
    results,
    serving,
    suite,
)
from jaxpage.bench.attention_peers import Peer
from jaxpage.bench.engines import Options, TransformersContinuous
from jaxpage.bench.results import Bar, Context, failed, measured, missing
from jaxpage.bench.subprocess_rpc import RemoteObject
from jaxpage.bench.suite import SuiteBench
from pallas_kernels.kv_write.quantized import FORMATS
from pallas_kernels.paged_attention import cases, reference
from pallas_kernels.paged_attention.cases import Case

HERE = "tests.bench.parts"


def test_a_bar_has_a_direction_and_nan_passes_none():
    assert Bar(">=", 0.8).holds(0.8) and not Bar(">=", 0.8).holds(0.79)
    assert Bar("<=", 8).holds(8.0) and not Bar("<=", 8).holds(8.1)
    assert not Bar("<=", 8).holds(math.nan) and not Bar(">=", 8).holds(math.nan)
    assert str(Bar("<=", 1e-2)) == "<= 0.01"


def test_a_bar_for_an_h200_gives_no_verdict_elsewhere():
    bar = Bar(">=", 0.8)
    here = measured("share", 0.1, "", bar, device="NVIDIA A100")
    assert here.passed is None and "H200" in str(here.reason) and "A100" in str(here.reason)
    assert measured("share", 0.9, "", bar, device="NVIDIA H200").passed is True
    assert measured("share", 0.1, "", bar, device="NVIDIA H200").passed is False
    assert measured("error", 0.9, "", bar).passed is True  # right is right everywhere
    assert measured("time", 3.0, "ms").passed is None


def test_a_result_says_in_a_line_what_it_is():
    line = str(measured("share", 0.123456, "x", Bar(">=", 0.8)))
    assert line == "share:  0.1235 x  bar >= 0.8  FAILED"
    assert str(missing("peer", "us", "no torch")) == "peer:  no torch"
    assert str(failed("part", "boom")) == "part:  FAILED: boom"


def test_the_table_has_all_bars_and_failures_and_nothing_else():
    rows = [
        measured("share", 0.9, "x", Bar(">=", 0.8)),
        measured("time", 3.0, "ms"),
        missing("peer", "us", "no torch"),
        missing("ratio", "x", "nothing to compare with", Bar(">=", 1.0)),
        failed("rest", "boom"),
    ]
    text = results.table_of_bars([("p", row) for row in rows])
    assert [line.split("  ")[0] for line in text.splitlines()[1:]] == [
        "p: share",
        "p: ratio",
        "p: rest",
    ]
    assert "no verdict: nothing to compare with" in text and "FAILED: boom" in text


def test_errors_are_told_in_one_line():
    assert results.error_summary(ValueError("first\nsecond")) == "ValueError: first"
    assert (
        results.error_summary(RuntimeError("ValueError: first\ntraceback")) == "ValueError: first"
    )
    assert (
        results.error_summary(ValueError()) == "ValueError:"
        and results.error_summary(RuntimeError()) == "no message"
    )
    assert len(results.error_summary(ValueError("x" * 1000))) < 400


def test_a_child_answers_and_tells_its_errors():
    with RemoteObject("collections:deque") as child:
        child.ask("append", 3)
        assert child.ask("count", 3) == 1 and child.ask("pop") == 3
        with pytest.raises(RuntimeError, match="IndexError: pop from an empty deque"):
            child.ask("pop")
        child.ask("append", 4)
        assert child.ask("count", 4) == 1  # it goes on after an error


def test_a_child_gets_its_variables():
    with RemoteObject("os:getcwd", environment={"LC_TEST": "7"}) as child:
        with pytest.raises(RuntimeError, match="'str' object has no attribute 'x'"):
            child.ask("x")
        environment = f"/proc/{child._process.pid}/environ"
        with open(environment, "rb") as file:
            assert b"LC_TEST=7" in file.read().split(b"\0")


def test_a_child_that_is_silent_is_stopped():
    with RemoteObject("threading:Event") as child:
        with pytest.raises(TimeoutError, match="after 0 s"):
            child.ask("wait", timeout=0.2)
        assert child._process.returncode is not None


def test_a_child_that_dies_is_reported_with_its_status():
    with RemoteObject("os:abort") as child:
        with pytest.raises(RuntimeError, match="died with status -6"):
            child.ask("anything")


def fake(monkeypatch, **parts: tuple[str, float]):
    named = {"peaks": ("peaks", 60.0)} | parts
    parts_of = {name: (f"{HERE}:{function}", limit) for name, (function, limit) in named.items()}
    monkeypatch.setattr(suite, "PARTS", parts_of)


@pytest.mark.slow
def test_parts_get_the_peaks_and_results_say_where_they_come_from(monkeypatch, tmp_path, capsys):
    fake(monkeypatch, echo=("echo", 60.0), unwanted=("raises", 60.0))
    path = tmp_path / "new" / "suite.json"
    bench = SuiteBench(json=path, only=("echo",), tiny=True, commit="abc")
    assert suite.main(bench) == 1  # since a bar was missed
    found = json.loads(path.read_text())["results"]
    assert [(r["part"], r["name"], r["value"], r["passed"]) for r in found] == [
        ("peaks", "copy bandwidth", 2.0, None),
        ("peaks", "matrix product rate", 3.0, None),
        ("echo", "bandwidth", 2e9, True),
        ("echo", "rate", 3e12, False),
    ]
    last = found[-1]
    assert last["command"] == "jaxpage bench suite --only echo --tiny"
    assert (last["device"], last["platform"], last["jax"]) == ("cpu", "cpu", jax.__version__)
    assert last["commit"] == "abc" and last["date"].startswith("20") and last["bar"] == "<= 1e+09"
    assert found[2]["details"] == {"tiny": True}
    printed = capsys.readouterr().out
    assert "echo: rate:" in printed and "FAILED" in printed
    assert not list(path.parent.glob("*.part"))


@pytest.mark.slow
def test_a_part_that_fails_keeps_what_it_had_and_the_next_one_runs(monkeypatch, tmp_path):
    fake(
        monkeypatch,
        raises=("raises", 60.0),
        dies=("dies", 60.0),
        hangs=("hangs", 4.0),
        echo=("echo", 0.1),  # nobody waits for the last one
    )
    path = tmp_path / "suite.json"
    assert suite.main(SuiteBench(json=path, tiny=True)) == 1
    found = [r for r in json.loads(path.read_text())["results"] if r["part"] != "peaks"]
    assert [(r["part"], r["name"], r["passed"]) for r in found][:6] == [
        ("raises", "before", None),
        ("raises", "the rest of it", False),
        ("dies", "before", None),
        ("dies", "the rest of it", False),
        ("hangs", "before", None),
        ("hangs", "the rest of it", False),
    ]
    reasons = [r["reason"] for r in found if r["name"] == "the rest of it"]
    assert reasons[0] == "ValueError: no such thing" and "status 3" in reasons[1]
    assert "stopped after 4 s" in reasons[2]
    assert [r["name"] for r in found[6:]] == ["bandwidth", "rate"]


def test_without_time_a_part_is_named_and_not_begun(monkeypatch, tmp_path):
    fake(monkeypatch, raises=("raises", 60.0))
    path = tmp_path / "suite.json"
    assert suite.main(SuiteBench(json=path, time_limit=1)) == 0
    found = json.loads(path.read_text())["results"]
    assert [(r["part"], r["name"], r["passed"]) for r in found] == [
        ("peaks", "all of it", None),
        ("raises", "all of it", None),
    ]
    assert all("1 s were left" in r["reason"] for r in found)


def test_where_jax_sees_no_accelerator_full_sizes_are_not_begun(monkeypatch, tmp_path):
    fake(monkeypatch)
    path = tmp_path / "suite.json"
    assert suite.main(SuiteBench(json=path)) == 1
    (found,) = json.loads(path.read_text())["results"]
    assert found["name"] == "the rest of it" and "no accelerator" in found["reason"]


def test_parts_are_called_by_their_names():
    with pytest.raises(ValueError, match="no part .'speed'.; there are peaks, decode, prefill"):
        suite.main(SuiteBench(only=("speed",)))


def test_launches_follow_one_another_and_are_counted_into_samples():
    seen = []

    def launch(x):
        seen.append(int(x))
        return x + 1

    taken, carry = device_time.seconds(launch, jnp.int32(0), at_least=0.0, samples=4)
    assert len(taken) == 4 and min(taken) > 0
    assert seen == list(range(len(seen))) and int(carry) == len(seen) == 2 + 4
    taken, carry = device_time.seconds(launch, carry, at_least=0.0, samples=4, within=0.0)
    assert len(taken) == 1 and int(carry) == 6 + 2 + 1


@pytest.mark.parametrize("tied", [True, False])
def test_weight_bytes_are_those_of_a_checkpoint(tmp_path, tied):
    config = tiny.TINY_CONFIG | {"tie_word_embeddings": tied}
    folder = tiny.write_checkpoint(tmp_path / "model", config)
    tensors = load_file(folder / "model.safetensors")
    read = [x for name, x in tensors.items() if tied or name != "model.embed_tokens.weight"]
    assert serving.weight_bytes(config) == sum(x.nbytes for x in read)


def test_the_model_is_the_one_of_three_billion():
    assert serving.weight_bytes(serving.QWEN25_3B) == 2 * 3_085_938_688  # its published parameters
    assert serving.kv_bytes(serving.QWEN25_3B) == 36 * 2 * 2 * 128 * 2
    for sizes in (serving.FULL, serving.TINY):
        longest = sizes.context + 8 * (4 + sizes.launches * sizes.windows)
        assert max(longest, sizes.prompt + 1) <= sizes.max_model_len
        assert all((n - 1) % 8 == 0 for n in sizes.num_tokens)  # whole launches


def test_all_kinds_of_attention_are_in_the_table():
    table = kernels.attention_table(tiny=False)
    assert {(c.num_heads, c.num_kv_heads) for c in table} == {(16, 2), (32, 8)}
    assert {c.head_dim for c in table} == {64, 96, 128, 192, 256}
    assert {c.format for c in table} >= {None, "int8", "fp8_e4m3", "int4"}
    assert any(c.window for c in table) and any(c.soft_cap for c in table)
    assert {c.dtype for c in table} == {"bfloat16"}


def context(tmp_path) -> Context:
    return Context(tiny=True, folder=str(tmp_path), bandwidth=1e10, matmul=1e11)


@pytest.mark.slow
def test_every_kernel_is_right_here(tmp_path):
    found = list(kernels.measure(context(tmp_path)))
    assert [str(r) for r in found if r.passed is False] == []
    for operation in kernels.OPERATIONS:
        passed = [r for r in found if r.name.startswith(f"{operation} (xla)") and r.passed]
        assert len(passed) == len([r for r in found if r.name.startswith(f"{operation} (xla)")]) > 0
    absent = {r.name: r.reason for r in found if r.value is None}
    assert absent["paged_attention (gpu)"] == "it needs a GPU; this is a CPU"


@pytest.mark.slow
def test_a_wrong_kernel_does_not_pass(tmp_path, monkeypatch):
    from pallas_kernels.quant_matmul import xla

    right = xla.quant_matmul
    wrong = {"int8": 1.02, "fp8_e4m3": jnp.nan, "int4": 1.0}
    for others in ("attention", "grouped", "copy", "write", "rope"):
        monkeypatch.setattr(kernels, f"_{others}_checks", lambda *_: [])
    monkeypatch.setattr(delta_rule, "checks", lambda *_: [])
    monkeypatch.setattr(
        xla, "quant_matmul", lambda x, w, **options: right(x, w, **options) * wrong[w.format]
    )
    found = {
        r.name: r for r in kernels.measure(context(tmp_path)) if "quant_matmul (xla)" in r.name
    }
    assert {r.name.split()[-1].split("-")[0] for r in found.values() if r.passed} == {"int4"}
    assert found["quant_matmul (xla) fp8"].passed is False


@pytest.mark.slow
@pytest.mark.parametrize("part", [attention.decode, attention.prefill])
def test_attention_is_timed_beside_torch(tmp_path, part):
    found = {r.name: r for r in part(context(tmp_path))}
    assert found["4/2 heads, relative error"].passed is True
    assert found["4/2 heads, our XLA path"].value > 0
    assert any("torch SDPA (flash" in name and r.value > 0 for name, r in found.items())
    assert "needs a GPU" in found["4/2 heads, JAX's Triton kernel"].reason
    (share,) = (r for n, r in found.items() if "share of" in n)
    (best,) = (r for n, r in found.items() if "speed to the best" in n)
    assert share.value > 0 and best.value > 0 and best.details["best"].startswith("torch SDPA")
    decode = part is attention.decode
    assert (share.bar, best.bar) == ((">= 0.85", ">= 1") if decode else (">= 0.6", None))
    assert share.passed is None and "H200" in str(share.reason)


@pytest.mark.slow
def test_long_contexts_and_quantised_pools_are_timed_too(tmp_path):
    found = {r.name: r for r in attention.long(context(tmp_path))}
    names = [name.removesuffix(", relative error") for name in found if "relative" in name]
    assert [name.split()[-1] for name in names] == ["131,072", "32,768", "32,768", "int8", "int4"]
    for name in names:
        assert found[f"{name}, relative error"].passed is True
        assert found[f"{name}, our XLA path"].value > 0
        is_quantised = "int" in name
        assert ("bfloat16" in str(found.get(f"{name}, torch SDPA"))) == is_quantised
    assert any(name.startswith("100 queries") and "torch SDPA (flash)" in name for name in found)


@pytest.mark.slow
def test_a_kernel_that_cannot_run_fails_every_bar_and_says_why(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("no such instruction")

    monkeypatch.setattr(attention_peers, "_ours", lambda *_: Peer("ours", refuse, lambda _: [None]))
    found = list(attention.decode(context(tmp_path)))
    assert [(r.bar, r.passed) for r in found] == [
        (b, False) for b in ("<= 0.01", ">= 0.85", ">= 1")
    ]
    assert {r.reason for r in found} == {"ValueError: no such instruction"}


@pytest.mark.slow
@pytest.mark.parametrize("format", [None, *FORMATS])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float64_reads_pools_of_every_format(format, dtype):
    case = Case(
        name="",
        query_lens=(1, 20, 0, 3),
        kv_lens=(100, 20, 0, 33),
        window=30,
        format=format,
        dtype=dtype,
    )
    arguments = cases.arguments(case)
    out = reference.paged_attention(**arguments)
    error = oracle.worst_row(out, arguments["query_starts"], oracle.attention(arguments))
    assert error < (1e-6 if dtype == "float32" else 5e-3)


@pytest.mark.parametrize("page", ["block_size", "page_size"])
def test_transformers_is_told_its_pages_under_their_name(monkeypatch, page):
    """Until 5.17 and since. A quarter more of them than the requests fill: with few left it takes no new prompts."""
    names = [
        page,
        "num_blocks",
        "max_batch_tokens",
        "max_requests_per_batch",
        "allow_block_sharing",
    ]
    config = dataclasses.make_dataclass("Config", [(name, int, 16) for name in names])
    seen = []
    module = SimpleNamespace(ContinuousBatchingConfig=config, GenerationConfig=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "transformers", module)

    def begin(generation_config, continuous_batching_config):
        seen.append(continuous_batching_config)
        return SimpleNamespace(start=lambda: None)

    model = SimpleNamespace(
        device=SimpleNamespace(type="cpu"),
        init_continuous_batching=begin,
    )
    options = Options(max_model_len=65, max_num_seqs=4, enable_prefix_caching=False)
    for device in ("cuda", "cpu"):  # their default, and 64 tokens
        model.device.type = device
        TransformersContinuous().start(model, options)
    assert [dataclasses.astuple(c)[:2] for c in seen] == [
        (16, 4 * 5 * 5 // 4),
        (64, 4 * 2 * 5 // 4),
    ]


@pytest.mark.slow
def test_a_table_is_found_again(tmp_path):
    first, second, ratio = serving.table(context(tmp_path))
    assert min(first.value, second.value) > 0 and ratio.value == second.value / first.value
    assert ratio.details["cached_tokens"] == 96  # of 100, in whole blocks of 16
    assert ratio.bar == "<= 0.25" and ratio.passed is None


@pytest.mark.slow
def test_steps_are_timed_and_transformers_does_the_same_work(tmp_path):
    found = {r.name: r for r in serving.steps(context(tmp_path))}
    step, over = (
        found[f"decode step, batch 4{more}"]
        for more in ("", ", time over that of reading weights and KV")
    )
    assert step.value > 0 and step.details["tokens_per_second"] == 4 / (step.value / 1e3)
    assert over.value == pytest.approx(step.value / 1e3 / (over.details["bytes"] / 1e10))
    context_length = step.details["context"]
    assert 32 < context_length < 32 + 8 * 7
    config = tiny.TINY_CONFIG
    assert over.details["bytes"] == serving.weight_bytes(config) + round(
        4 * context_length * serving.kv_bytes(config)
    )
    ratio = found["decode rate to transformers' continuous batching, batch 4"]
    assert ratio.bar == ">= 3"
    if ratio.value is None:  # on a busy machine, such short runs
        assert "the longer run did not take longer" in str(ratio.reason)
    else:
        assert ratio.value > 0 and [len(t) for t in ratio.details["seconds"].values()] == [1, 1]


@pytest.mark.slow
def test_starts_are_held_to_their_bars_one_by_one(tmp_path, monkeypatch):
    seen = {}

    def starts(folder, options, threads):
        seen.update(options, config=json.loads((folder / "config.json").read_text()))
        yield "cold", {"first_token": 5.0, "warm": 40.0}
        yield "cached", {"first_token": 3.0, "warm": 9.0}
        raise RuntimeError("ended")

    monkeypatch.setattr(serving, "starts", starts)
    found = serving.warm_up(context(tmp_path))
    cold, cached = next(found), next(found)
    assert (cold.value, cold.bar, cached.value, cached.bar) == (40.0, "<= 60", 9.0, "<= 8")
    assert seen["load_format"] == "dummy" and seen["config"] == tiny.TINY_CONFIG
    assert cached.details["first_token"] == 3.0


@pytest.mark.slow
def test_peaks_are_measured(tmp_path):
    bandwidth, rate = peaks.measure(context(tmp_path))
    assert bandwidth.value > 0 and bandwidth.details["by"] in bandwidth.details["samples"]
    assert rate.value > 0 and rate.unit == "TFLOP/s"


@pytest.mark.slow
def test_the_command_runs_a_part(tmp_path, capsys):
    path = tmp_path / "suite.json"
    assert cli.main(["bench", "suite", "--tiny", "--only", "warm-up", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["results"]
    assert [r["name"] for r in found if r["part"] == "warm-up"] == ["start, cold", "start, cached"]
    assert all(r["commit"] and r["platform"] == "cpu" for r in found)
    assert "no verdict: the bar is for an H200; this is cpu" in capsys.readouterr().out
    assert os.path.getsize(path) > 0
