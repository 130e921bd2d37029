"""What an engine does without if its model has a recurrent state, and how many states it has room for."""

from __future__ import annotations

import json

import jax
import pytest

from jaxpage import BeamSearchParams, EngineConfig
from jaxpage.beam_search import request_params
from jaxpage.engine_spec import EngineSpec, make_engine_spec
from jaxpage.prompts import Limits
from jaxpage.start_up_log import recurrent_state_line
from tests.aot.recurrent import MODELS

SMALL = MODELS["4B"] | {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 96}
# float32 matrices of 32 value heads, and bfloat16 inputs of a convolution over 16 + 16 + 32 heads, in six layers.
SEQUENCE_BYTES = 6 * (4 * 32 * 128 * 128 + 2 * 3 * 64 * 128)
GIB = 2**30


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
        f"{start}{cached:.0f} MB for 32 in the prefix cache"
    )
    without = spec_of(folder, max_num_seqs=200, enable_prefix_caching=False)
    assert recurrent_state_line(without) == start + "no prefix cache"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative_config is not for Qwen3_5ForCausalLM.*taken back",
        ),
        ({"swap_space": 1}, r"swap_space=1.* is not for Qwen3_5ForCausalLM.*computed again"),
        ({"numerics": "strict"}, "not for models with a recurrent state"),
    ],
)
def test_what_needs_earlier_states_is_refused(options, complaint, folder):
    with pytest.raises(ValueError, match=complaint):
        spec_of(folder, **options)


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
