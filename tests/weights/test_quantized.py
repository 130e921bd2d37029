"""Quantised checkpoints, read as floats and as quantised layers: the values that were written, exactly."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh

from jaxpage.checkpoint_config import load_hf_config
from jaxpage.models.decoder import CausalLM
from jaxpage.models.registry import build, weight_map
from jaxpage.models.sources import Source
from jaxpage.weights.dummy import initialise
from jaxpage.weights.load import load, quantization_of_checkpoint
from jaxpage.weights.quantization import quantization_of
from jaxpage.weights.quantized import unpacked
from jaxpage.weights.quantized_layers import declare, quantized_weights
from jaxpage.weights.safetensors import open_checkpoint
from jaxpage.weights.spec import specs, variables
from pallas_kernels.quant_matmul.quantized import QuantizedWeight
from pallas_kernels.quant_matmul.reference import dequantize
from tests import checkpoints, mixtures
from tests.quantized_checkpoints import FORMATS, write

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}


@jax.jit
def dequantized(weight: QuantizedWeight) -> jax.Array:
    """Of a layer, or of its experts."""
    return dequantize(weight) if weight.data.ndim == 2 else jax.vmap(dequantize)(weight)


# Read as floats: groups whose inputs are not adjacent, 8 bits with zeros.
AS_FLOATS = {name for name in FORMATS if "act-order" in name} | {"ct-w8a16-asym"}
FAST = {"awq-g32", "gptq-4-asym", "fp8-block", "ct-w4a16-asym"}
NO_CONFIG = "gptq-4-quantize-config"  # config.json does not say anything


def formats():
    for name in FORMATS:
        if name != NO_CONFIG:
            yield pytest.param(name, marks=() if name in FAST else pytest.mark.slow)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return checkpoints.build("qwen2", 0, tmp_path_factory.mktemp("qwen2"), **SIZES)


def abstract(folder: Path, mesh: Mesh | None = None) -> CausalLM:
    """The model with the layers that the checkpoint has quantised."""
    hf_config = load_hf_config(str(folder))
    model = build(hf_config, dtype="float32", max_model_len=64)
    quantization = quantization_of_checkpoint(model.config, hf_config, folder)
    assert quantization is not None
    declare(model, quantization, mesh)
    return model


def values(model: CausalLM, part: str = "") -> dict[str, np.ndarray]:
    """Each parameter whose path contains `part`, in floats, quantised weights dequantised."""
    arrays = {path: x.get_value() for path, x in variables(model).items() if part in path}
    for paths in quantized_weights(arrays):
        scale, zero = arrays.pop(paths.scale), arrays.pop(paths.zero, None)
        weight = QuantizedWeight(data=arrays[paths.data], scale=scale, zero=zero)
        arrays[paths.data] = dequantized(weight)
    return {path: np.asarray(array) for path, array in arrays.items()}


def expected(model: CausalLM, paths: Iterable[str], written: dict[str, np.ndarray]):
    """The parameters with these names, from what was written."""
    places = weight_map(model.config)
    found = {}
    for path in paths:
        place = places.get(path, Source(path))
        assert isinstance(place, Source)
        found[path] = written[place.tensor][place.start : place.stop]
    return found


def assert_equal(model: CausalLM, written: dict[str, np.ndarray]) -> None:
    got = values(model)
    for path, array in expected(model, got, written).items():
        np.testing.assert_array_equal(got[path], array, err_msg=path)


@pytest.mark.parametrize("name", list(formats()))
def test_values_are_those_that_were_written(name, source, tmp_path):
    written = write(source, tmp_path, FORMATS[name], shards=2)
    floats = load(build(load_hf_config(str(tmp_path)), dtype="float32"), tmp_path, use_tqdm=False)
    assert not quantized_weights(specs(floats))
    assert_equal(floats, written)
    model = load(abstract(tmp_path), tmp_path, use_tqdm=False)
    assert len(quantized_weights(specs(model))) == (0 if name in AS_FLOATS else 7)
    assert_equal(model, written)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("name", ["awq-g128", "ct-w4a16-channel", "fp8-block", "ct-w8a8"])
def test_devices_have_their_shares(name, num_devices, source, tmp_path):
    written = write(source, tmp_path, FORMATS[name])
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("tensor",))
    model = load(abstract(tmp_path, mesh), tmp_path, mesh=mesh, use_tqdm=False)
    wanted = specs(model)
    for path, variable in variables(model).items():
        assert variable.get_value().sharding == wanted[path].sharding(mesh), path
    down = wanted["model.layers.0.mlp.down_proj.weight"]
    shape = down.sharding(mesh).shard_shape(down.shape)
    assert shape == (down.shape[0], down.shape[1] // num_devices)
    assert_equal(model, written)


def test_layers_that_are_divided_into_too_small_groups_are_on_every_device(source, tmp_path):
    # 256 inputs of o_proj on 8 devices would be a pair of groups of 16 on each.
    write(source, tmp_path, FORMATS["awq-g128"])
    mesh = Mesh(np.array(jax.devices()[:8]), ("tensor",))
    described = specs(abstract(tmp_path, mesh))
    scale = described["model.layers.0.self_attn.o_proj.scale"]
    assert scale.shape == (2, 256)
    assert scale.sharding(mesh).is_fully_replicated


@pytest.mark.parametrize("name", ["phi3", "qwen3_moe"])
@pytest.mark.parametrize("format", ["gptq-4-asym", "fp8-block"])
def test_fused_tensors_and_experts(name, format, tmp_path_factory):
    """Rows of a quantised tensor are a quantised layer, and so are the tensors of all experts."""
    sizes = SIZES | ({"moe_intermediate_size": 128} if name in mixtures.VARIANTS else {})
    kind = mixtures if name in mixtures.VARIANTS else checkpoints
    source, target = (tmp_path_factory.mktemp(each) for each in ("source", "target"))
    kind.build(name, 0, source, **sizes)
    written = write(source, target, FORMATS[format])
    floats = load(build(load_hf_config(str(target)), dtype="float32"), target, use_tqdm=False)
    model = load(abstract(target), target, use_tqdm=False)
    held = quantized_weights(specs(model))
    layer = "model.layers.0.mlp"
    # o_proj of this Qwen3 has half a block of inputs, and stays as floats.
    assert len(held) == (7 if name == "phi3" else 5 if format == "fp8-block" else 6)
    assert (f"{layer}.experts.down_proj" in [paths.data for paths in held]) == (name != "phi3")
    want = {path: np.asarray(each.get_value()) for path, each in variables(floats).items()}
    got = values(model)
    assert got.keys() == want.keys()
    for path, array in want.items():
        np.testing.assert_array_equal(got[path], array, err_msg=path)
    if name == "phi3":
        qkv = [want[f"model.layers.0.self_attn.{each}_proj.weight"] for each in "qkv"]
        np.testing.assert_array_equal(
            np.concatenate(qkv), written["model.layers.0.self_attn.qkv_proj.weight"]
        )
    else:
        down = written["model.layers.0.mlp.experts.1.down_proj.weight"]
        np.testing.assert_array_equal(want["model.layers.0.mlp.experts.down_proj"][1], down)


def test_exceptions_are_floats(source, tmp_path):
    layers = ["model.layers.0.mlp.down_proj", "model.layers.0.self_attn.k_proj"]
    written = write(source, tmp_path, FORMATS["awq-g32"], ignore=["lm_head", *layers])
    model = load(abstract(tmp_path), tmp_path, use_tqdm=False)
    assert len(quantized_weights(specs(model))) == 5
    assert_equal(model, written)
    # config.json need not list them: the tensors count.
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(abstract(tmp_path), tmp_path, use_tqdm=False)
    assert len(quantized_weights(specs(model))) == 5
    assert_equal(model, written)


@pytest.mark.parametrize(
    "name", ["awq-g32", pytest.param("gptq-8-g128", marks=pytest.mark.slow), "fp8-block"]
)
def test_random_weights_have_the_spread_of_those_that_are_not_quantised(name, source, tmp_path):
    write(source, tmp_path, FORMATS[name])
    model = abstract(tmp_path)
    stddev = variables(model)["model.embed_tokens.weight"].get_metadata()["init"].stddev
    (got,) = values(initialise(model, seed=0), "layers.0.mlp.down_proj.").values()
    assert np.isfinite(got).all()
    assert 0.8 * stddev < got.std() < 1.2 * stddev


def test_a_quantization_config_without_weights_makes_the_same_layers(source, tmp_path):
    write(source, tmp_path, FORMATS["awq-g32"])
    wanted = specs(abstract(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    assert specs(abstract(tmp_path)) == wanted


UNSUPPORTED = {
    "bits": {"quant_method": "gptq", "bits": 3, "group_size": 128},
    "version": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
    "marlin": {"quant_method": "gptq", "bits": 4, "group_size": 128, "is_marlin_format": True},
    "options": {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:a": {}}},
    "group": {"quant_method": "awq", "bits": 4, "group_size": 0},
    "no group": {"quant_method": "gptq", "bits": 4},
    "fmt": {"quant_method": "fp8", "fmt": "e5m2"},
    "method": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "mxfp4": {"quant_method": "mxfp4"},
    "no method": {"bits": 4},
    "fp4": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "tensor_group",
                    "group_size": 16,
                },
            }
        },
    },
    "empty": {"quant_method": "compressed-tensors"},
    "wrong types": {"quant_method": "compressed-tensors", "config_groups": {"group_0": 5}},
    "blocks": {"quant_method": "fp8", "weight_block_size": 128},
    "sizes of blocks": {"quant_method": "fp8", "weight_block_size": [0, 128]},
    "three sizes": {"quant_method": "fp8", "weight_block_size": [128, 128, 1]},
    "expression": {"quant_method": "fp8", "ignored_layers": ["re:*.lm_head"]},
    "no name": {"quant_method": "fp8", "ignored_layers": [None]},
    "rotated inputs": FORMATS["ct-w4a16"].config([])
    | {"transform_config": {"config_groups": {"R4": {"apply": [{"location": "input"}]}}}},
}


@pytest.mark.parametrize("config", list(UNSUPPORTED.values()), ids=list(UNSUPPORTED))
def test_what_is_not_supported_is_refused_from_the_config_alone(config, source):
    hf_config = load_hf_config(str(source), {"quantization_config": config})
    model = build(hf_config, dtype="float32")
    with pytest.raises(ValueError, match=r"the checkpoint is quantised \(.*not supported: "):
        quantization_of_checkpoint(model.config, hf_config, "nowhere")


@pytest.mark.parametrize("format", ["gptq-4-asym", "gptq-4-g32"])
def test_zeros_of_gptq_that_are_not_symmetric_are_refused_if_config_json_says_they_are(
    format, source, tmp_path
):
    write(source, tmp_path, FORMATS[format])
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["sym"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    if format == "gptq-4-g32":
        assert load(abstract(tmp_path), tmp_path, use_tqdm=False)
        return
    with pytest.raises(ValueError, match=r"qzeros has zeros from .*sym: false seems right"):
        load(abstract(tmp_path), tmp_path, use_tqdm=False)


DAMAGED = {
    "qzeros is missing": ("awq-g32", "qzeros", None, "lacks .*down_proj.qzeros"),
    "scale of fp8 is missing": ("fp8-block", "weight_scale_inv", None, "lacks its scale"),
    "scale of int8 is missing": ("ct-w8a8", "weight_scale", None, "lacks its scale"),
    "scales have another shape": ("awq-g32", "scales", np.s_[:-1], "512 inputs are not divided"),
    "zeros have another shape": ("awq-g32", "qzeros", np.s_[:, :-1], r"should be int32\[16, 32\]"),
    "scales are no matrix": ("awq-g32", "scales", np.s_[0:1, 0], "a matrix is expected"),
    "too few outputs": ("gptq-4-g32", "qweight", np.s_[:, :-8], r"scales is .*should be floats"),
    "half of a block": ("fp8-block", "weight_scale_inv", np.s_[:1], r"should be floats\[2, 4\]"),
    "half of the words": ("ct-w4a16", "weight_packed", np.s_[:, :32], r"config.json belongs"),
    "groups beyond the last": ("gptq-4-act-order", "g_idx", 99, "groups 99 to 99, but there are"),
}


@pytest.mark.parametrize(
    ("format", "suffix", "change", "message"), list(DAMAGED.values()), ids=list(DAMAGED)
)
def test_damage_is_found(format, suffix, change, message, source, tmp_path):
    write(source, tmp_path, FORMATS[format])
    file, name = tmp_path / "model.safetensors", f"model.layers.0.mlp.down_proj.{suffix}"
    tensors = {each: stored.read() for each, stored in open_checkpoint(tmp_path).items()}
    tensor = tensors.pop(name)
    if isinstance(change, int):
        tensors[name] = np.full_like(tensor, change)
    elif change is not None:
        tensors[name] = np.ascontiguousarray(tensor[change])
    safetensors.numpy.save_file(tensors, file)
    model = abstract(tmp_path)
    before = specs(model)
    with pytest.raises(ValueError, match=message):
        load(model, tmp_path, use_tqdm=False)
    if suffix != "g_idx":  # found in headers, before anything is read
        assert specs(model) == before
        assert all(
            isinstance(v.get_value(), jax.ShapeDtypeStruct) for v in variables(model).values()
        )


def test_a_config_that_does_not_belong_to_the_weights_is_refused(source, tmp_path):
    write(source, tmp_path, FORMATS["awq-g32"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["group_size"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError,
        match="scales for 16 groups of its 512 inputs, and config.json says groups of 64",
    ):
        load(abstract(tmp_path), tmp_path, use_tqdm=False)
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quantised, as it has .*hf_overrides"):
        load(build(load_hf_config(str(tmp_path)), dtype="float32"), tmp_path, use_tqdm=False)


@pytest.mark.parametrize(
    ("form", "kind", "message"),
    [
        ("ct-fp8-dynamic", "int", "as float8_e4m3fn, and config.json says int8"),
        ("ct-w8a8", "float", "as int8, and config.json says fp8_e4m3"),
    ],
)
def test_integers_are_not_read_as_fp8_nor_fp8_as_integers(form, kind, message, source, tmp_path):
    write(source, tmp_path, FORMATS[form])
    changed(tmp_path, type=kind)
    with pytest.raises(ValueError, match=f"_proj.weight is stored {message}"):
        load(abstract(tmp_path), tmp_path, use_tqdm=False)


@pytest.mark.parametrize(
    ("form", "other", "message"),
    [
        ("gptq-4-g128", "ct-fp8-dynamic", "is quantised to fp8 .* of the model to 4 bits"),
        ("ct-w8a16", "ct-fp8-dynamic", "is quantised to fp8 .* of the model to int8"),
        ("ct-w8a16", "awq-g128", "is quantised to 4 bits .* of the model to int8"),
    ],
)
def test_weights_in_other_numbers_than_the_models(form, other, message, source, tmp_path):
    for name in (form, other):
        write(source, tmp_path / name, FORMATS[name])
    with pytest.raises(ValueError, match=message):
        load(abstract(tmp_path / form), tmp_path / other, use_tqdm=False)


@pytest.mark.parametrize(
    ("form", "other", "message"),
    [
        ("ct-w8a8", "plain", "inputs that are not rounded to int8, and the model rounds them"),
        ("plain", "ct-w8a8", "inputs that are rounded to int8, and the model does not round"),
        ("gptq-8-g128", "ct-w8a8", "inputs that are rounded to int8, and the model does not round"),
        (
            "ct-w8a8",
            "ct-w8a16-channel",
            "inputs that are not rounded to int8, and the model rounds them",
        ),
        (
            "ct-w8a8",
            "gptq-8-g128",
            "inputs that are not rounded to int8, and the model rounds them",
        ),
        ("awq-g128", "awq-g32", r"scales for 16 groups .* of the model for 4"),
    ],
)
def test_weights_for_other_inputs_or_in_other_groups_than_the_models(
    form, other, message, source, tmp_path
):
    for name in (form, other):
        # "plain": W8A16 in the tensors of W8A8.
        kind = FORMATS.get(name, FORMATS["ct-w8a8"])
        write(source, tmp_path / name, kind)
        if name == "plain":
            without_input_activations(tmp_path / name)
    with pytest.raises(ValueError, match=message):
        load(abstract(tmp_path / form), tmp_path / other, use_tqdm=False)


def test_dynamic_is_another_name_for_groups_that_are_not_adjacent(source, tmp_path):
    written = write(source, tmp_path, FORMATS["ct-w4a16-act-order"])
    changed(tmp_path, actorder="dynamic")
    assert_equal(load(abstract(tmp_path), tmp_path, use_tqdm=False), written)


def changed(folder: Path, **how: Any) -> None:
    """Change what config.json says of weights in compressed-tensors."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= how
    (folder / "config.json").write_text(json.dumps(config))


def without_input_activations(folder: Path) -> None:
    """Say in config.json that weights in compressed-tensors are for inputs that are not rounded."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("pattern", "layer", "matches"),
    [
        ("Linear", "model.layers.0.mlp.up_proj", True),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("re:.*self_attn", "model.layers.0.self_attn.q_proj", True),
        ("re:self_attn", "model.layers.0.self_attn.q_proj", False),
        ("re:model.language_model.layers.0.mlp", "model.layers.0.mlp.up_proj", True),
        ("language_model.model.layers.1.mlp", "model.layers.1.mlp.up_proj", True),
        ("re:.*up_proj$", "model.layers.1.mlp.up_proj", True),
    ],
)
def test_patterns_of_exceptions(pattern, layer, matches):
    config = {"quant_method": "fp8", "ignored_layers": [pattern]}
    quantization = quantization_of(config)
    assert quantization is not None
    assert (quantization.format_of(layer) is None) == matches


def rewritten(folder: Path, change) -> None:
    """Replace the tensors of a checkpoint in a single file."""
    tensors = {name: stored.read() for name, stored in open_checkpoint(folder).items()}
    safetensors.numpy.save_file(change(tensors), folder / "model.safetensors")


def test_integers_with_a_scale_per_output_for_inputs_that_are_not_rounded(source, tmp_path):
    written = write(source, tmp_path, FORMATS["ct-w8a8"])
    without_input_activations(tmp_path)
    model = load(abstract(tmp_path), tmp_path, use_tqdm=False)
    assert specs(model)["model.layers.0.mlp.down_proj.scale"].shape == (4, 256)
    assert_equal(model, written)


def test_zeros_of_symmetric_weights_are_all_0(source, tmp_path):
    written = write(source, tmp_path, FORMATS["ct-w8a8"])

    def with_zeros(zero: int):
        return lambda tensors: (
            tensors
            | {
                name.replace("weight_scale", "weight_zero_point"): np.full(
                    scale.shape, zero, np.int8
                )
                for name, scale in tensors.items()
                if name.endswith("weight_scale")
            }
        )

    rewritten(tmp_path, with_zeros(0))
    assert_equal(load(abstract(tmp_path), tmp_path, use_tqdm=False), written)
    rewritten(tmp_path, with_zeros(3))
    with pytest.raises(ValueError, match="zeros of 3 to 3 .* wants it symmetric, with 0"):
        load(abstract(tmp_path), tmp_path, use_tqdm=False)


def test_a_config_without_groups_of_layers_is_refused(source, tmp_path):
    write(source, tmp_path, FORMATS["ct-w8a8"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["config_groups"] = {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"_proj is quantised, but .* says of no layer how"):
        load(abstract(tmp_path), tmp_path, use_tqdm=False)


def test_nothing_is_kept_of_a_checkpoint_that_could_not_be_loaded(source, tmp_path):
    write(source, tmp_path, FORMATS["gptq-4-act-order"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["desc_act"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="groups of inputs that are not adjacent"):
        load(abstract(tmp_path), tmp_path, use_tqdm=False)
    assert unpacked.cache_info().currsize == 0
