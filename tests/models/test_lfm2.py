"""What configs of LFM2 say of layers, and which tensors are read and written. Logits are in `test_experts.py` and
`test_dense_families.py`.
"""

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
from jaxpage.weights.spec import variables
from jaxpage.weights.transform import join_projections
from tests import checkpoints, mixtures

# As LFM2-1.2B was released.
DENSE = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 65536,
}
# As LFM2-8B-A1B was, with fewer layers.
MOE = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "model_type": "lfm2_moe",
    "conv_L_cache": 3,
    "conv_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "layer_types": [*["conv"] * 2, "full_attention", *["conv"] * 3],
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "torch_dtype": "bfloat16",
    "use_expert_bias": True,
    "vocab_size": 65536,
}


def config(folder: Path, values: dict[str, Any], **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values | changes))
    hf = load_hf_config(str(folder))
    return family(hf).config_from_hf(hf, dtype="bfloat16")


def test_a_released_config(tmp_path):
    found = config(tmp_path, DENSE)
    sizes = found.recurrent
    assert sizes is not None and not sizes.has_matrix and not sizes.convolution_bias
    assert found.attention_layers == found.kv_layers == (2, 5, 8, 10, 12, 14)
    assert len(sizes.layers) == 10 and (sizes.num_channels, sizes.num_taps) == (2048, 3)
    assert found.intermediate_size == 8192 and found.experts is None
    assert found.qk_norm is True and found.tie_word_embeddings and found.head_dim == 64
    (rope,) = set(found.ropes)
    assert rope.inv_freq[1] == pytest.approx(1e6 ** (-2 / 64))
    assert "blocks.0.hook_attn_out" in points(found)
    assert "blocks.0.attn.hook_z" not in points(found)


def test_a_released_config_with_experts(tmp_path):
    found = config(tmp_path, MOE)
    sizes, experts = found.recurrent, found.experts
    assert sizes is not None and sizes.layers == (0, 1, 3, 4, 5)
    assert experts is not None and experts.layers == (2, 3, 4, 5)
    assert (experts.num_experts, experts.experts_per_token) == (32, 4)
    assert experts.intermediate_size == 1792 and found.intermediate_size == 7168
    routing = experts.routing
    assert routing.scores == "sigmoid" and routing.has_correction and routing.added_to_sum == 1e-6
    assert config(tmp_path, MOE, num_dense_layers=6).experts is None


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"block_ffn_dim_multiplier": 1.1}, 9216),
        ({"block_multiple_of": 1000}, 9000),
        ({"block_auto_adjust_ff_dim": False}, 12288),
        ({"block_ff_dim": 1000, "block_multiple_of": 1}, 666),
    ],
)
def test_the_size_of_an_mlp_is_that_of_transformers(changes, size, tmp_path):
    from transformers import Lfm2Config
    from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

    assert config(tmp_path, DENSE, **changes).intermediate_size == size
    small = DENSE | {"hidden_size": 4} | changes
    assert Lfm2MLP(Lfm2Config(**small)).w1.weight.shape == (size, 4)


def test_options_that_transformers_ignores_change_nothing(tmp_path):
    plain = config(tmp_path, DENSE)
    assert config(tmp_path, DENSE, attention_bias=True, mlp_bias=True, hidden_act="gelu") == plain
    untied = config(tmp_path, DENSE, tie_embedding=False)
    assert not untied.tie_word_embeddings


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (DENSE, {"full_attn_idxs": []}, "for each of 16 layers, and at least one full_attention"),
        (MOE, {"layer_types": None}, "Lfm2MoeForCausalLM: layer_types .* config.json has none"),
        (MOE, {"layer_types": ["full_attention"] * 5 + ["mamba"]}, "must have conv or full_att"),
        (DENSE, {"conv_L_cache": 0}, "conv_L_cache is 0 in config.json; it must be a positive"),
        (DENSE, {"block_multiple_of": 0}, "block_multiple_of is 0 in config.json"),
        (DENSE, {"block_ffn_dim_multiplier": -1.0}, "MLPs of -8192 from .* of 12288 and .* -1.0"),
        (DENSE, {"block_ff_dim": 1}, r"MLPs of 0 from an intermediate_size \(block_ff_dim\) of 1"),
        (
            DENSE,
            {"block_auto_adjust_ff_dim": False, "block_ff_dim": 0},
            "intermediate_size is 0 in config.json",
        ),
        (MOE, {"num_experts": 3}, "4 experts for each token of 3"),
    ],
)
def test_what_is_not_supported_is_refused(values, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, values, **changes)


def test_what_is_saved_has_the_names_of_released_checkpoints(tmp_path):
    source = mixtures.build("lfm2_moe", 0, tmp_path / "source")
    model = load(build(checkpoints.config(source), dtype="float32"), source, use_tqdm=False)
    stored = load_file(source / "model.safetensors")
    mixed = stored["model.layers.0.conv.in_proj.weight"]
    found = {name: np.asarray(each.get_value()) for name, each in variables(model).items()}
    for part, rows in zip("BCx", np.split(mixed, 3), strict=True):
        np.testing.assert_array_equal(found[f"model.layers.0.conv.in_proj_{part}.weight"], rows)
    saved = load_file(
        save(model, tmp_path / "saved", files=source, format="safetensors") / "model.safetensors"
    )
    assert saved.keys() == stored.keys() and "model.layers.1.feed_forward.expert_bias" in saved
    for name, array in stored.items():
        np.testing.assert_array_equal(saved[name], array, err_msg=name)
    join_projections(model)
    with pytest.raises(ValueError, match=r"conv\.in_proj\.weight .* what an engine made"):
        save(model, tmp_path / "joined", files=source, format="safetensors")
