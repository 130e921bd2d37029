"""Configs that are refused, each with an error that says what would do; abstract models."""

from __future__ import annotations

import inspect

import jax
import pytest
import transformers
from flax import nnx

from jaxpage.models.registry import REGISTRY, build


def llama(**changes):
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    )
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def test_unknown_architecture_lists_the_supported_ones():
    with pytest.raises(ValueError, match="OPTForCausalLM is not supported") as error:
        build(llama(architectures=["OPTForCausalLM"]), dtype="float32")
    assert all(name in str(error.value) for name in REGISTRY)


def test_config_without_architecture_names_its_model_type():
    with pytest.raises(ValueError, match="none .model_type 'llama'. is not supported"):
        build(llama(architectures=None), dtype="float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu6"}, "activation 'relu6'; supported are silu"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0 in config.json"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0 in config.json"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": "a"}},
            "'factor': 'a'} of config.json cannot be used",
        ),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}, "'axial'; supported are"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "needs 'factor'"),
        ({"head_dim": 7}, "rotate 7 of 7 dimensions"),
        ({"is_causal": False}, "is_causal is false in config.json"),
    ],
)
def test_unsupported_config_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        build(llama(**changes), dtype="float32")


@pytest.mark.parametrize(
    ("layer_types", "message"),
    [
        (["full_attention", "chunked_attention"], "contains chunked_attention"),
        (["full_attention"], "1 entries for 2 layers"),
    ],
)
def test_layers_without_a_known_kind_of_attention_are_refused(layer_types, message):
    config = transformers.Qwen2Config(num_hidden_layers=2, architectures=["Qwen2ForCausalLM"])
    config.layer_types = layer_types
    with pytest.raises(ValueError, match=message):
        build(config, dtype="float32")


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_without_a_token_is_refused(window):
    config = transformers.MistralConfig(sliding_window=window, architectures=["MistralForCausalLM"])
    with pytest.raises(ValueError, match=f"sliding_window is {window} in config.json"):
        build(config, dtype="float32")


# What the defaults of transformers' configs lack.
MORE = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "Dots1ForCausalLM": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "GraniteMoeHybridForCausalLM": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "position_embedding_type": "rope",
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "NemotronForCausalLM": {"num_key_value_heads": 8},
}


@pytest.mark.parametrize("architecture", [name for name in REGISTRY if name.endswith("CausalLM")])
def test_a_model_has_windows_if_that_of_transformers_has(architecture):
    """A config.json may name one without."""
    model = getattr(transformers, architecture)
    config = model.config_class(
        num_hidden_layers=4,
        sliding_window=8,
        use_sliding_window=True,
        max_window_layers=2,
        architectures=[architecture],
        **MORE.get(architecture, {}),
    )
    windows = build(config, dtype="float32").config.windows
    code = inspect.getsource(inspect.getmodule(model))
    assert any(windows) == ("create_sliding_window_causal_mask" in code)


# Its config has the option, with which its model fails; it is refused.
WHOLE = {"Glm4MoeLiteForCausalLM"}


@pytest.mark.parametrize(
    "architecture", [name for name in REGISTRY if name.endswith("CausalLM") and name not in WHOLE]
)
def test_a_part_of_the_head_is_rotated_if_transformers_does_so(architecture):
    """A config.json may name partial_rotary_factor without."""
    model = getattr(transformers, architecture)
    more = {"num_hidden_layers": 4, "architectures": [architecture], **MORE.get(architecture, {})}
    option = {"GPTNeoXForCausalLM": "rotary_pct"}.get(architecture, "partial_rotary_factor")
    whole, part = (
        build(model.config_class(**{option: factor}, **more), dtype="float32")
        for factor in (1.0, 0.25)
    )
    code = inspect.getsource(inspect.getmodule(model))
    assert (whole.config.ropes != part.config.ropes) == ("partial_rotary_factor" in code)


def test_a_config_that_was_not_read_from_a_file_has_its_rope():
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    trained = {"original_max_position_embeddings": 64}
    beside = build(llama(rope_parameters=dict(yarn), **trained), dtype="float32")
    inside = build(llama(rope_parameters=yarn | trained), dtype="float32")
    assert beside.config.ropes == inside.config.ropes

    old = {"type": "linear", "rope_theta": 1e4, "factor": 4.0}
    assert build(llama(rope_parameters=old), dtype="float32").config.ropes[0].kind == "linear"


def test_max_model_len_must_be_positive():
    with pytest.raises(ValueError, match="max_model_len is 0"):
        build(llama(), dtype="float32", max_model_len=0)


def test_longrope_with_the_wrong_number_of_factors_is_refused():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0],
        "long_factor": [1.0],
    }
    with pytest.raises(ValueError, match="needs 4 factors for 8 dimensions, short_factor has 1"):
        build(llama(rope_parameters=rope), dtype="float32", max_model_len=64)


def test_bidirectional_gemma_is_refused():
    config = transformers.Gemma3TextConfig(
        use_bidirectional_attention=True, architectures=["Gemma3ForCausalLM"]
    )
    with pytest.raises(ValueError, match="use_bidirectional_attention"):
        build(config, dtype="float32")


def test_a_fresh_model_allocates_nothing():
    seventy_billion = llama(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
    )
    model = build(seventy_billion, dtype="bfloat16")
    leaves = jax.tree.leaves(nnx.state(model))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert sum(leaf.size for leaf in leaves) == 70_553_706_496  # of Llama 3.1 70B
    config = model.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (80, 64, 8)
    assert (config.head_dim, config.vocab_size, config.hidden_size) == (128, 128256, 8192)
