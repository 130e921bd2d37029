"""What configs of Falcon-H1 say of layers, and the names of points in them. Logits are in `test_dense_families.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxpage.checkpoint_config import load_hf_config
from jaxpage.models.config import ModelConfig
from jaxpage.models.registry import build, family
from jaxpage.models.taps import points
from jaxpage.weights.load import load
from jaxpage.weights.save import save
from tests import checkpoints, dense_families

# As Falcon-H1-0.5B was released, with fewer layers.
SMALL = {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "attention_bias": False,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "attn_layer_indices": None,
    "embedding_multiplier": 5.656854249492381,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "key_multiplier": 0.39062499999999994,
    "lm_head_multiplier": 0.0390625,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "max_position_embeddings": 16384,
    "mlp_bias": False,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35],
    "ssm_out_multiplier": 0.23570226039551587,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32784,
}


def config(folder: Path, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(SMALL | changes))
    hf = load_hf_config(str(folder))
    return family(hf).config_from_hf(hf, dtype="bfloat16")


def test_a_released_config(tmp_path):
    found = config(tmp_path)
    sizes = found.recurrent
    assert sizes is not None and sizes.mamba is not None
    assert found.attention_layers == found.kv_layers == sizes.layers == (0, 1, 2, 3)
    assert sizes.state_shape == (1, 128, 24 * 64) and sizes.num_taps == 4
    assert sizes.mamba.factors == (0.35, 0.25, 0.35, 0.5, 0.35) and sizes.mamba.norm is None
    assert sizes.mamba.convolution_bias and not sizes.mamba.output_bias
    assert found.attention_scale == pytest.approx(0.390625 / 8)
    assert found.scales.mlp == (0.8838834764831844, 0.5859375)
    (rope,) = set(found.ropes)
    assert rope.inv_freq[1] == pytest.approx(1e11 ** (-2 / 64))


@pytest.mark.parametrize(
    ("changes", "norm"),
    [
        ({"mamba_rms_norm": True}, "gated"),
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "before the gate"),
        ({"mamba_norm_before_gate": True}, None),
    ],
)
def test_kinds_of_norms(changes, norm, tmp_path):
    sizes = config(tmp_path, **changes).recurrent
    assert sizes is not None and sizes.mamba is not None and sizes.mamba.norm == norm


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu'"),
        (
            {"mlp_multipliers": [1.0]},
            "mlp_multipliers has 1 numbers in config.json; it must have 2",
        ),
        ({"ssm_multipliers": [1.0] * 4}, "ssm_multipliers has 4 numbers .* must have 5"),
        ({"mamba_n_groups": 5}, "24 heads cannot be in 5 equal groups; check mamba_n_heads"),
        ({"mamba_d_conv": 0}, "mamba_d_conv is 0 in config.json; it must be a positive integer"),
        ({"time_step_limit": [1.0, 0.5]}, "the least time step is above the most; swap them"),
        *(
            ({f"{name}_multiplier": None}, f"{name}_multiplier is None in config.json; it must be")
            for name in ("key", "embedding", "lm_head", "attention_out", "ssm_in")
        ),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads is 0 in config.json"),
    ],
)
def test_what_is_not_supported_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **changes)


def test_points_are_those_of_attention_and_of_the_state(tmp_path):
    names = [name for name in points(config(tmp_path)) if name.startswith("blocks.3.")]
    assert len(names) == 10 and names[1] == "blocks.3.hook_state_out"
    assert {"blocks.3.attn.hook_z", "blocks.3.hook_attn_out", "blocks.3.hook_mlp_out"} < {*names}


def test_what_is_saved_has_the_names_of_released_checkpoints(tmp_path):
    source = dense_families.build("falcon_h1", 2, tmp_path / "source")
    model = load(build(checkpoints.config(source), dtype="float32"), source, use_tqdm=False)
    saved, stored = (
        load_file(folder / "model.safetensors")
        for folder in (save(model, tmp_path / "saved", files=source, format="safetensors"), source)
    )
    assert saved.keys() == stored.keys() and "model.final_layernorm.weight" in saved
    for name, array in stored.items():
        np.testing.assert_array_equal(saved[name], array, err_msg=name)
