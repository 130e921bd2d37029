"""A start says five lines, and what was asked for in vain; the options are there at DEBUG."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from jaxpage import LLM, tiny
from jaxpage.config import EngineConfig
from jaxpage.engine_spec import make_engine_spec
from jaxpage.start_up_log import draft_model_line, programs_line

SMALL = {
    "max_model_len": 64,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 9,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny.build(tmp_path_factory.mktemp("start") / "tiny"))


def lines_of_start(folder: str, caplog, level: int, **options) -> list[tuple[str, str]]:
    with caplog.at_level(level, logger="jaxpage"):
        caplog.clear()
        LLM(folder, **SMALL, enforce_eager=True, **options)
    return [(r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith("jaxpage")]


def test_a_start_says_five_lines(folder, caplog):
    lines = lines_of_start(folder, caplog, logging.INFO)
    assert [level for level, _ in lines] == ["INFO"] * 5
    patterns = [
        r"model +tiny \(Qwen2ForCausalLM\), 140 k parameters in bfloat16, 280 kB",
        r"device +cpu, attention: plain XLA: the kernels are for TPUs and Hopper GPUs",
        r"KV cache +128 tokens in 9 blocks of 16, 36.9 kB in bfloat16; .* at most 64 tokens",
        r"programs +\d+, each compiled at its first use \(enforce_eager\)",
        r"ready +after \d+\.\d s",
    ]
    for (_, line), pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), line


def test_replicas_are_described_once(folder, caplog):
    options = {"data_parallel_size": 2, "tensor_parallel_size": 2, "served_model_name": "me"}
    lines = [line for _, line in lines_of_start(folder, caplog, logging.INFO, **options)]
    assert lines[0] == "replicas  2, on devices 0, 1 | 2, 3; each:"
    kinds = [line.split()[0] for line in lines[1:]]
    assert kinds == ["model", "device", "KV", "options", "programs", "ready"]


def test_what_has_no_effect_is_said_once(folder, caplog, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V1", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "")
    options = {
        "compilation_config": {"mode": 3},
        "served_model_name": "me",
        "gpu_memory_utilization": 0.5,
        "trust_remote_code": True,
    }
    lines = lines_of_start(folder, caplog, logging.INFO, **options)
    assert [line for level, line in lines if level == "WARNING"] == [
        "options without effect here: compilation_config, served_model_name, "
        "gpu_memory_utilization",
        "environment variables without effect here: VLLM_LOGGING_LEVEL, VLLM_USE_V1",
        "trust_remote_code=True: code of a checkpoint is never run, this model does without it",
    ]


def test_a_draft_model_has_a_line(folder, caplog):
    drafts = {"model": folder, "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}
    lines = lines_of_start(folder, caplog, logging.INFO, speculative_config=drafts)
    assert [line for level, line in lines if level == "WARNING"] == [
        "options without effect here: draft_tensor_parallel_size"
    ]
    _, of_drafts, _, of_pools, *_ = (line for level, line in lines if level == "INFO")
    assert of_drafts == (
        "drafts    tiny (Qwen2ForCausalLM), 140 k parameters in bfloat16, 280 kB; at most 3 tokens a step"
    )
    assert "9 blocks of 16, 73.7 kB" in of_pools


def test_the_line_of_a_draft_model_says_why_it_has_no_kernel(folder):
    speculative = {"model": folder, "num_speculative_tokens": 3}
    options = EngineConfig(model=folder, speculative_config=speculative)
    spec = make_engine_spec(options, device=jax.devices("cpu")[0])
    slow = replace(spec.draft_model, no_kernel_reason="head_dim is 20")
    line = draft_model_line(spec, spec.draft_model)
    assert draft_model_line(spec, slow) == f"{line}; attention: plain XLA: head_dim is 20"


def test_programs_are_counted_by_where_they_came_from():
    def line(*origins: str) -> str:
        ready = {str(i): SimpleNamespace(origin=origin) for i, origin in enumerate(origins)}
        programs = SimpleNamespace(names=("0", "1", "2"), ready=ready)
        return programs_line([programs], ahead_of_time=True)

    behind = "; 1 follow behind the first requests"
    assert line("kept", "compiled") == f"programs  3: 1 cached, 1 compiled{behind}"
    assert line("kept", "cached", "cached") == "programs  3: 3 cached, 0 compiled"


def test_the_options_are_told_to_whoever_asks(folder, caplog):
    lines = lines_of_start(folder, caplog, logging.DEBUG, hf_token="secret")
    (options,) = [line for level, line in lines if "max_num_batched_tokens " in line]
    assert "max_num_seqs" in options and "secret" not in options
