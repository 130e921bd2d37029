"""`jaxpage plan` with the real compilers, for chips that this machine does not have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from jaxpage import cli
from jaxpage.aot.plan import Plan, main
from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import environment
from jaxpage.aot.worker import Memory, largest_step_bytes
from jaxpage.runner.programs import step_bytes
from tests.aot import tiny
from tests.aot.models import DEEPSEEK_V2_LITE, EXPERTS, QWEN2_5_VL_3B

pytestmark = pytest.mark.aot

NUM_LAYERS, NUM_ROWS = 3, 16
# The logits of all rows are 4 MiB.
CONFIG = tiny.CONFIG | {"vocab_size": 65536, "num_hidden_layers": NUM_LAYERS}
SIZES: dict[str, Any] = {"max_num_seqs": NUM_ROWS, "max_num_batched_tokens": 64}
BLOCK_BYTES = NUM_LAYERS * 2 * 2 * 64 * 2  # of a token: K and V of two KV heads, head dim, bfloat16
INT8_BLOCK_BYTES = BLOCK_BYTES * 68 // 128  # a byte each, and scale and zero for 64 of them


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(autouse=True)
def planned_once(plans, monkeypatch):
    """Tests of the same plan compile it once."""
    monkeypatch.setenv("JAXPAGE_COMPILATION_CACHE_DIR", str(plans))


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def run(config, **options) -> tuple[int, list[dict]]:
    report = config.parent / "report.json"
    code = main(Plan(model=str(config), json=report, **SIZES | options))
    return code, json.loads(report.read_text())


def check_programs(found: dict) -> None:
    names = [program["name"] for program in found["programs"]]
    assert names == [f"layers R={NUM_ROWS}", "forward T=64", f"sample R={NUM_ROWS}"]
    for program in found["programs"]:
        pool_bytes = 0 if program["name"].startswith("sample") else found["pool_bytes"]
        assert program["alias_bytes"] >= found["state_bytes"] + pool_bytes, program
        assert program["temp_bytes"] < 64 << 20 < found["pool_bytes"] / 4, program
        assert program["pool_copies"] == [], program


def test_one_device_of_two_kinds(config, capsys):
    code, found = run(config, target="v6e:2x2", compare=("h200",))
    assert code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("v6e:2x2") and lines[2].startswith("h200")
    assert [each["attention"] for each in found] == ["kernel", "kernel"]
    for each, block_size in zip(found, (128, 64), strict=True):
        assert each["block_bytes"] == block_size * BLOCK_BYTES
        assert all(program["exchanges"] == [] for program in each["programs"])
        check_programs(each)


def test_four_devices_exchange_what_tensor_parallelism_needs_and_no_more(config):
    """A sum after each attention, each MLP and the embedding. The sampler gets all logits of its share of the rows, and
    gives what it sampled.
    """
    code, (found,) = run(config, target="v5e:2x2", tp=4)
    assert code == 0
    check_programs(found)
    # Four devices keep the two KV heads twice: each has one.
    assert found["block_bytes"] == 128 * BLOCK_BYTES // 2
    embed, vocab, number = CONFIG["hidden_size"], CONFIG["vocab_size"], 2 * NUM_LAYERS + 1

    exchanges = {program["name"]: program["exchanges"] for program in found["programs"]}
    assert exchanges[f"layers R={NUM_ROWS}"] == [["all-reduce", number, NUM_ROWS * embed * 2]]
    assert exchanges["forward T=64"] == [["all-reduce", number, 64 * embed * 2]]
    logits, *sampled = exchanges[f"sample R={NUM_ROWS}"]
    assert logits == ["all-to-all", 1, NUM_ROWS * vocab // 4 * 4]
    # Token, logprob, rank and the top logprobs of each row.
    assert sum(count * num_bytes for _, count, num_bytes in sampled) == NUM_ROWS * (3 + 2 * 20) * 4
    reckoned = sum(count * num_bytes for _, count, num_bytes in found["exchange"])
    assert NUM_ROWS * reckoned == sum(
        count * num_bytes
        for name in (f"layers R={NUM_ROWS}", f"sample R={NUM_ROWS}")
        for _, count, num_bytes in exchanges[name]
    )


def test_divisions_of_a_target_are_compared_without_a_compiler_at_work(config, capsys):
    options = {"tp": "auto", "kv_cache_dtype": "int8"}
    code, found = run(config, target="v5e:2x4", compare=("h200:2",), **options)
    assert code == 0
    assert [(each["target"], each["num_devices"]) for each in found] == [
        *(("v5e:2x4", n) for n in (1, 2, 4, 8)),
        *(("h200:2", n) for n in (1, 2)),
    ]
    assert all(each["programs"] == [] and each["temp_bytes"] > 64 << 20 for each in found)
    assert found[0]["block_bytes"] == 128 * INT8_BLOCK_BYTES
    assert found[4]["block_bytes"] == 64 * INT8_BLOCK_BYTES
    printed = capsys.readouterr()
    assert printed.out.count("Best: --tp ") == 2 and "compil" not in printed.err


def test_a_model_with_pictures_and_one_with_experts_are_planned(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN2_5_VL_3B))
    code, (found,) = run(path, target="h200", tp="auto", max_model_len="16384")
    assert code == 0 and found["encoder"]["largest"] == 65_536
    assert (
        found["temp_bytes"] == 100_000_000 + 60_000 * 65_536
    )  # of the encoder, which needs the most
    assert found["bytes_per_step"] == found["weight_bytes"] - found["encoder"]["weight_bytes"]
    path.write_text(json.dumps(EXPERTS["Qwen3-30B-A3B"]))
    code, found = run(path, target="v6e:2x2", tp="auto", max_model_len="16384")
    assert [each["estimate"]["fits"] for each in found] == [False, False, True]
    assert found[0]["experts"]["num_active"] == 3_353_032_704 and found[0]["encoder"] is None


def test_latents_are_planned(tmp_path):
    """No step copies a pool of them. On a TPU a token's 576 numbers are in five registers of 128."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 256}
    sizes |= {"num_hidden_layers": 2, "n_routed_experts": 8, "vocab_size": 65536}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSEEK_V2_LITE | sizes))
    code, found = run(path, target="v6e:2x2", compare=("h200",), max_model_len="8192")
    assert code == 0
    assert found[0]["attention"] == "kernel"
    assert found[1]["attention"].startswith(
        "the kernel for Hopper GPUs; prompts in plain XLA: their kernel reads keys and values"
    )
    for each, block_size, width in zip(found, (128, 64), (640, 576), strict=True):
        assert each["block_bytes"] == 2 * block_size * width * 2
        assert each["in_int8"]["block_bytes"] is None
        check_programs(each)


def test_drafts_are_planned(config, capsys):
    """What a draft model takes of memory and time, in a plan without compiling; then with its programs."""
    drafts = config.with_name("drafts.json")
    drafts.write_text(json.dumps(tiny.CONFIG | {"vocab_size": 65536, "num_attention_heads": 4}))
    speculative = {"model": str(drafts), "num_speculative_tokens": 3}
    _, (plain, *_) = run(config, target="h200:2", tp="auto")
    code, (found, *_) = run(config, target="h200:2", tp="auto", speculative_config=speculative)
    of_drafts = found["drafts"]["model"]
    assert code == 0 and "draft model), with sequences" in capsys.readouterr().out
    assert found["weight_bytes"] == plain["weight_bytes"] + of_drafts["weight_bytes"]
    assert found["block_bytes"] == plain["block_bytes"] + 64 * BLOCK_BYTES * 2 // NUM_LAYERS
    assert found["in_int8"]["weight_bytes"] > plain["in_int8"]["weight_bytes"]
    assert found["temp_bytes"] > plain["temp_bytes"]
    assert found["estimate"]["decode_ms"][0][2] > plain["estimate"]["decode_ms"][0][2]
    as_json = ["--speculative-config", json.dumps(speculative), "--target", "h200"]
    sizes = ["--max-num-seqs", str(NUM_ROWS), "--max-num-batched-tokens", "256"]
    assert cli.main(["plan", str(config), *as_json, *sizes]) == 0
    text = capsys.readouterr().out
    # 16 rows of four tokens.
    for name in ("forward T=256", "forward T=64", f"draft R={NUM_ROWS}", f"verify R={NUM_ROWS}"):
        assert f"\n{name} " in text
    assert "such a step gives a row 1 to 4 tokens" in text and ", T=64 " in text


def test_a_head_is_planned(config, capsys):
    """Its weights without an embedding, and its one layer of each KV block."""
    head = config.with_name("head.json")
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
    }
    own |= {"draft_vocab_size": 1000, "eagle_aux_hidden_state_layer_ids": [0, 1]}
    head.write_text(json.dumps(json.loads(config.read_text()) | own))
    speculative = {"model": str(head), "num_speculative_tokens": 3}
    _, (plain, *_) = run(config, target="h200:2", tp="auto")
    code, (found, *_) = run(config, target="h200:2", tp="auto", speculative_config=speculative)
    of_head = found["drafts"]["model"]
    assert code == 0 and "draft model), with sequences" in capsys.readouterr().out
    assert found["weight_bytes"] == plain["weight_bytes"] + of_head["weight_bytes"]
    assert of_head["weight_bytes"] < plain["weight_bytes"] / NUM_LAYERS
    assert found["block_bytes"] == plain["block_bytes"] * (NUM_LAYERS + 1) // NUM_LAYERS
    assert found["estimate"]["decode_ms"][0][2] > plain["estimate"]["decode_ms"][0][2]


def test_a_model_that_does_not_fit_is_told_by_the_exit_code(config, capsys):
    code, (found,) = run(config, target="h200", gpu_memory_utilization=1e-5)
    assert code == 1 and not found["estimate"]["fits"]
    assert "It does not fit" in capsys.readouterr().out


def test_divisions_are_not_explained(config):
    with pytest.raises(ValueError, match="--explain needs compiled steps, and --tp auto"):
        run(config, target="v6e:2x2", tp="auto", explain=True)


def test_more_devices_than_there_are_is_refused(config):
    with pytest.raises(ValueError, match="has 4 devices; --tp 8"):
        run(config, target="v6e:2x2", tp=8)


def test_an_equal_plan_is_read_from_disk_and_another_is_compiled(config, capsys):
    _, (first,) = run(config, target="h200")
    capsys.readouterr()
    _, (second,) = run(config, target="h200")
    assert "compil" not in capsys.readouterr().err and second == first
    code, (found,) = run(config, target="h200", kv_cache_dtype="int8")
    assert f"sample R={NUM_ROWS} compiled in" in capsys.readouterr().err
    assert code == 0 and found["attention"] == "kernel"
    assert found["block_bytes"] == 64 * INT8_BLOCK_BYTES
    check_programs(found)


def test_what_cannot_be_served_is_refused_before_anything_is_compiled(config, capsys):
    config.write_text(json.dumps(CONFIG | {"architectures": ["JambaForCausalLM"]}))
    with pytest.raises(ValueError, match="JambaForCausalLM is not supported"):
        run(config, target="v6e:2x2")
    awq = {"quant_method": "awq", "bits": 3, "group_size": 128}
    config.write_text(json.dumps(CONFIG | {"quantization_config": awq}))
    with pytest.raises(ValueError, match=r"quantised \(awq, 3 bits, groups of 128\)"):
        run(config, target="v6e:2x2")
    assert "compil" not in capsys.readouterr().err


WHOLE = """
import json, sys
from jaxpage.aot.targets import parse_target
from jaxpage.aot.worker import compile_and_inspect, make_job

options, name, target, num_devices = json.load(sys.stdin)
job = make_job(options, parse_target(target), num_devices)
print(json.dumps(compile_and_inspect(job, name)))
"""


@pytest.mark.parametrize(
    ("target", "num_devices"),
    [
        ("v6e:2x2", 1),
        ("h200", 1),
        pytest.param("tpu7x:2x2x1", 1, marks=pytest.mark.slow),
        pytest.param("v5e:2x2", 4, marks=pytest.mark.slow),
    ],
)
def test_a_plan_covers_the_decode_step_compiled_whole(config, target, num_devices):
    """It adds up two parts of a decode step: never less than the whole needs, and little more."""
    _, (plan,) = run(config, target=target, tp=num_devices)
    options = {"model": str(config)} | SIZES
    told = dict(each.split("=", 1) for each in environment(parse_target(target)))
    done = subprocess.run(
        [sys.executable, "-c", WHOLE],
        input=json.dumps([options, f"decode R={NUM_ROWS}", target, num_devices]),
        env=os.environ | told,
        stdout=subprocess.PIPE,
        text=True,
    )
    decode = json.loads(done.stdout.splitlines()[-1])
    whole = step_bytes([Memory(decode["temp_bytes"], decode["result_bytes"])])
    planned = largest_step_bytes(plan["programs"], 8)
    assert whole <= planned <= 1.1 * whole + (32 << 20)
