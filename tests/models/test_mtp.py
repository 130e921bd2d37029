"""An MTP layer computes what it computes in torch; end_to_end/test_mtp.py does the same in engines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from jaxpage.composition import spec_of_this_machine
from jaxpage.config import EngineConfig
from jaxpage.engine_spec import EngineSpec
from jaxpage.models.attention import DenseAttention
from jaxpage.models.eagle import FirstEagleHead
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.mtp import mtp_name
from jaxpage.start_up_log import draft_model_line
from jaxpage.weights.load import load
from jaxpage.weights.spec import specs
from tests import checkpoints, mixtures, picture_models
from tests.eagle_heads import Target
from tests.mtp_layers import AnyLayer, Layer
from tests.quantized_checkpoints import FORMATS, write, write_float

SIZES = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
SIZES |= mixtures.latent(128, 32, 32, 32, queries=128)


def spec_of(path: Path, *, model: Path | None = None, **options: Any) -> EngineSpec:
    """model: with the MTP layer, if it is not the engine's."""
    drafts: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 2}
    if model is not None:
        drafts["model"] = str(model)
    return spec_of_this_machine(
        EngineConfig(model=str(path), dtype="float32", speculative_config=drafts, **options)
    )


def loaded(path: Path, **options: Any) -> tuple[EngineSpec, Any]:
    """A spec, and its MTP layer with weights, as engines have it."""
    spec = spec_of(path, **options)
    _, drafts = spec.models
    load(drafts.model, drafts.folder, use_tqdm=False, hf_config=drafts.hf_config)
    spec.transform_weights()
    return spec, drafts.model


def proposed(head: FirstEagleHead, size: int) -> np.ndarray:
    """Hidden states of seven pairs."""
    embeds, hidden = np.random.default_rng(0).normal(size=(2, 7, size)).astype(np.float32)
    positions = jnp.arange(7)
    inputs = ForwardInput(
        token_ids=positions, positions=positions, attention=DenseAttention(positions)
    )
    states, features = head.propose(inputs, head.features(jnp.asarray(hidden)), embeds)
    assert states is features
    return np.asarray(states)


def torch_proposed(layer: AnyLayer, size: int) -> np.ndarray:
    embeds, hidden = np.random.default_rng(0).normal(size=(2, 7, size)).astype(np.float32)
    with torch.no_grad():
        return layer.of_pairs(torch.tensor(embeds), torch.tensor(hidden)).numpy()


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("deepseek_v3", 1),
        pytest.param("glm4_moe", 0, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 2, marks=pytest.mark.slow),
        pytest.param("glm4_moe", 1, marks=pytest.mark.slow),
        pytest.param("glm4_moe", 2, marks=pytest.mark.slow),
        pytest.param("glm4_moe_lite", 0, marks=pytest.mark.slow),
        pytest.param("glm4_moe_lite", 1, marks=pytest.mark.slow),
    ],
)
def test_its_hidden_states_are_those_of_torch(family, variant, tmp_path):
    path = mixtures.build(family, variant, tmp_path)
    layer = Layer(Target(path))
    _, head = loaded(layer.add_to(path))
    size = head.config.hidden_size
    np.testing.assert_allclose(proposed(head, size), torch_proposed(layer, size), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "kept"), [("fp8-block", ["eh_proj"]), ("ct-w4a16", [])])
def test_a_quantised_layer_has_the_values_of_its_weights(form, kept, tmp_path):
    """The map of pairs is left as floats in DeepSeek's own checkpoints."""
    path = mixtures.build("deepseek_v3", 0, tmp_path / "model", **SIZES)
    Layer(Target(path)).add_to(path)
    quantised, floats = tmp_path / "quantised", tmp_path / "floats"
    write_float(path, floats, write(path, quantised, FORMATS[form], ignore=("lm_head", *kept)))
    spec, head = loaded(quantised)
    of_layer = [name for name in specs(head) if name.endswith("scale")]
    assert len(of_layer) > 6 and any("eh_proj" in name for name in of_layer) == (not kept)
    assert spec.models[1].quantization == spec.config.quantization is not None
    _, expected = loaded(floats)
    np.testing.assert_allclose(proposed(head, 128), proposed(expected, 128), atol=2e-5)
    _, dequantised = loaded(quantised, quantization="dequantize")
    np.testing.assert_allclose(proposed(dequantised, 128), proposed(expected, 128), atol=2e-5)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """config.json alone: two layers, one of them with experts."""
    arguments = mixtures.VARIANTS["deepseek_v3"][0] | {"num_nextn_predict_layers": 1}
    folder = tmp_path_factory.mktemp("deepseek_v3")
    config = checkpoints.transformers.DeepseekV3Config(**(checkpoints.SMALL | arguments))
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.save_pretrained(folder)
    return folder


def changed(path: Path, folder: Path, **changes: Any) -> Path:
    """With other values in config.json."""
    folder.mkdir(exist_ok=True)
    values = json.loads((path / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_its_layer_is_counted_and_its_embedding_is_not(path):
    spec = spec_of(path)
    of_layer = {name for name in spec.weight_bytes if name.startswith("draft_model.")}
    prefix = "draft_model.model.layers.2."
    assert all(name.startswith(prefix) for name in of_layer)
    assert {
        f"{prefix}{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    } < of_layer
    assert not any("embed_tokens" in name or "head.head" in name for name in of_layer)
    drafts = spec.draft_model
    assert drafts is not None and drafts.pool.value_dim == spec.pool.value_dim == 16
    assert spec.block_bytes == 3 * spec.pool.bytes_per_block // 2
    assert spec.step_spec.feature_size == spec.model.config.hidden_size
    assert draft_model_line(spec, drafts).startswith("drafts    the MTP layer of ")


def test_it_is_rounded_to_int8_as_the_model_is(path):
    spec = spec_of(path, quantization="int8")
    spec.transform_weights()
    assert spec.draft_model is not None
    found = specs(spec.draft_model.model)
    assert found["model.layers.2.eh_proj.scale"].shape == (32,)
    assert found["model.layers.2.mlp.experts.down_proj_scale"].shape == (8, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nextn_predict_layers": 0}, "has no MTP layer: num_nextn_predict_layers is 0"),
        ({"num_nextn_predict_layers": None}, "has no MTP layer: num_nextn_predict_layers is None"),
        ({"num_nextn_predict_layers": "1"}, "has no MTP layer: num_nextn_predict_layers is '1'"),
        ({"first_k_dense_replace": 2}, "with experts, and the model is DeepseekV3ForCausalLM"),
    ],
)
def test_a_model_without_the_layer_is_refused(changes, message, path, tmp_path):
    with pytest.raises(ValueError, match=f"draft model of speculative_config: .*{message}"):
        spec_of(changed(path, tmp_path, **changes))


def test_what_overrides_config_json_decides_whether_there_is_one(path, tmp_path):
    without = changed(path, tmp_path, num_nextn_predict_layers=0)
    assert len(spec_of(without, hf_overrides={"num_nextn_predict_layers": 1}).models) == 2


def test_other_families_and_other_models_are_refused(path, tmp_path):
    llama = checkpoints.build("llama", 0, tmp_path / "llama")
    with pytest.raises(ValueError, match='method "mtp" is for DeepseekV3.* is LlamaForCausalLM'):
        spec_of(llama)
    larger = changed(path, tmp_path / "larger", num_hidden_layers=3)
    with pytest.raises(
        ValueError, match="DeepseekV3ForCausalLM with 3 layers of .* is another model"
    ):
        spec_of(path, model=larger)
    # Its decoder's config is one of several in config.json.
    made = picture_models.mistral3_config()
    made.architectures = ["Mistral3ForConditionalGeneration"]
    made.save_pretrained(tmp_path / "mistral3")
    with pytest.raises(ValueError, match="Mistral3.* with None layers of None is another model"):
        spec_of(path, model=tmp_path / "mistral3")


def test_what_its_checkpoint_lacks_is_said(path, tmp_path):
    folder = changed(path, tmp_path)
    save_file({"model.norm.weight": np.zeros(32, np.float32)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="no MTP layer: it lacks model.layers.2.enorm.weight"):
        spec_of(folder)
    (folder / "model.safetensors").unlink()
    (folder / "_METADATA").write_text("")
    with pytest.raises(ValueError, match="is an Orbax checkpoint, and MTP layers are read from"):
        spec_of(folder)
    # Another checkpoint may have it.
    assert spec_of(folder, model=path).models[1].folder == str(path)


def test_a_damaged_layer_is_said_to_be_the_layers(tmp_path):
    path = mixtures.build("deepseek_v3", 0, tmp_path)
    Layer(Target(path)).add_to(path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(
        ValueError, match="draft model of spec.* it lacks .*2.mlp.experts.3.up_proj"
    ):
        checkpoints.make_llm(
            path, speculative_config={"method": "mtp", "num_speculative_tokens": 2}
        )


@pytest.mark.parametrize(
    ("theirs", "is_used"),
    [
        ("model.layers.61.eh_proj.weight", True),
        ("model.layers.61.shared_head.norm.weight", True),
        ("model.layers.61.mlp.experts.7.down_proj.weight_scale_inv", True),
        ("model.layers.61.shared_head.head.weight", False),
        ("model.layers.61.embed_tokens.weight", False),
        ("model.layers.6.mlp.gate.weight", False),
        ("model.layers.62.eh_proj.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_names_of_tensors(theirs, is_used, path):
    config = spec_of(path).models[1].model.config
    config = replace(config, eagle=replace(config.eagle, mtp_layer=61))
    assert mtp_name(config, theirs) == (theirs if is_used else None)
