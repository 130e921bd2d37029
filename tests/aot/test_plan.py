"""`jaxpage plan` with the real compilers, for chips that are not here."""

from __future__ import annotations

import json

import pytest

from jaxpage.aot.plan import Plan, main
from tests.aot.tiny import CONFIG

pytestmark = pytest.mark.aot

NUM_LAYERS = 2
BLOCK_BYTES = NUM_LAYERS * 2 * 2 * 64 * 2  # of a token: K and V of two KV heads, head dim, bfloat16


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def run(config, **options) -> tuple[int, list[dict]]:
    report = config.parent / "report.json"
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64} | options
    code = main(Plan(model=str(config), json=report, **options))
    return code, json.loads(report.read_text())


def check_programs(found: dict) -> None:
    names = [program["name"] for program in found["programs"]]
    assert names == ["decode R=2", "decode R=8", "forward T=64", "sample R=8"]
    for program in found["programs"]:
        pool_bytes = 0 if program["name"].startswith("sample") else found["pool_bytes"]
        assert program["alias_bytes"] >= found["state_bytes"] + pool_bytes, program
        assert program["temp_bytes"] < 64 << 20 < found["pool_bytes"] / 4, program
        assert program["pool_copies"] == [], program


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_one_device_of_two_kinds(config, kv_cache_dtype, capsys):
    code, found = run(config, target="v6e:2x2", compare=("h200",), kv_cache_dtype=kv_cache_dtype)
    assert code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("v6e:2x2") and lines[2].startswith("h200")
    assert [each["attention"] for each in found] == ["kernel", "kernel"]
    for each, block_size in zip(found, (128, 64), strict=True):
        quantised = kv_cache_dtype == "int8"  # a byte each, and scale and zero for 64 of them
        of_block = block_size * BLOCK_BYTES
        assert each["block_bytes"] == (of_block * 68 // 128 if quantised else of_block)
        assert all(program["collectives"] == {} for program in each["programs"])
        check_programs(each)


def test_four_devices_exchange_what_tensor_parallelism_needs_and_no_more(config):
    """A sum after each attention, each MLP and the embedding; all logits for the sampler."""
    code, (found,) = run(config, target="v5e:2x2", tp=4)
    assert code == 0
    check_programs(found)
    # Four devices keep the two KV heads twice: each has one.
    assert found["block_bytes"] == 128 * BLOCK_BYTES // 2
    embed, vocab, number = CONFIG["hidden_size"], CONFIG["vocab_size"], 2 * NUM_LAYERS + 1

    def sums(num_tokens):
        return {"all-reduce": {"count": number, "largest": num_tokens * embed}}

    def gathers(num_rows):
        return {"all-gather": {"count": 1, "largest": num_rows * vocab}}

    collectives = {program["name"]: program["collectives"] for program in found["programs"]}
    assert collectives == {
        "decode R=2": sums(2) | gathers(2),
        "decode R=8": sums(8) | gathers(8),
        "forward T=64": sums(64),
        "sample R=8": gathers(8),
    }


def test_a_model_that_does_not_fit_is_told_by_the_exit_code(config, capsys):
    code, (found,) = run(config, target="h200", gpu_memory_utilization=1e-5)
    assert code == 1 and not found["verdict"]["fits"]
    assert "It does not fit" in capsys.readouterr().out


def test_more_devices_than_there_are_is_refused(config):
    with pytest.raises(ValueError, match="has 4 devices; --tp 8"):
        run(config, target="v6e:2x2", tp=8)
