"""Projections whose rows are stored by key head, those of q, k, v and z for each, as in checkpoints of Qwen3-Next."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
import transformers
from jax.sharding import Mesh

from jaxpage.models.decoder import CausalLM
from jaxpage.models.registry import build
from jaxpage.models.sources import Source
from jaxpage.weights.load import load, quantization_of_checkpoint
from jaxpage.weights.quantized_layers import declare, quantized_weights
from jaxpage.weights.safetensors import StoredTensor
from jaxpage.weights.save import save
from jaxpage.weights.spec import variables
from jaxpage.weights.stored import stored_parameter
from pallas_kernels.quant_matmul.quantized import QuantizedWeight
from pallas_kernels.quant_matmul.reference import dequantize
from tests import checkpoints, mixtures
from tests.quantized_checkpoints import FORMATS, write, write_float

LAYER = "model.layers.1.linear_attn"
# Key heads and values for each of variant 1.
KEYS, VALUES_PER_KEY = 4, 3


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return mixtures.build("qwen3_next", 1, tmp_path_factory.mktemp("qwen3_next"))


def abstract(path: Path) -> CausalLM:
    return build(checkpoints.config(path), dtype="float32")


def tensors(path: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(path / "model.safetensors")


def values(model: CausalLM) -> dict[str, np.ndarray]:
    return {path: np.asarray(variable.get_value()) for path, variable in variables(model).items()}


def of_transformers(path: Path) -> dict[str, np.ndarray]:
    """Rows of each projection of a layer, as transformers takes outputs of the two that it has apart."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    layer = model.model.layers[1].linear_attn
    # Inputs are the tokens, so that its outputs are columns of the weights.
    columns = (each.weight.detach().T[None] for each in (layer.in_proj_qkvz, layer.in_proj_ba))
    parts = layer.fix_query_key_value_ordering(*columns)
    return {
        name: part.reshape(part.shape[1], -1).numpy().T
        for name, part in zip("qkvzba", parts, strict=True)
    }


# 4 key heads cannot be divided over 8 devices, which have them all.
@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_parameters_are_what_transformers_takes_apart(num_devices, source, monkeypatch):
    num_bytes = 0
    read = StoredTensor.read

    def counting(tensor: StoredTensor, index: tuple[slice, ...] = ()) -> np.ndarray:
        nonlocal num_bytes
        found = read(tensor, index)
        if tensor.name == f"{LAYER}.in_proj_qkvz.weight":
            num_bytes += found.nbytes
        return found

    monkeypatch.setattr(StoredTensor, "read", counting)
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("tensor",)) if num_devices > 1 else None
    model = load(abstract(source), source, mesh=mesh, use_tqdm=False)
    found = values(model)
    for name, rows in of_transformers(source).items():
        np.testing.assert_array_equal(found[f"{LAYER}.in_proj_{name}.weight"], rows)
    v = variables(model)[f"{LAYER}.in_proj_v.weight"].get_value()
    shares = num_devices if KEYS % num_devices == 0 else 1
    assert v.sharding.shard_shape(v.shape)[0] == v.shape[0] // shares
    assert num_bytes == tensors(source)[f"{LAYER}.in_proj_qkvz.weight"].nbytes


def test_what_is_saved_is_what_was_loaded(source, tmp_path):
    model = load(abstract(source), source, use_tqdm=False)
    save(model, tmp_path / "saved", files=source, format="safetensors")
    stored, expected = tensors(tmp_path / "saved"), tensors(source)
    assert stored.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(stored[name], array, err_msg=name)


class Array:
    """A tensor of a checkpoint, in memory."""

    def __init__(self, array: np.ndarray):
        self.name, self.dtype, self.shape, self.array = "x", array.dtype, array.shape, array

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        return self.array[index]


@pytest.mark.parametrize(("groups", "start", "stop"), [(1, 3, 8), (4, 0, 2), (3, 1, 4), (12, 0, 1)])
def test_any_of_the_rows_can_be_read(groups, start, stop):
    tensor = np.arange(24).reshape(12, 2)
    place = Source("x", start, stop, groups)
    whole = tensor.reshape(groups, -1, 2)[:, start:stop].reshape(-1, 2)
    np.testing.assert_array_equal(tensor[place.rows(12)], whole)
    stored = stored_parameter("p", place, whole.shape, {"x": Array(tensor)})
    np.testing.assert_array_equal(stored.read(), whole)
    for first in range(len(whole) + 1):
        for last in range(first, len(whole) + 1):
            index = (slice(first, last), slice(0, 1))
            np.testing.assert_array_equal(stored.read(index), whole[index])


@pytest.mark.parametrize("name", ["in_proj_qkvz", "in_proj_ba"])
def test_a_projection_with_too_many_rows_is_refused(name, source, tmp_path):
    stored = tensors(source)
    weight = stored[f"{LAYER}.{name}.weight"]
    more = {f"{LAYER}.{name}.weight": np.concatenate([weight, weight[:KEYS]])}
    path = write_float(source, tmp_path / "changed", stored | more)
    num_rows = len(weight)
    with pytest.raises(
        ValueError, match=f"has {num_rows + KEYS} rows in the checkpoint.* have {num_rows}"
    ):
        load(abstract(path), path, use_tqdm=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", ["awq-g32", "gptq-4-asym", "fp8-block", "ct-w8a8", "ct-w4a16-asym"]
)
def test_quantised_rows_are_those_of_the_floats(form, tmp_path):
    kinds = ["full_attention", "linear_attention"]
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "layer_types": kinds}
    source = mixtures.build("qwen3_next", 1, tmp_path / "source", **sizes)
    path = tmp_path / "quantised"
    kept = ("lm_head", "mlp", "self_attn", "out_proj")
    written = write(source, path, FORMATS[form], ignore=kept)
    model = abstract(path)
    quantization = quantization_of_checkpoint(model.config, checkpoints.config(path), path)
    assert quantization is not None
    declare(model, quantization)
    arrays = {
        name: variable.get_value()
        for name, variable in variables(load(model, path, use_tqdm=False)).items()
    }
    held = [each for each in quantized_weights(arrays) if each.data.startswith(LAYER)]
    assert len(held) == 6
    floats = write_float(source, tmp_path / "floats", written)
    expected = of_transformers(floats)
    for paths in held:
        weight = QuantizedWeight(
            data=arrays[paths.data], scale=arrays[paths.scale], zero=arrays.get(paths.zero)
        )
        name = paths.data.removesuffix(".weight")[-1]
        np.testing.assert_array_equal(dequantize(weight), expected[name], err_msg=name)
