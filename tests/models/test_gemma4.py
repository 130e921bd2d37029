"""Gemma 4 is released as a model for pictures, sound and text; its text part is served. What its configs may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jaxpage.models.config import KVHeads
from jaxpage.models.lora import attach_adapters
from jaxpage.models.registry import build
from jaxpage.weights.adapters import adapter_reader
from jaxpage.weights.convert import convert
from jaxpage.weights.load import load
from jaxpage.weights.save import save
from jaxpage.weights.spec import specs
from tests import checkpoints, dense_families, mixtures, picture_models
from tests.adapters import save_adapter
from tests.models import test_families as families
from tests.quantized_checkpoints import FORMATS, write
from tests.weights.test_experts import copy_with, loaded, separated, tensors
from tests.weights.test_quantized import abstract, values

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
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 8,
}
ONE_ROPE = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
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
    return picture_models.save(
        config(request.param), tmp_path / "hf", seed=f"text of {request.param}"
    )


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


def test_adapters_of_keys_that_no_layer_has_change_nothing(tmp_path):
    """Trained where these layers had modules for them."""
    path = dense_families.build("gemma4", 0, tmp_path / "hf")
    adapter = save_adapter(tmp_path / "adapter", path, seed=0)
    model = build(checkpoints.config(path), dtype="float32")
    attach_adapters(model, num_slots=1, rank=4, mesh=None)
    read = adapter_reader(model, num_slots=1, max_rank=4)
    expected = read(str(adapter))
    halves = load_file(adapter / "adapter_model.safetensors")
    layer = "base_model.model.model.layers.4.self_attn.k_proj"
    halves[f"{layer}.lora_A.weight"] = np.ones((4, 32), np.float32)
    halves[f"{layer}.lora_B.weight"] = np.ones((8, 4), np.float32)
    save_file(halves, adapter / "adapter_model.safetensors")
    for ours, theirs in zip(read(str(adapter)), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_experts_of_a_layer_may_be_one_tensor_or_many(tmp_path):
    """Gemma 4: what was released, and a tensor for each projection, as tools write that quantise experts."""
    released = mixtures.build("gemma4_moe", 1, tmp_path / "hf")
    stored = tensors(released)
    experts = {name: array for name, array in stored.items() if ".experts." in name}
    assert len(experts) == 6 and experts["model.layers.0.experts.down_proj"].shape == (5, 32, 16)
    others = {name: array for name, array in stored.items() if name not in experts}
    path = copy_with(released, tmp_path / "separate", others | separated(experts))
    model: Any = loaded(path)
    expected: Any = loaded(released)
    got, expected = values(model), values(expected)
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array)
    save(model, tmp_path / "saved", files=path, format="safetensors")
    saved = tensors(tmp_path / "saved")
    assert saved.keys() == stored.keys()
    for name, array in stored.items():
        np.testing.assert_array_equal(saved[name], array)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awq-g32", "fp8-block"])
def test_quantised_weights_stay_packed(name, tmp_path):
    """Of experts, of layers without keys or values of their own, and of what embeddings for layers go through."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
    sizes |= {"hidden_size_per_layer_input": 32, "head_dim": 32, "global_head_dim": 64}
    source = mixtures.build("gemma4_moe", 0, tmp_path / "hf", num_kv_shared_layers=3, **sizes)
    stored = tensors(source)
    experts = {name: stored.pop(name) for name in list(stored) if ".experts." in name}
    source = copy_with(source, tmp_path / "separate", stored | separated(experts))
    folder = tmp_path / "packed"
    write(source, folder, FORMATS[name])
    model = load(abstract(folder), folder, use_tqdm=False)
    scales = {path for path in specs(model) if path.endswith("scale")}
    layer = "model.layers.5"
    assert f"{layer}.moe.experts.gate_up_proj_scale" in scales
    assert f"{layer}.self_attn.q_proj.scale" in scales
    floats = load(build(checkpoints.config(folder), dtype="float32"), folder, use_tqdm=False)
    found = values(model)
    for path, array in values(floats).items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)


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
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "4 query heads .* 3 KV heads",
        ),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 0},
            "4 query heads .* 0 KV heads",
        ),
        ({"vocab_size_per_layer_input": 100}, "of 100 tokens, and vocab_size is 250"),
        ({"hidden_size_per_layer_input": -1}, "embeddings for layers are -1 wide"),
        ({"enable_moe_block": True}, "num_experts is None"),
        (EXPERTS | {"moe_intermediate_size": None}, "moe_intermediate_size is None"),
        (EXPERTS | {"top_k_experts": 0}, "top_k_experts is 0"),
        ({"rope_parameters": ONE_ROPE}, "rope_parameters has nothing for sliding_attention"),
    ],
)
def test_what_cannot_be_served_is_refused(text, message):
    made = config("gemma4", **text)
    made.architectures = ["Gemma4ForConditionalGeneration"]
    with pytest.raises(ValueError, match=message):
        build(made, dtype="float32")
