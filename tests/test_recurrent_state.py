"""What an engine does without if its model has a recurrent state, how many states it has room for, and which kernel
changes them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxpage import BeamSearchParams, EngineConfig
from jaxpage.beam_search import request_params
from jaxpage.device import Device
from jaxpage.engine_spec import EngineSpec, make_engine_spec
from jaxpage.ops import state_kernel
from jaxpage.prompts import Limits
from jaxpage.recurrent_state import choose_kernel, sequence_bytes
from jaxpage.start_up_log import recurrent_state_line
from pallas_kernels import hopper
from tests.aot.recurrent import MODELS

SMALL = MODELS["4B"] | {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 96}
# float32 matrices of 32 value heads, and bfloat16 inputs of a convolution over 16 + 16 + 32 heads, in six layers.
SEQUENCE_BYTES = 6 * (4 * 32 * 128 * 128 + 2 * 3 * 64 * 128)
GIB = 2**30
XLA = "plain XLA: the kernels are for TPUs and Hopper GPUs"
CPU, TPU = Device(platform="cpu"), Device(platform="tpu", kind="TPU v6 lite")
HOPPER = Device(platform="gpu", kind="NVIDIA H200", compute_capability="9.0")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


def spec_of(folder, *, memory: int = 4 * GIB, **options) -> EngineSpec:
    config = EngineConfig.from_options(model=str(folder), **options)
    return make_engine_spec(config, device=jax.local_devices()[0], device_memory=memory)


def test_states_of_all_sequences_take_a_fifth_of_the_memory_at_most(folder):
    assert 64 * SEQUENCE_BYTES < 0.2 * 4 * GIB < 128 * SEQUENCE_BYTES
    assert spec_of(folder).config.max_num_seqs == 64
    assert spec_of(folder, memory=64 * GIB).config.max_num_seqs == 256  # of the platform
    given = spec_of(folder, max_num_seqs=200)
    assert given.config.max_num_seqs == 200


def test_states_in_the_prefix_cache_take_a_tenth_of_the_memory_at_most(folder):
    fitting = int(0.1 * 4 * GIB) // SEQUENCE_BYTES
    assert fitting == 33 and spec_of(folder).step_spec.num_cached_states == 32
    assert spec_of(folder, memory=64 * GIB, max_num_seqs=20).step_spec.num_cached_states == 40
    assert spec_of(folder, memory=GIB // 64).step_spec.num_cached_states == 1
    assert spec_of(folder, enable_prefix_caching=False).step_spec.num_cached_states == 0


def test_the_log_says_how_many_states_there_are(folder):
    states, cached = 200 * SEQUENCE_BYTES / 1e9, 32 * SEQUENCE_BYTES / 1e6
    start = f"state     {states:.2f} GB of recurrent state for 200 sequences, "
    assert recurrent_state_line(spec_of(folder, max_num_seqs=200)) == (
        f"{start}{cached:.0f} MB for 32 in the prefix cache, decode: {XLA}"
    )
    without = spec_of(folder, max_num_seqs=200, enable_prefix_caching=False)
    assert recurrent_state_line(without) == f"{start}no prefix cache, decode: {XLA}"


@pytest.fixture
def can_compile(monkeypatch):
    """Kernels for Hopper GPUs, with any jax."""
    monkeypatch.setattr(hopper, "JAX_VERSIONS", ((0,), (99,)))
    monkeypatch.setattr(hopper, "ptxas_version", lambda path: (13, 1, 80))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_devices", [1, 4, 3])
def test_the_states_of_models_are_the_kernels(name, num_devices, tmp_path, can_compile):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    model = spec_of(tmp_path).model.config
    for device, platform in ((HOPPER, "gpu"), (TPU, "tpu"), (CPU, None)):
        choice = choose_kernel(model, device, num_devices=num_devices)
        assert (choice.chosen, choice.reason) == (platform, None)


def lfm2_of(folder: Path, **options) -> Path:
    """Of 2,048 channels, as LFM2-1.2B."""
    kinds = ["conv", "full_attention", "conv"]
    sizes = {"vocab_size": 96, "layer_types": kinds, "num_hidden_layers": 3, "hidden_size": 2048}
    names = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(names | sizes | options))
    return folder


def bytes_of(spec: EngineSpec) -> int:
    recurrent = spec.model.config.recurrent
    assert recurrent is not None
    return sequence_bytes(recurrent, jnp.bfloat16, num_drafts=0)


def test_layers_that_only_convolve_have_inputs_of_convolutions_and_no_kernel(tmp_path):
    """Two inputs in two layers."""
    spec = replace(spec_of(lfm2_of(tmp_path), max_num_seqs=100), hardware=TPU)
    assert bytes_of(spec) == 2 * 2 * 2048 * 2
    assert choose_kernel(spec.model.config, TPU, num_devices=1).chosen is None
    assert spec.step_spec.state_kernel is None
    assert recurrent_state_line(spec) == (
        "state     1.64 MB of recurrent state for 100 sequences, 3.28 MB for 200 in the prefix cache"
    )


def test_empty_states_limit_nothing(tmp_path):
    spec = spec_of(lfm2_of(tmp_path, conv_L_cache=1))
    assert bytes_of(spec) == 0
    assert spec.step_spec.num_cached_states == 2 * spec.config.max_num_seqs


@pytest.mark.parametrize(
    ("capability", "shape", "is_mamba", "reason"),
    [
        ("9.0", (16, 2, 128, 128), False, None),
        ("9.0", (8, 128, 1024), True, None),
        ("8.0", (16, 2, 128, 128), False, "9.0; this device's is 8.0"),
        ("9.0", (16, 2, 128, 96), False, "value dim 96 is no multiple of 64"),
        ("9.0", (8, 128, 64), True, "value dim 32 is no multiple of 64"),
        ("9.0", (8, 12, 256), True, "key dim 12 is no multiple of 8 up to 256"),
    ],
)
def test_where_the_kernel_cannot_serve_xla_does_for_a_reason(
    capability, shape, is_mamba, reason, can_compile
):
    num_values = 16 if shape == (8, 128, 1024) else 2
    device = replace(HOPPER, compute_capability=capability)
    choice = state_kernel.choose(shape, num_values, device, is_mamba=is_mamba)
    assert choice.chosen == (None if reason else "gpu")
    assert choice.reason is None if reason is None else str(choice.reason).endswith(reason)


def test_an_assembler_that_miscompiles_and_an_old_jax_are_reasons(can_compile, monkeypatch):
    monkeypatch.setattr(hopper, "find_ptxas", lambda: Path("/cuda/bin/ptxas"))
    monkeypatch.setattr(hopper, "ptxas_version", lambda path: (13, 0, 88))
    asked = ((16, 2, 128, 128), 2, HOPPER)
    choice = state_kernel.choose(*asked, is_mamba=False)
    assert choice.chosen is None and "ptxas 13.0.88" in str(choice.reason)
    monkeypatch.setattr(hopper, "JAX_VERSIONS", ((99,), (100,)))
    choice = state_kernel.choose(*asked, is_mamba=False)
    assert choice.chosen is None and "the kernels need jax >= 99" in str(choice.reason)


def test_a_device_s_kernel_serves_its_steps_and_the_log_says_so(folder, can_compile):
    spec = replace(spec_of(folder), hardware=HOPPER)
    assert spec.step_spec.state_kernel == "gpu"
    assert recurrent_state_line(spec).endswith("decode: the kernel for Hopper GPUs")
    old = replace(spec, hardware=replace(HOPPER, compute_capability="8.0"))
    assert old.step_spec.state_kernel is None
    assert recurrent_state_line(old).endswith("this device's is 8.0")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 32}},
            "num_speculative_tokens=32 of .* too many for Qwen3_5ForCausalLM.*at most 31",
        ),
        ({"swap_space": 1}, r"swap_space=1.* is not for Qwen3_5ForCausalLM.*computed again"),
        ({"numerics": "strict"}, "not for models with a recurrent state"),
    ],
)
def test_what_is_not_for_such_models_is_refused(options, complaint, folder):
    with pytest.raises(ValueError, match=complaint):
        spec_of(folder, **options)


def test_no_draft_model_has_such_a_state(folder):
    drafts = {"model": str(folder), "num_speculative_tokens": 2}
    with pytest.raises(
        ValueError, match="Qwen3_5ForCausalLM has .* recurrent state.*take one without"
    ):
        spec_of(folder, speculative_config=drafts)


def test_beams_are_refused():
    limits = Limits(
        vocab_size=96,
        max_model_len=64,
        max_logprobs=-1,
        has_tokenizer=False,
        has_recurrent_state=True,
    )
    with pytest.raises(ValueError, match="beam search is not for models with a recurrent state"):
        request_params(BeamSearchParams(beam_width=2, max_tokens=3), frozenset(), limits, "raw")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"layer_types": ["linear_attention"] * 8}, "and both of them"),
        ({"layer_types": ["full_attention"] * 8}, "and both of them"),
        (
            {"layer_types": ["linear_attention"] * 7 + ["sliding_attention"]},
            "layer_types must have linear_attention or full_attention for each of 8 layers",
        ),
        ({"linear_num_value_heads": 40}, "40 value heads cannot share 16 key heads"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
        ({"linear_value_head_dim": -1}, "linear_value_head_dim is -1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu'"),
    ],
)
def test_layers_that_do_not_exist_are_refused(changes, complaint, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL | changes))
    with pytest.raises(ValueError, match=complaint):
        spec_of(tmp_path)
