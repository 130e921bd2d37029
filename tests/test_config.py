"""Engine options: what is accepted, what is refused, and what defaults come to on each machine."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Qwen2Config

from jaxpage import tiny
from jaxpage.checkpoint_config import (
    default_sampling,
    eos_token_ids,
    load_generation_config,
    load_hf_config,
)
from jaxpage.config import EngineConfig, ReasoningConfig
from jaxpage.eagle_config import HEADS
from jaxpage.speculation import SpeculativeConfig

GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny.build(tmp_path_factory.mktemp("config") / "tiny"))


def resolve(hf_config=None, *, platform="cpu", device_kind="", device_memory=None, **options):
    return EngineConfig(model="m", **options).resolve(
        hf_config or Qwen2Config(max_position_embeddings=4096),
        platform=platform,
        device_kind=device_kind,
        device_memory=device_memory,
    )


@pytest.mark.parametrize(
    ("platform", "device_kind", "memory", "block_size", "num_seqs", "num_tokens"),
    [
        ("cpu", "cpu", None, 16, 256, 2048),
        ("gpu", "NVIDIA H200", 141 * GIB, 64, 1024, 16384),
        ("gpu", "NVIDIA A100-SXM4-80GB", 80 * GIB, 64, 256, 8192),
        ("gpu", "NVIDIA L4", 24 * GIB, 64, 256, 8192),
        ("gpu", "NVIDIA L4", None, 64, 256, 8192),
        ("tpu", "TPU v6 lite", 32 * GIB, 128, 256, 2048),
        ("tpu", "TPU v5 lite", 16 * GIB, 128, 256, 1024),
        ("tpu", "TPU v5", 95 * GIB, 128, 256, 512),
    ],
)
def test_sizes_follow_the_machine(platform, device_kind, memory, block_size, num_seqs, num_tokens):
    config = resolve(platform=platform, device_kind=device_kind, device_memory=memory)
    assert config.block_size == block_size
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (num_seqs, num_tokens)


def test_a_default_token_budget_holds_each_sequence_once_and_no_more_than_all_of_them():
    assert resolve(max_num_seqs=8192).max_num_batched_tokens == 8192
    assert resolve(max_num_seqs=2, max_model_len=100).max_num_batched_tokens == 200


def test_what_the_user_says_is_taken_as_it_is():
    config = resolve(max_num_batched_tokens=7, max_num_seqs=100, block_size=4)
    assert (config.max_num_batched_tokens, config.max_num_seqs, config.block_size) == (7, 100, 4)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, 4096),
        ("auto", 4096),
        (-1, 4096),
        (77, 77),
        ("4k", 4000),
        ("1K", 1024),
        ("1.5k", 1500),
    ],
)
def test_max_model_len(given, expected):
    config = resolve(max_model_len=given)
    assert config.max_model_len == expected
    assert config.fit_max_model_len == (given in ("auto", -1))


@pytest.mark.parametrize("bad", [0, -2, "8x", "1.5K1", "", 2.5, True, "1.0001k", 2**63])
def test_absurd_lengths_are_refused(bad):
    with pytest.raises(ValueError, match="max_model_len"):
        EngineConfig(model="m", max_model_len=bad)


def test_a_length_beyond_the_model_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match="5000 exceeds the 4096"):
        resolve(max_model_len=5000)


def test_rope_scaling_extends_the_model():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}
    hf = Qwen2Config(max_position_embeddings=1500, rope_parameters=yarn | {"rope_theta": 1e4})
    assert resolve(hf).max_model_len == 4000
    # Without a factor the model is as long as config.json says.
    hf.rope_parameters["factor"] = None
    assert resolve(hf).max_model_len == 1500
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    assert (
        resolve(Qwen2Config(max_position_embeddings=1500, rope_parameters=linear)).max_model_len
        == 3000
    )


@pytest.mark.parametrize(
    ("given", "stored", "expected"),
    [
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float16", "float16"),
        ("auto", "float32", "bfloat16"),
        ("auto", None, "bfloat16"),
        ("half", "float32", "float16"),
        ("float", "bfloat16", "float32"),
        ("bfloat16", "float16", "bfloat16"),
    ],
)
def test_dtype(given, stored, expected):
    assert resolve(Qwen2Config(dtype=stored), dtype=given).dtype == expected


def test_float16_checkpoints_are_in_bfloat16_on_a_tpu():
    config = Qwen2Config(dtype="float16")
    assert resolve(config, platform="tpu").dtype == "bfloat16"
    assert resolve(config, platform="tpu", dtype="float16").dtype == "float16"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("auto", "float16"),
        ("half", "float16"),
        ("float16", "float16"),
        ("int8", "int8"),
        ("int4", "int4"),
        ("fp8", "fp8_e4m3"),
        ("fp8_e4m3", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e5m2"),
    ],
)
def test_kv_cache_dtype(given, expected):
    assert resolve(Qwen2Config(dtype="float16"), kv_cache_dtype=given).kv_cache_dtype == expected


def test_keys_and_values_are_not_kept_in_another_float():
    with pytest.raises(ValueError, match="'float32' is not the bfloat16 that the model computes"):
        resolve(Qwen2Config(dtype="bfloat16"), kv_cache_dtype="float32")


@pytest.mark.parametrize(
    ("policy", "dtype"), [(0, "auto"), (4, "int4"), (8, "int8"), (16, "fp8_e4m3"), (17, "fp8_e5m2")]
)
def test_quant_policy_of_lmdeploy_is_a_kv_cache_dtype(policy, dtype):
    expected = EngineConfig(model="m", kv_cache_dtype=dtype)
    assert EngineConfig.from_options(model="m", quant_policy=policy) == expected
    both = EngineConfig.from_options(model="m", quant_policy=policy, kv_cache_dtype=dtype)
    assert both == expected
    with pytest.raises(ValueError, match=f"quant_policy={policy} means.*leave one of them out"):
        EngineConfig.from_options(model="m", quant_policy=policy, kv_cache_dtype="bfloat16")


def test_a_quant_policy_that_is_none_is_refused():
    with pytest.raises(ValueError, match="quant_policy must be one of 0, 4, 8, 16, 17, got 42"):
        EngineConfig.from_options(model="m", quant_policy=42)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int8"},
        {"kv_cache_dtype": "int2"},
        {"block_size": 0},
        {"block_size": 10**6},
        {"block_size": "16"},
        {"gpu_memory_utilization": 0},
        {"gpu_memory_utilization": 1.5},
        {"cache_max_entry_count": 0},
        {"cache_max_entry_count": 0.5, "gpu_memory_utilization": 0.5},
        {"num_gpu_blocks_override": 1},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0},
        {"decode_steps": 0},
        {"scheduling_policy": "lifo"},
        {"stream_interval": 0},
        {"load_format": "gguf"},
        {"quantization": "int4"},
        {"logprobs_mode": "logits"},
        {"structured_outputs_config": {"max_nesting": 0}},
        {"speculative_config": {"method": "ngram"}},
        {"speculative_config": {"method": "medusa", "num_speculative_tokens": 4}},
        {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 4}},
        {"speculative_config": {"method": "eagle3", "num_speculative_tokens": 4}},
        {"speculative_config": {"model": "draft", "num_speculative_tokens": 0}},
        {"speculative_config": {"method": "mtp", "model": "", "num_speculative_tokens": 1}},
        {"speculative_config": {"method": "mtp", "revision": "r", "num_speculative_tokens": 1}},
        {
            "speculative_config": {
                "model": "draft",
                "num_speculative_tokens": 4,
                "prompt_lookup_max": 3,
            }
        },
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 4,
                "draft_tensor_parallel_size": 1,
            }
        },
        {"speculative_config": {"num_speculative_tokens": 0}},
        {"speculative_config": {"num_speculative_tokens": 4, "prompt_lookup_max": 0}},
        {
            "speculative_config": {
                "num_speculative_tokens": 4,
                "prompt_lookup_min": 3,
                "prompt_lookup_max": 2,
            }
        },
        {"logits_processors": ["a.b"]},
        {"max_logprobs": -2},
        {"kv_cache_memory_bytes": "2X"},
        {"hf_overrides": "{}"},
        {"seed": None},
        {"swap_space": "4"},
        {"gpu_memory_utilization": "0.9"},
        {"enforce_eager": "no"},
        {"hf_overrides": 5},
        {"override_generation_config": "{}"},
        {"reasoning_config": "<think>"},
        {"reasoning_config": {"start": "<think>"}},
        {"reasoning_config": {"reasoning_start_str": 5}},
    ],
)
def test_bad_values_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        EngineConfig(model="m", **options)


def test_drafts_follow_from_all_tokens_so_far():
    given = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    config = resolve(speculative_config=given)
    assert config.speculative_config == SpeculativeConfig(
        num_speculative_tokens=4, prompt_lookup_min=3, prompt_lookup_max=3
    )
    assert (config.num_drafts, config.decode_steps, config.async_scheduling) == (4, 1, False)
    assert resolve().num_drafts == 0 and resolve().async_scheduling
    default = SpeculativeConfig(num_speculative_tokens=1)
    assert (default.prompt_lookup_min, default.prompt_lookup_max) == (5, 5)


@pytest.mark.parametrize(
    "names",
    [
        {"model": "ngram"},
        {"model": "[ngram]"},
        {"method": "[ngram]"},
        {"method": "ngram", "model": "ngram"},
    ],
)
def test_prompt_lookup_has_the_names_that_it_has_in_vllm(names):
    """As a model too: nothing is looked up on the hub."""
    config = SpeculativeConfig(num_speculative_tokens=4, **names)
    assert config == SpeculativeConfig(num_speculative_tokens=4)
    assert config.with_local_files() is config


@pytest.mark.parametrize(
    "method",
    [
        *("mtp", "deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp"),
        *("qwen3_next_mtp", "qwen3_5_mtp"),
    ],
)
def test_an_mtp_layer_comes_with_the_model_or_another_one(method, tmp_path):
    """Under its older names in vLLM too."""
    config = SpeculativeConfig(num_speculative_tokens=1, method=method)
    assert config == SpeculativeConfig(num_speculative_tokens=1, method="mtp")
    assert config.with_local_files() is config
    (tmp_path / "config.json").write_text("{}")
    other = dataclasses.replace(config, model=str(tmp_path))
    assert other.with_local_files() == other


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", *HEADS])
def test_a_draft_model_that_is_a_head_has_the_method_of_heads(architecture, tmp_path):
    given = SpeculativeConfig(model=str(tmp_path), num_speculative_tokens=4)
    assert given.method == "draft_model"
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert given.with_local_files().method == HEADS.get(architecture, "draft_model")
    # As EAGLE's authors call their heads.
    explicit = dataclasses.replace(given, method="eagle3")
    assert explicit.with_local_files().method == HEADS.get(architecture, "eagle3")


def test_nothing_is_left_to_interpret():
    config = resolve(kv_cache_memory_bytes="2G", logprobs_mode="processed_logprobs")
    assert config.kv_cache_memory_bytes == 2 * GIB
    assert config.logprobs_mode == "processed"
    assert config.tokenizer == "m"
    left = {f.name for f in dataclasses.fields(config) if getattr(config, f.name) in (None, "auto")}
    unset = {"num_gpu_blocks_override", "chat_template", "quantization", "cache_max_entry_count"}
    unset |= {"preemption_mode", "kv_offload_dir", "revision", "tokenizer_revision", "download_dir"}
    unset |= {"hf_overrides", "override_generation_config", "hf_token", "record_calls"}
    unset |= {"reasoning_config", "structured_outputs_config", "tool_call_parser", "mesh"}
    unset |= {"research", "speculative_config"}
    unset |= {"hf_config_path", "dist_init_addr", "allowed_local_media_path"}
    unset |= {"limit_mm_per_prompt", "mm_processor_kwargs", "mm_encoder_cache_bytes"}
    unset |= {"tensor_parallel_size"}  # whoever knows the devices decides
    pooling = {"runner", "convert", "pooler_config"}  # decided by whoever reads the checkpoint
    assert left == unset | pooling | {"load_format", "generation_config"}
    for name in {f.name for f in dataclasses.fields(config)} - {"hf_token"}:
        assert name in config.describe()
    assert "secret" not in repr(resolve(hf_token="secret")) + resolve(hf_token="secret").describe()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1


def test_the_compilation_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("JAXPAGE_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert resolve().compilation_cache_dir == str(tmp_path / "jaxpage" / "xla")
    monkeypatch.setenv("JAXPAGE_COMPILATION_CACHE_DIR", str(tmp_path / "env"))
    assert resolve().compilation_cache_dir == str(tmp_path / "env")
    assert resolve(compilation_cache_dir="~/c").compilation_cache_dir == str(Path.home() / "c")
    assert resolve(compilation_cache_dir="off").compilation_cache_dir == ""
    monkeypatch.setenv("JAXPAGE_COMPILATION_CACHE_DIR", "off")
    assert resolve().compilation_cache_dir == ""


def test_unknown_options_name_their_neighbours():
    with pytest.raises(TypeError, match="did you mean max_num_seqs"):
        EngineConfig.from_options(model="m", max_num_seq=3)
    with pytest.raises(TypeError, match="'zzz'$"):
        EngineConfig.from_options(model="m", zzz=3)


VLLM_DEFAULTS = json.loads(Path(__file__).with_name("vllm_engine_args.json").read_text())


@pytest.mark.parametrize("name", VLLM_DEFAULTS)
def test_every_option_of_vllm_is_accepted_at_its_default(name):
    """All fields of vLLM 0.32's EngineArgs; the file has their defaults."""
    for value in (VLLM_DEFAULTS[name], None):
        config = EngineConfig.from_options(model="m", **{name: value})
        ours = {"logprobs_mode": "raw", "tensor_parallel_size": None}  # vLLM's is 1 always
        assert dataclasses.replace(config, **ours) == EngineConfig(model="m")


@pytest.mark.parametrize(
    "neutral",
    [
        {"limit_mm_per_prompt": {}},
        {"additional_config": {}},
        {"stream_interval": 1},
        {"enable_sleep_mode": True},
        {"enable_log_requests": False},
        {"disable_log_requests": True},
        {"enable_chunked_prefill": True},
        {"cpu_offload_gb": 0.0},
        {"swap_space": 0},
        {"kv_offloading_size": None},
        {"seed": None},
        {"task": "generate"},
        {"distributed_executor_backend": "mp"},
        {"trust_remote_code": False},
        {"model_impl": "vllm"},
    ],
)
def test_options_of_vllm_are_accepted_at_other_harmless_values(neutral):
    assert EngineConfig.from_options(model="m", **neutral) == EngineConfig(model="m")


@pytest.mark.parametrize(
    "option",
    [
        {"pipeline_parallel_size": 2},
        {"spec_tokens": 4},
        {"enable_chunked_prefill": False},
        {"quantization_config": {"linear": "fp8"}},
        {"rope_scaling": {"type": "yarn"}},
        {"cpu_offload_gb": 4},
        {"model_impl": "transformers"},
        {"enable_log_requests": True},
    ],
)
def test_options_of_vllm_are_refused_at_other_values_with_what_to_do(option):
    ((name, value),) = option.items()
    pattern = rf"{name}={re.escape(repr(value))} is not supported: \w.*\. Leave the option out"
    with pytest.raises(ValueError, match=pattern):
        EngineConfig.from_options(model="m", **option)


def test_options_that_tune_what_jaxpage_lacks_are_remembered_to_be_told():
    options = {
        "compilation_config": {"mode": 3},
        "disable_custom_all_reduce": True,
        "disable_log_stats": True,
        "attention_config": {"backend": "x"},
        "served_model_name": "me",
        "trust_remote_code": True,
        "max_num_seqs": 3,
    }
    config = EngineConfig.from_options(model="m", **options)
    assert set(config.options_without_effect) == options.keys() - {"max_num_seqs"}
    assert resolve(gpu_memory_utilization=0.5).options_without_effect == ("gpu_memory_utilization",)
    on_gpu = resolve(gpu_memory_utilization=0.5, platform="gpu", device_memory=GIB)
    assert on_gpu.options_without_effect == ()


def test_the_markers_of_reasoning_may_be_a_config_or_a_dict():
    markers = {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    config = ReasoningConfig(**markers)
    for given in (config, markers, dataclasses.asdict(config)):
        options = EngineConfig.from_options(model="m", reasoning_config=given)
        assert options.reasoning_config == config
        assert EngineConfig.from_options(**dataclasses.asdict(options)) == options
        options = EngineConfig.from_options(
            model="m", reasoning_config=given, reasoning_parser="qwen3"
        )
        assert options.reasoning_config == ReasoningConfig(reasoning_parser="qwen3", **markers)
        assert options.options_without_effect == ()
    options = EngineConfig.from_options(model="m", reasoning_parser="qwen3", reasoning_config={})
    assert options.reasoning_config == ReasoningConfig(reasoning_parser="qwen3")


def test_the_newer_name_of_swap_space():
    for options in ({"kv_offloading_size": 2.0}, {"swap_space": 2.0, "kv_offloading_size": None}):
        assert EngineConfig.from_options(model="m", **options).swap_space == 2.0


def test_the_options_of_a_config_make_the_same_config():
    config = EngineConfig.from_options(model="m", dtype="half", optimization_level=3)
    assert EngineConfig.from_options(**dataclasses.asdict(config)) == config


@pytest.mark.parametrize("dtype", [np.float32, jnp.float32, np.dtype("float32"), torch.float32])
def test_a_dtype_may_be_that_of_an_array_library(dtype):
    assert EngineConfig(model="m", dtype=dtype).dtype == "float32"
    assert resolve(dtype=dtype, kv_cache_dtype=dtype).kv_cache_dtype == "float32"
    with pytest.raises(ValueError, match="dtype must be one of .*, got 'int32'"):
        EngineConfig(model="m", dtype=np.int32)


@pytest.mark.parametrize("model", [None, "", 5])
def test_a_model_must_be_named(model):
    with pytest.raises(ValueError, match=f"model must be a folder or a name .*, got {model!r}"):
        EngineConfig.from_options(model=model)


def test_overrides_may_be_a_function(folder):
    def one_layer(config):
        config.num_hidden_layers = 1
        return config

    options = EngineConfig.from_options(model=folder, hf_overrides=one_layer)
    assert load_hf_config(folder, options.hf_overrides).num_hidden_layers == 1
    assert resolve(hf_overrides=one_layer).hf_overrides is one_layer


def test_overrides_are_merged_into_the_models_config(folder):
    overrides = {"num_hidden_layers": 1, "rope_parameters": {"rope_theta": 5.0}}
    config = load_hf_config(folder, overrides)
    assert config.num_hidden_layers == 1
    assert len(config.layer_types) == 1  # derived values follow
    assert config.rope_parameters == {"rope_theta": 5.0, "rope_type": "default"}
    assert config.vocab_size == tiny.TINY_CONFIG["vocab_size"]
    yarn = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    longer = load_hf_config(folder, yarn | {"original_max_position_embeddings": 100})
    assert resolve(longer).max_model_len == 400
    nested = load_hf_config(folder, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}})
    assert nested.rope_parameters["rope_theta"] == tiny.TINY_CONFIG["rope_theta"]


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        load_hf_config("Qwen/Qwen3-0.6B")
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        load_hf_config(str(tmp_path))
    for damaged in ("{", "[" * 100_000):
        (tmp_path / "config.json").write_text(damaged)
        with pytest.raises(ValueError, match="is not JSON"):
            load_hf_config(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json must hold a JSON object, it holds a list"):
        load_hf_config(str(tmp_path))
    for nameless in ("{}", '{"model_type": ["qwen2"]}'):
        (tmp_path / "config.json").write_text(nameless)
        with pytest.raises(
            ValueError, match="names no model_type, so it is not the config.json of"
        ):
            load_hf_config(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {}}')
    with pytest.raises(ValueError, match="'mine'.*never run, whatever trust_remote_code says"):
        load_hf_config(str(tmp_path))
    rope = {"rope_type": "yarn", "rope_theta": 1e4}
    config = {"model_type": "qwen2", "rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json cannot be read: Missing .*'factor'"):
        load_hf_config(str(tmp_path))


@pytest.mark.parametrize("wrong", ["x", [2, "x"], 2.5, {"a": 1}])
def test_eos_ids_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match="eos_token_id of the generation config must be a token"):
        eos_token_ids(Qwen2Config(), {"eos_token_id": wrong})


def test_generation_config(tmp_path):
    stored = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 99, "eos_token_id": [3, 4]}
    (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    auto = load_generation_config(EngineConfig(model=str(tmp_path)))
    assert default_sampling(auto) == {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    hf_config = Qwen2Config(eos_token_id=2)
    assert eos_token_ids(hf_config, auto) == (2, 3, 4)
    overridden = EngineConfig(model=str(tmp_path), override_generation_config={"temperature": 0.1})
    assert default_sampling(load_generation_config(overridden))["temperature"] == 0.1
    neutral = load_generation_config(EngineConfig(model=str(tmp_path), generation_config="vllm"))
    assert (default_sampling(neutral), eos_token_ids(hf_config, neutral)) == ({}, (2,))
    elsewhere = EngineConfig(model="nowhere", generation_config=str(tmp_path))
    assert load_generation_config(elsewhere) == stored
    assert load_generation_config(EngineConfig(model="nowhere")) == {}
    with pytest.raises(ValueError, match="does not exist"):
        load_generation_config(EngineConfig(model="m", generation_config=str(tmp_path / "x")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_lora": "yes"}, "enable_lora must be True or False"),
        ({"max_loras": 0}, "max_loras must be an int in 1"),
        ({"max_lora_rank": 257}, "max_lora_rank must be an int in 1..256"),
        ({"max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras=3 must be at least max_loras=4"),
    ],
)
def test_options_of_adapters_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_options(model="m", **options)
    assert EngineConfig.from_options(model="m", max_cpu_loras=None, enable_lora=False)


def test_names_of_vllm_can_be_imported():
    from jaxpage.inputs import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt
    from jaxpage.sampling_params import BeamSearchParams

    assert TokensPrompt(prompt_token_ids=[1]) == {"prompt_token_ids": [1]}
    assert TextPrompt(prompt="a") == {"prompt": "a"}
    assert {TokensPrompt, TextPrompt, EmbedsPrompt} < set(PromptType.__args__)
    assert BeamSearchParams(2, 3).beam_width == 2


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, jaxpage; jaxpage.SamplingParams(); jaxpage.EngineConfig(model='m'); "
        "print(sorted({'jax', 'flax', 'transformers', 'torch'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_public_names_are_there_and_no_others():
    import jaxpage

    for name in jaxpage.__all__:
        aliases = {"AsyncEngineArgs": "EngineArgs", "AsyncLLMEngine": "AsyncLLM"}
        aliases["LLMEngine"] = "LLM"
        assert getattr(jaxpage, name).__name__ == aliases.get(name, name)
    with pytest.raises(AttributeError, match="LMM"):
        _ = jaxpage.LMM


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": 0}, "nnodes must be an int in 1"),
        (
            {"nnodes": 2, "node_rank": 2, "dist_init_addr": "h:1"},
            "node_rank=2 is not below nnodes=2",
        ),
        ({"nnodes": 2, "node_rank": 1}, "node_rank needs dist_init_addr"),
        ({"nnodes": 2, "dist_init_addr": "10.0.0.1"}, "must be HOST:PORT, got '10.0.0.1'"),
        ({"nnodes": 2, "dist_init_addr": ":80"}, "must be HOST:PORT"),
        ({"nnodes": 2, "kv_offload_dir": "f", "swap_space": 1}, "kv_offload_dir works on one host"),
        ({"nnodes": 2, "data_parallel_size": 2}, "data_parallel_size=2 works on one host"),
    ],
)
def test_options_of_hosts_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(model="m", **options)
