"""Experts of quantised checkpoints: their parameters are the packed ones, with the values that were written."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh

from jaxpage.checkpoint_config import load_hf_config
from jaxpage.models.registry import build
from jaxpage.ops.experts import ExpertsKernel
from jaxpage.ops.implementations import Choice
from jaxpage.weights.dummy import initialise
from jaxpage.weights.load import load
from jaxpage.weights.quantized_layers import quantized_weights
from jaxpage.weights.save import save
from jaxpage.weights.spec import specs, variables
from jaxpage.weights.transform import choose_experts
from tests import mixtures, picture_models
from tests.quantized_checkpoints import FORMATS, write
from tests.weights.test_experts import copy_with, separated, tensors
from tests.weights.test_quantized import abstract, values

SIZES = {
    "hidden_size": 256,
    "head_dim": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}
EXPERTS = "model.layers.0.mlp.experts"
# A weight's bytes of data, its groups' size as kernels have it (None: scales of outputs), whether it has zeros.
PACKED = {
    "awq-g128": (0.5, 128, True),
    "awq-g32": (0.5, 32, True),
    "gptq-4-g128": (0.5, 128, False),
    "gptq-8-g128": (1, 128, False),
    "fp8-tensor": (1, None, False),
    "fp8-block": (1, 128, False),
    "ct-w4a16": (0.5, 128, False),
    "ct-w8a8": (1, None, False),
    "ct-w8a16": (1, 128, False),
    "ct-fp8-dynamic": (1, None, False),
}
FAST = {"awq-g32", "fp8-block"}


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def source(request, tmp_path_factory):
    """The second has other names of tensors."""
    folder = tmp_path_factory.mktemp(request.param)
    return mixtures.build(request.param, 0, folder, **SIZES)


def of_experts(found: dict) -> dict:
    return {path: each for path, each in found.items() if path.startswith(EXPERTS)}


def assert_as_floats(model, folder) -> None:
    """The experts' values, to the bit those of the same checkpoint dequantised when it is loaded."""
    floats = load(build(load_hf_config(str(folder)), dtype="float32"), folder, use_tqdm=False)
    got, want = of_experts(values(model)), of_experts(values(floats))
    assert got.keys() == want.keys() == {f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"}
    for path, array in want.items():
        np.testing.assert_array_equal(got[path], array, err_msg=path)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in FAST else pytest.mark.slow) for each in PACKED]
)
def test_experts_stay_packed(name, source, tmp_path):
    write(source, tmp_path, FORMATS[name], shards=2)
    model = load(abstract(tmp_path), tmp_path, use_tqdm=False)
    assert_as_floats(model, tmp_path)
    arrays = {path: each.get_value() for path, each in variables(model).items()}
    num_experts = len(arrays[f"{EXPERTS}.down_proj"])
    bytes_of_one, group_size, has_zeros = PACKED[name]
    for weight, num_out in (("gate_up_proj", 512), ("down_proj", 256)):
        num_groups = 1 if group_size is None else 256 // group_size
        expected = 256 * num_out * bytes_of_one + num_groups * num_out * (4 + has_zeros)
        parts = [arrays.get(f"{EXPERTS}.{weight}{part}") for part in ("", "_scale", "_zero")]
        assert sum(part.nbytes for part in parts if part is not None) == num_experts * expected


@pytest.mark.parametrize("name", ["gptq-4-act-order", "ct-w8a16-asym"])
def test_what_cannot_stay_packed_is_dequantised(name, source, tmp_path):
    write(source, tmp_path, FORMATS[name])
    model = load(abstract(tmp_path), tmp_path, use_tqdm=False)
    assert not of_experts({paths.data: paths for paths in quantized_weights(specs(model))})
    assert_as_floats(model, tmp_path)


@pytest.mark.slow
def test_experts_of_a_model_that_takes_pictures_stay_packed(tmp_path):
    """Qwen3-VL, whose floats are in one tensor, and what is quantised in one for each projection."""
    config = picture_models.qwen3_vl_moe_config(out_hidden_size=128)
    # Whole groups of inputs.
    text = config.text_config
    text.hidden_size, text.num_attention_heads = 128, 8
    text.intermediate_size = text.moe_intermediate_size = 64
    source = picture_models.save(config, tmp_path / "source", seed="packed")
    stored = tensors(source)
    experts = {name: stored.pop(name) for name in list(stored) if ".experts." in name}
    source = copy_with(source, tmp_path / "separate", stored | separated(experts))
    write(source, tmp_path / "packed", FORMATS["awq-g32"], ignore=["lm_head", "visual"])
    model = load(abstract(tmp_path / "packed"), tmp_path / "packed", use_tqdm=False)
    assert model.model.layers[0].mlp.experts.gate_up_proj[...].dtype == np.uint8
    assert_as_floats(model, tmp_path / "packed")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awq-g128", "fp8-block", "ct-w8a8"])
def test_devices_have_whole_experts(name, source, tmp_path):
    write(source, tmp_path, FORMATS[name])
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    model = load(abstract(tmp_path, mesh), tmp_path, mesh=mesh, use_tqdm=False)
    assert_as_floats(model, tmp_path)
    wanted = of_experts(specs(model))
    for path, variable in of_experts(variables(model)).items():
        array = variable.get_value()
        assert array.sharding == wanted[path].sharding(mesh), path
        shape = (array.shape[0] // 2, *array.shape[1:])
        assert {shard.data.shape for shard in array.addressable_shards} == {shape}


@pytest.mark.parametrize("name", ["awq-g128", "fp8-block"])
def test_groups_that_fill_the_registers_of_a_tpu_are_the_same_groups(name, source, tmp_path):
    """Its kernel has 8 of them in a register, and these experts have 2. An abstract model gets the same shapes."""
    write(source, tmp_path, FORMATS[name])
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    model = load(abstract(tmp_path, mesh), tmp_path, mesh=mesh, use_tqdm=False)
    before, as_shapes = weights_of(model), abstract(tmp_path, mesh)
    for each in (model, as_shapes):
        choose_experts(each, lambda *_: Choice("tpu", ExpertsKernel("tpu")))
    described = of_experts(specs(model))
    assert described == of_experts(specs(as_shapes))
    for path, variable in of_experts(variables(model)).items():
        array = variable.get_value()
        assert array.sharding == described[path].sharding(mesh), path
        assert path.endswith("_proj") or array.shape[1] == 8, path
    after = weights_of(model)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    sizes = [array.shape for array in jax.tree.leaves(after)]
    assert [array.shape for array in jax.tree.leaves(weights_of(as_shapes))] == sizes


def weights_of(model):
    return model.model.layers[0].mlp.experts.weights


def test_experts_that_are_partly_floats_are_dequantised(source, tmp_path):
    """As an exception in config.json, and where only the tensors say so."""
    names = [name for name in _names(source) if ".experts.1." in name]
    assert len(names) == 3
    written = write(source, tmp_path, FORMATS["awq-g128"], ignore=["lm_head", *names])
    assert written
    model = load(abstract(tmp_path), tmp_path, use_tqdm=False)
    assert not of_experts({paths.data: paths for paths in quantized_weights(specs(model))})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert specs(abstract(tmp_path)) == specs(model)
    assert_as_floats(model, tmp_path)


def _names(source) -> list[str]:
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    return [name.removesuffix(".weight") for name in tensors]


def test_all_experts_in_a_tensor_of_floats(source, tmp_path):
    """Beside quantised layers, which only the tensors say."""
    write(source, tmp_path, FORMATS["awq-g128"], ignore=["lm_head", "re:.*experts"])
    file = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    model = build(load_hf_config(str(source)), dtype="float32")
    floats = values(load(model, source, use_tqdm=False))
    tensors = {name: each for name, each in tensors.items() if ".experts." not in name}
    for path, array in of_experts(floats).items():
        tensors[path] = array
    safetensors.numpy.save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(abstract(tmp_path), tmp_path, use_tqdm=False)
    assert not of_experts({paths.data: paths for paths in quantized_weights(specs(model))})
    for path, array in of_experts(floats).items():
        np.testing.assert_array_equal(values(model)[path], array)


DAMAGED = {
    "an expert is missing": ("qweight", None, "the checkpoint lacks it"),
    "an expert's scales have another shape": ("scales", np.s_[:-1], "not divided|config.json says"),
    "an expert has too few outputs": ("qweight", np.s_[:, :-1], "should be floats"),
}


@pytest.mark.parametrize(("suffix", "change", "message"), DAMAGED.values(), ids=list(DAMAGED))
def test_damage_is_found_before_anything_is_read(suffix, change, message, source, tmp_path):
    write(source, tmp_path, FORMATS["awq-g32"])
    file = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    name = next(each for each in tensors if ".experts.2." in each and each.endswith(suffix))
    tensor = tensors.pop(name)
    if change is None:
        layer = name.removesuffix(suffix)
        tensors = {each: x for each, x in tensors.items() if not each.startswith(layer)}
    else:
        tensors[name] = np.ascontiguousarray(tensor[change])
    safetensors.numpy.save_file(tensors, file)
    model = abstract(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(model, tmp_path, use_tqdm=False)
    found = variables(model).values()
    assert all(isinstance(each.get_value(), jax.ShapeDtypeStruct) for each in found)


@pytest.mark.parametrize(
    "source", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.slow)], indirect=True
)
@pytest.mark.parametrize("name", ["awq-g32", pytest.param("fp8-block", marks=pytest.mark.slow)])
def test_random_experts_have_the_spread_of_floats(name, source, tmp_path):
    write(source, tmp_path, FORMATS[name])
    model = abstract(tmp_path)
    stddev = variables(model)["model.embed_tokens.weight"].get_metadata()["init"].stddev
    arrays = values(initialise(model, seed=0), EXPERTS)
    assert len(arrays) == 2
    for array in arrays.values():
        assert np.isfinite(array).all() and 0.8 * stddev < array.std() < 1.2 * stddev


def test_packed_experts_are_not_saved(source, tmp_path):
    path = tmp_path / "awq"
    write(source, path, FORMATS["awq-g128"])
    model = load(abstract(path), path, use_tqdm=False)
    with pytest.raises(ValueError, match=r"experts.down_proj_scale .* is what an engine made"):
        save(model, tmp_path / "saved", files=path, format="safetensors")
