"""What configs of Qwen3-Next and Qwen3.5 say of layers and RoPE. Logits are in `test_experts.py` and
`test_dense_families.py`, the weights of Qwen3-Next in `weights/test_interleaved.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3_5Config

from jaxpage.checkpoint_config import load_hf_config
from jaxpage.models.config import ModelConfig
from jaxpage.models.qwen3_5 import qwen3_5_config, qwen3_5_pictures_config
from jaxpage.models.registry import family

# As released.
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


def config(folder: Path, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(QWEN3_NEXT | changes))
    hf = load_hf_config(str(folder))
    return family(hf).config_from_hf(hf, dtype="bfloat16")


def test_a_released_config(tmp_path):
    found = config(tmp_path)
    delta, experts = found.recurrent, found.experts
    assert delta is not None and experts is not None
    assert found.attention_layers == tuple(range(3, 48, 4)) and len(delta.layers) == 36
    assert (delta.num_key_heads, delta.num_value_heads, delta.num_taps) == (16, 32, 4)
    assert experts.layers == tuple(range(48)) and experts.shares_add_up_to_one
    assert (experts.num_experts, experts.experts_per_token, experts.shared_size) == (512, 10, 512)
    assert experts.shared_gate and found.qk_norm is True and not found.qkv_bias
    # A quarter of a head, 32 pairs.
    assert all(len(rope.inv_freq) == 32 for rope in found.ropes)


def test_layers_of_other_kinds(tmp_path):
    changes = {"num_hidden_layers": 8, "full_attention_interval": 3, "decoder_sparse_step": 2}
    found = config(tmp_path, **changes, mlp_only_layers=[3], norm_topk_prob=False)
    assert found.attention_layers == (2, 5) and found.intermediate_size == 5120
    assert found.experts is not None
    assert found.experts.layers == (1, 5, 7) and not found.experts.shares_add_up_to_one
    kinds = ["full_attention", "linear_attention"] * 4
    dense = config(tmp_path, **changes, layer_types=kinds, mlp_only_layers=[1, 3, 5, 7])
    assert dense.attention_layers == (0, 2, 4, 6) and dense.experts is None
    assert config(tmp_path, **changes, num_experts=0).experts is None


def test_what_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Qwen3NextForCausalLM: 40 value heads cannot share 16"):
        config(tmp_path, linear_num_value_heads=40)
    with pytest.raises(ValueError, match="and both of them; config.json has full_attention"):
        config(tmp_path, full_attention_interval=1)
    with pytest.raises(ValueError, match="decoder_sparse_step is 0 in config.json"):
        config(tmp_path, decoder_sparse_step=0)
    with pytest.raises(ValueError, match="11 experts for each token of 10"):
        config(tmp_path, num_experts=10, num_experts_per_tok=11)


def test_the_text_part_leaves_what_pictures_need():
    """The order in which a config is read as text and with pictures does not matter."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [4, 2, 2]}
    text = {"num_hidden_layers": 4, "hidden_size": 96, "head_dim": 64, "rope_parameters": rope}
    hf = Qwen3_5Config(
        architectures=["Qwen3_5ForConditionalGeneration"],
        text_config=text,
        vision_config={"out_hidden_size": 96},
    )
    alone = qwen3_5_config(hf, dtype="float32")
    both = qwen3_5_pictures_config(hf, dtype="float32")
    assert {rope.sections for rope in alone.ropes} == {None}
    assert {tuple(map((rope.sections or ()).count, range(3))) for rope in both.ropes} == {(4, 2, 2)}
