"""What configs of Granite 4 say of layers. Logits are in `test_dense_families.py` and `test_experts.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxpage.checkpoint_config import load_hf_config
from jaxpage.models.config import ModelConfig
from jaxpage.models.registry import family
from jaxpage.models.rope import NO_ROPE

# As released, with fewer layers.
GRANITE_4_TINY = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 512,
    "layer_types": [*["mamba"] * 5, "attention", *["mamba"] * 4],
    "logits_scaling": 6,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 10,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}


def config(folder: Path, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(GRANITE_4_TINY | changes))
    hf = load_hf_config(str(folder))
    return family(hf).config_from_hf(hf, dtype="bfloat16")


def test_a_released_config(tmp_path):
    found = config(tmp_path)
    sizes, experts = found.recurrent, found.experts
    assert sizes is not None and sizes.mamba is not None and experts is not None
    assert found.attention_layers == (5,) and sizes.layers == (0, 1, 2, 3, 4, 6, 7, 8, 9)
    assert sizes.state_shape == (1, 128, 48 * 64) and sizes.num_taps == 4
    assert sizes.mamba.convolution_bias and not sizes.mamba.projection_bias
    assert sizes.mamba.time_steps == (0.0, float("inf"))
    assert (experts.num_experts, experts.experts_per_token) == (64, 6)
    assert (experts.intermediate_size, experts.shared_size, experts.shared_gate) == (
        512,
        1024,
        False,
    )
    assert set(found.ropes) == {NO_ROPE}


def test_other_configs(tmp_path):
    dense = config(tmp_path, num_local_experts=0, position_embedding_type="rope")
    assert dense.experts is None and dense.intermediate_size == 1024
    assert NO_ROPE not in dense.ropes
    attention = config(tmp_path, layer_types=["attention"] * 10)
    assert attention.recurrent is None and attention.attention_layers == tuple(range(10))


def test_infinity_as_transformers_writes_it(tmp_path):
    found = config(tmp_path, time_step_limit=[0.5, {"__float__": "Infinity"}]).recurrent
    assert found is not None and found.mamba is not None
    assert found.mamba.time_steps == (0.5, float("inf"))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"layer_types": ["mamba"] * 10}, "for each of 10 layers, and at least one full_attention"),
        (
            {"layer_types": ["attention"] * 9 + ["sliding_attention"]},
            "layer_types must have linear_attention or full_attention .* has .*, sliding_attention",
        ),
        ({"mamba_n_groups": 5}, "48 heads cannot be in 5 equal groups; check mamba_n_heads"),
        ({"mamba_d_state": 0}, "mamba_d_state is 0 in config.json; it must be a positive integer"),
        ({"mamba_d_conv": None}, "mamba_d_conv is None in config.json"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu'"),
        ({"num_experts_per_tok": 65}, "65 experts for each token of 64"),
        (
            {"time_step_limit": [1.0, 0.5]},
            r"time_step_limit is .1.0, 0.5. in config.json: the least time step is above the most",
        ),
    ],
)
def test_what_does_not_exist_is_refused(changes, complaint, tmp_path):
    with pytest.raises(ValueError, match=complaint):
        config(tmp_path, **changes)
