"""Gemma 4 is released as a model for pictures, sound and text; its text part is served. What its configs may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from jaxpage.models.config import KVHeads
from jaxpage.models.registry import build
from jaxpage.weights.convert import convert
from jaxpage.weights.load import load
from tests import checkpoints, dense_families, picture_models
from tests.models import test_families as families

TOWERS = {
    "gemma4": {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "position_embedding_size": 64,
        },
        "audio_config": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [8, 4],
            "output_proj_dims": 16,
        },
    },
    "gemma4_unified": {"vision_config": None, "audio_config": None},
}
CONFIGS = {"gemma4": transformers.Gemma4Config, "gemma4_unified": transformers.Gemma4UnifiedConfig}


def config(kind: str, **text: Any) -> transformers.PretrainedConfig:
    arguments = dense_families.VARIANTS["gemma4"][0] | {"bos_token_id": 1, "eos_token_id": 2}
    sizes = {"vocab_size": checkpoints.VOCAB_SIZE, "intermediate_size": 72}
    if kind == "gemma4_unified":
        for name in ("hidden_size_per_layer_input", "vocab_size_per_layer_input"):
            arguments.pop(name)
    text = {"model_type": f"{kind}_text"} | arguments | sizes | text
    return CONFIGS[kind](text_config=text, **TOWERS[kind])


@pytest.fixture(params=TOWERS)
def path(request, tmp_path) -> Path:
    return picture_models.save(config(request.param), tmp_path / "hf", seed=request.param)


@pytest.mark.slow
def test_logits_of_text_are_those_of_transformers(path):
    token_ids = families.tokens(1, 100)
    with torch.no_grad():
        expected = picture_models.torch_model(path)(torch.tensor(token_ids)).logits.numpy()
    assert families.rms(expected) > 0.5
    found = families.logits(families.loaded(path), token_ids)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_tensors_of_keys_that_no_layer_has_are_not_read(tmp_path):
    """Released checkpoints have k_proj and the like in layers that read the keys of others."""
    from safetensors.numpy import save_file

    path = dense_families.build("gemma4", 0, tmp_path / "hf")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.4.self_attn.k_proj.weight"] = np.zeros((8, 32), np.float32)
    tensors["model.layers.4.self_attn.k_norm.weight"] = np.zeros(8, np.float32)
    save_file(tensors, path / "model.safetensors")
    model = build(checkpoints.config(path), dtype="float32")
    load(model, path)
    convert(path, tmp_path / "orbax")
    tensors["model.layers.2.self_attn.v_norm.weight"] = np.zeros(8, np.float32)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.2\.self_attn\.v_norm"):
        load(build(checkpoints.config(path), dtype="float32"), path)


def test_heads_that_are_alike_are_no_exception():
    def read(**text):
        made = config("gemma4", **text)
        made.architectures = ["Gemma4ForConditionalGeneration"]
        return build(made, dtype="float32").config

    assert read().full_heads == KVHeads(1, 16)
    assert read(global_head_dim=8).full_heads is None
    assert [read().kv_layer(layer) for layer in range(6)] == [0, 1, 2, 1, 1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "is_causal is false"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4 of 6 layers"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6 of 6 layers"),
    ],
)
def test_what_cannot_be_served_is_refused(text, message):
    made = config("gemma4", **text)
    made.architectures = ["Gemma4ForConditionalGeneration"]
    with pytest.raises(ValueError, match=message):
        build(made, dtype="float32")
