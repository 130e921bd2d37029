"""vLLM's class for options, and its flags for scripts."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest

from jaxpage.config import EngineConfig
from jaxpage.engine_args import EngineArgs


def test_engine_args_are_the_options_of_an_llm():
    args = EngineArgs(model="m", max_model_len=64, tensor_parallel_size=1, disable_log_stats=True)
    assert EngineConfig.from_options(**dataclasses.asdict(args)) == EngineConfig(
        model="m",
        max_model_len=64,
        tensor_parallel_size=1,
        options_without_effect=("disable_log_stats",),
    )
    with pytest.raises(ValueError, match="enable_log_requests=True is not supported"):
        EngineArgs(model="m", enable_log_requests=True)


def test_engine_args_are_flags_of_a_script():
    """As in vLLM's examples, with `argparse` in place of its `FlexibleArgumentParser`."""
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.set_defaults(model="m", enforce_eager=True)
    parser.add_argument("--mine", type=int)
    flags = (
        '--max-model-len 8k --revision 12 -tp 1 --hf-overrides {"a":1} --no-enable-prefix-caching '
        "--allowed-media-domains a b --trust-remote-code --compilation-config 3 -O 3 --mine 5 "
        "--hf-token secret "
        '--ignore-patterns a b --limit-mm-per-prompt {"image":2} --gpu-memory-utilization 0.5'
    )
    args = parser.parse_args(flags.split())
    expected = EngineArgs(
        model="m",
        enforce_eager=True,
        max_model_len="8k",
        revision="12",
        tensor_parallel_size=1,
        hf_overrides={"a": 1},
        enable_prefix_caching=False,
        allowed_media_domains=["a", "b"],
        limit_mm_per_prompt={"image": 2},
        gpu_memory_utilization=0.5,
        compilation_config=3,
        ignore_patterns=["a", "b"],
        optimization_level=3,
        trust_remote_code=True,
        hf_token="secret",
    )

    def parts(config: EngineConfig) -> dict:
        found = dataclasses.asdict(config)
        return found | {"options_without_effect": set(found["options_without_effect"])}

    assert args.mine == 5
    assert parts(EngineArgs.from_cli_args(args)) == parts(expected)
    options = {name: value for name, value in vars(args).items() if name != "mine"}
    assert parts(EngineConfig.from_options(**options)) == parts(expected)
    assert parser.parse_args(["--hf-token"]).hf_token is True
    unset = parser.parse_args([])
    assert EngineArgs.from_cli_args(unset) == EngineArgs(model="m", enforce_eager=True)


def test_every_flag_of_vllm_s_options_exists():
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    names = json.loads(Path(__file__).with_name("vllm_engine_args.json").read_text()).keys()
    for_python = {"logits_processors", "_api_process_count", "_api_process_rank"}
    assert names - for_python <= vars(parser.parse_args([])).keys()
