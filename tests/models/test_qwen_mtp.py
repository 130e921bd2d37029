"""An MTP layer of Qwen computes what it computes in torch; end_to_end/test_qwen_mtp.py does the same in engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpage.kv_groups import Location
from jaxpage.start_up_log import draft_model_line
from jaxpage.weights.spec import specs
from tests import checkpoints, dense_families, mixtures, picture_models
from tests.eagle_heads import Target
from tests.models.test_mtp import changed, loaded, proposed, spec_of, torch_proposed
from tests.quantized_checkpoints import FORMATS, write, write_float
from tests.qwen_mtp_layers import QwenLayer

SIZES = {"hidden_size": 128, "intermediate_size": 256}
SIZES |= dense_families.qwen3_5(4, head_dim=32, heads=(2, 4), dims=(64, 64))
EXPERTS = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
LAYER = "model.layers.0"


def build(family: str, variant: int, folder: Path, **sizes: Any) -> Path:
    kind = mixtures if family in mixtures.VARIANTS else dense_families
    return kind.build(family, variant, folder, **sizes)


@pytest.mark.parametrize(
    ("family", "variant", "joined"),
    [
        ("qwen3_5", 0, False),
        ("qwen3_5_moe", 0, True),
        # In the other one the model's first layer has an MLP, so that this layer has one too.
        ("qwen3_next", 0, False),
        pytest.param("qwen3_next", 1, False, marks=pytest.mark.slow),
        pytest.param("qwen3_5", 1, False, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", 0, False, marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", 1, True, marks=pytest.mark.slow),
        pytest.param("qwen3_next", 0, True, marks=pytest.mark.slow),
    ],
)
def test_its_hidden_states_are_those_of_torch(family, variant, joined, tmp_path):
    path = build(family, variant, tmp_path)
    layer = QwenLayer(Target(path))
    spec, head = loaded(layer.add_to(path, joined=joined))
    size = head.config.hidden_size
    np.testing.assert_allclose(proposed(head, size), torch_proposed(layer, size), atol=1e-4)
    has_experts = spec.model.config.experts is not None and 0 in spec.model.config.experts.layers
    assert (head.config.experts is not None) == has_experts and head.config.recurrent is None


@pytest.mark.slow
@pytest.mark.parametrize("config", ["qwen3_5_config", "qwen3_5_moe_config"])
def test_a_model_that_takes_pictures_has_one_too(config, tmp_path):
    """And an engine of its text part may take the layer from there."""
    path = picture_models.save(getattr(picture_models, config)(), tmp_path / "both", seed="mtp")
    layer = QwenLayer(Target(path))
    spec, head = loaded(layer.add_to(path))
    assert spec.model.config.vision is not None and head.config.vision is None
    size = head.config.hidden_size
    np.testing.assert_allclose(proposed(head, size), torch_proposed(layer, size), atol=1e-4)
    values = json.loads((path / "config.json").read_text())
    text = values["text_config"] | {"architectures": [values["architectures"][0]]}
    text["architectures"] = [text["architectures"][0].replace("ConditionalGeneration", "CausalLM")]
    del text["mtp_num_hidden_layers"]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text(json.dumps(text))
    spec = spec_of(tmp_path / "text", model=path)
    assert spec.draft_model is not None and spec.draft_model.folder == str(path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize(
    ("form", "kept", "floats"),
    [
        # The map of pairs is left as floats in Qwen's own checkpoints.
        ("fp8-block", ["mtp.fc"], ["fc"]),
        # Names of the model's first layer, and of parts of this one.
        ("fp8-block", ["model.layers.0", "mtp.layers.0.self_attn"], ["self_attn"]),
        ("awq-g32", ["mtp"], ["fc", "self_attn", "mlp"]),
    ],
)
def test_a_quantised_layer_has_the_values_of_its_weights(family, form, kept, floats, tmp_path):
    sizes = SIZES | (EXPERTS if family != "qwen3_5" else {})
    if family == "qwen3_next":
        sizes |= {"rope_parameters": mixtures.PARTIAL}
    path = build(family, 0, tmp_path / "model", **sizes)
    QwenLayer(Target(path)).add_to(path)
    quantised, floating = tmp_path / "quantised", tmp_path / "floats"
    ignored = ("lm_head", "in_proj_a", "in_proj_b", "in_proj_ba", *kept)
    write_float(path, floating, write(path, quantised, FORMATS[form], ignore=ignored))
    spec, head = loaded(quantised)
    of_layer = [name for name in specs(head) if name.endswith("scale")]
    for part in ("fc", "self_attn", "mlp"):
        assert any(f".{part}." in name for name in of_layer) == (part not in floats)
    assert spec.models[1].quantization == spec.config.quantization is not None
    _, expected = loaded(floating)
    np.testing.assert_allclose(proposed(head, 128), proposed(expected, 128), atol=2e-5)
    _, dequantised = loaded(quantised, quantization="dequantize")
    np.testing.assert_allclose(proposed(dequantised, 128), proposed(expected, 128), atol=2e-5)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """config.json alone, of a model with experts; that of Qwen3-Next does not say that there is such a layer."""
    folder = tmp_path_factory.mktemp("qwen3_next")
    arguments = checkpoints.SMALL | mixtures.VARIANTS["qwen3_next"][0]
    config = checkpoints.transformers.Qwen3NextConfig(**arguments)
    config.architectures = ["Qwen3NextForCausalLM"]
    config.save_pretrained(folder)
    return folder


def test_its_layer_is_counted_and_has_its_place_in_each_block(path):
    spec = spec_of(path)
    of_layer = {name for name in spec.weight_bytes if name.startswith("draft_model.")}
    parts = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "self_attn.q_norm")
    assert {f"draft_model.{LAYER}.{name}.weight" for name in parts} < of_layer
    assert all(name.startswith(f"draft_model.{LAYER}.") for name in of_layer)
    drafts = spec.draft_model
    assert drafts is not None and drafts.layer_locations == (Location(0, 0),)
    # One of the model's four layers has keys and values.
    assert spec.block_bytes == 2 * spec.pool.bytes_per_block
    assert spec.step_spec.feature_size == spec.model.config.hidden_size
    assert draft_model_line(spec, drafts).startswith("drafts    the MTP layer of ")


def test_it_is_rounded_to_int8_as_the_model_is(path):
    spec = spec_of(path, quantization="int8")
    spec.transform_weights()
    assert spec.draft_model is not None
    found = specs(spec.draft_model.model)
    assert found[f"{LAYER}.fc.scale"].shape == (32,)
    assert found[f"{LAYER}.mlp.experts.down_proj_scale"].shape == (6, 32)
    # Queries of four heads of 16 with gates, keys and values of two.
    assert found[f"{LAYER}.self_attn.qkv_proj.scale"].shape == (2 * 64 + 2 * 32,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mtp_num_hidden_layers": 0}, "has no MTP layer: mtp_num_hidden_layers is 0"),
        ({"mtp_num_hidden_layers": None}, "has no MTP layer: mtp_num_hidden_layers is None"),
        ({"num_nextn_predict_layers": 0}, "has no MTP layer: num_nextn_predict_layers is 0"),
        ({"mtp_use_dedicated_embeddings": True}, "Qwen3NextFor.*mtp_use_dedicated_embeddings"),
    ],
)
def test_a_model_without_the_layer_is_refused(changes, message, path, tmp_path):
    with pytest.raises(ValueError, match=f"draft model of speculative_config: .*{message}"):
        spec_of(changed(path, tmp_path, **changes))


def test_other_models_are_refused(path, tmp_path):
    larger = changed(path, tmp_path / "larger", num_hidden_layers=8, layer_types=None)
    with pytest.raises(
        ValueError, match="Qwen3NextForCausalLM with 8 layers of 32 is another model"
    ):
        spec_of(path, model=larger)
    wider = changed(path, tmp_path / "wider", hidden_size=64)
    with pytest.raises(ValueError, match="with 4 layers of 64 is another .* with 4 of 32,"):
        spec_of(path, model=wider)
    other = changed(path, tmp_path / "other", architectures=["Qwen3_5MoeForCausalLM"])
    with pytest.raises(
        ValueError, match="Qwen3_5MoeForCausalLM with 4 layers of 32 is another model"
    ):
        spec_of(path, model=other)


def test_what_its_checkpoint_lacks_is_said(path, tmp_path):
    folder = changed(path, tmp_path)
    save_file({"model.norm.weight": np.zeros(32, np.float32)}, folder / "model.safetensors")
    lacks = "no MTP layer: it lacks mtp.pre_fc_norm_hidden.weight"
    with pytest.raises(ValueError, match=rf"{lacks}\. Some converters"):
        spec_of(folder)
    changed(folder, folder, mtp_num_hidden_layers=1)
    with pytest.raises(ValueError, match=f"{lacks}, although mtp_num_hidden_layers is 1"):
        spec_of(folder)


@pytest.mark.slow
def test_a_further_layer_is_not_read_and_one_that_lacks_a_tensor_is_said(tmp_path):
    path = build("qwen3_5", 0, tmp_path)
    QwenLayer(Target(path)).add_to(path)
    tensors = load_file(path / "model.safetensors")
    further = {
        name.replace("layers.0", "layers.1"): 2 * x
        for name, x in tensors.items()
        if name.startswith("mtp.layers.0.")
    }
    expected = proposed(loaded(path)[1], 32)
    save_file(tensors | further, path / "model.safetensors")
    np.testing.assert_array_equal(proposed(loaded(path)[1], 32), expected)
    save_file(
        tensors | {"mtp.hnorm.weight": tensors["mtp.norm.weight"]}, path / "model.safetensors"
    )
    with pytest.raises(ValueError, match="it has mtp.hnorm.weight, which the model does not know"):
        loaded(path)
    del tensors["mtp.layers.0.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match="it lacks mtp.layers.0.mlp.up_proj.weight"):
        loaded(path)
