"""What configs of Nemotron-H say of layers, and which tensors are read. Logits are in `test_experts.py` and
`test_dense_families.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpage.checkpoint_config import load_hf_config
from jaxpage.models.config import ModelConfig
from jaxpage.models.registry import build, family
from jaxpage.models.rope import NO_ROPE
from jaxpage.models.taps import points
from jaxpage.weights.load import load
from jaxpage.weights.save import save
from jaxpage.weights.spec import variables
from jaxpage.weights.transform import join_projections
from tests import checkpoints, mixtures

# As Nemotron 3 Nano 30B-A3B was released.
NANO = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "attention_bias": False,
    "conv_kernel": 4,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "routed_scaling_factor": 2.5,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_limit": [0.0, float("inf")],
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131072,
}
FEW = NANO | {"num_hidden_layers": 4}


def config(folder: Path, values: dict[str, Any], **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values | changes))
    hf = load_hf_config(str(folder))
    return family(hf).config_from_hf(hf, dtype="bfloat16")


def test_a_released_config(tmp_path):
    found = config(tmp_path, NANO)
    mamba, experts = found.recurrent, found.experts
    assert mamba is not None and mamba.mamba is not None and experts is not None
    assert found.attention_layers == found.kv_layers == (5, 12, 19, 26, 33, 42)
    assert len(mamba.layers) == 23 and len(experts.layers) == 23 and found.num_layers == 52
    assert not {*mamba.layers} & {*experts.layers} and set(found.ropes) == {NO_ROPE}
    assert mamba.state_shape == (8, 128, 8 * 64)
    assert mamba.mamba.time_steps == (0.0, float("inf")) and mamba.mamba.convolution_bias
    assert (experts.num_experts, experts.experts_per_token, experts.shared_size) == (128, 6, 3712)
    assert experts.routing.factor == 2.5 and not experts.has_gate and experts.latent_size is None
    assert found.activation == "relu2" and found.norm_eps == 1e-5


def test_layers_of_older_configs_and_without_experts(tmp_path):
    assert config(tmp_path, FEW, hybrid_override_pattern="M-*-").mixers == (
        "recurrence",
        "mlp",
        "attention",
        "mlp",
    )
    listed = {name: value for name, value in FEW.items() if name != "hybrid_override_pattern"}
    found = config(tmp_path, listed, layers_block_type=["mamba", "attention", "moe", "mlp"])
    assert found.mixers == ("recurrence", "attention", "mlp", "mlp")
    assert found.experts is not None and found.experts.layers == (2,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": "M-ME"}, "and one full_attention; .* linear_attention, mlp"),
        ({"hybrid_override_pattern": "*-*E"}, "at least one linear_attention"),
        ({"mamba_num_heads": 60}, "60 heads cannot be in 8 equal groups; check mamba_num_heads"),
        ({"conv_kernel": 0}, "conv_kernel is 0 in config.json; it must be a positive integer"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'; supported is 'silu'"),
        ({"mlp_hidden_act": "tanh"}, "activation 'tanh'; supported are silu"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2 in config.json; supported is 1"),
        ({"n_routed_experts": 5}, "6 experts for each token of 5"),
        ({"time_step_limit": [0.1, 0.01]}, "the least time step is above the most; swap them"),
        ({"time_step_limit": [0.1]}, "it must be the least and the most time step"),
    ],
)
def test_what_is_not_supported_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, NANO, **changes)


def test_points_are_those_of_the_only_part_of_a_layer(tmp_path):
    names = points(config(tmp_path, FEW, hybrid_override_pattern="M-*E"))
    inside = {
        index: [
            name for name in names if name.startswith(f"blocks.{index}.") and "resid" not in name
        ]
        for index in range(4)
    }
    assert inside[0] == ["blocks.0.hook_attn_out"] and inside[1] == ["blocks.1.hook_mlp_out"]
    assert len(inside[2]) == 6 and "blocks.2.hook_mlp_out" not in inside[2] and not inside[3]


def values(path: Path) -> dict[str, np.ndarray]:
    model = build(checkpoints.config(path), dtype="float32")
    found = variables(load(model, path, use_tqdm=False))
    return {name: np.asarray(variable.get_value()) for name, variable in found.items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return mixtures.build("nemotron_h_moe", 1, tmp_path_factory.mktemp("nemotron_h"))


def test_names_of_released_checkpoints_and_in_memory_of_transformers(source, tmp_path):
    """Layers that predict further tokens are not loaded."""
    folder = Path(shutil.copytree(source, tmp_path / "copy"))
    stored = load_file(folder / "model.safetensors")
    assert all(name.startswith(("backbone.", "lm_head.")) for name in stored)
    renamed = {name.replace("backbone.", "model."): x for name, x in stored.items()}
    renamed["mtp.layers.0.norm.weight"] = np.zeros(64, np.float32)
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    expected, got = values(source), values(folder)
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


def test_what_is_saved_has_the_names_of_released_checkpoints(source, tmp_path):
    model = load(build(checkpoints.config(source), dtype="float32"), source, use_tqdm=False)
    saved = save(model, tmp_path / "saved", files=source, format="safetensors")
    stored, expected = (load_file(each / "model.safetensors") for each in (saved, source))
    assert stored.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(stored[name], array, err_msg=name)
    join_projections(model)
    with pytest.raises(ValueError, match=r"mixer\.in_proj\.weight .* what an engine made"):
        save(model, tmp_path / "joined", files=source, format="safetensors")
