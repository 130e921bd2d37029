"""The writer of quantised checkpoints: known words, weights near the original, what a folder contains."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from jaxpage import tiny
from tests.quantized_checkpoints import (
    FORMATS,
    compressed_tensors,
    float8,
    packed,
    write,
    write_float,
)
from tests.quantized_checkpoints.integers import integers, pack

METHODS = {"awq": "awq", "gptq": "gptq", "fp8": "fp8", "ct": "compressed-tensors"}
RNG = np.random.default_rng(0)


def words(*values: int) -> np.ndarray:
    return np.array(values, np.uint32).view(np.int32)


def header(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each tensor: safetensors for numpy does not read float8."""
    content = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    described = json.loads(content[8 : 8 + size])
    return {n: (d["dtype"], tuple(d["shape"])) for n, d in described.items() if n != "__metadata__"}


def float_weights(folder: Path) -> dict[str, np.ndarray]:
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    return {name: array.astype(np.float32) for name, array in stored.items()}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    """Tied, with biases."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": True}
    config = tiny.TINY_CONFIG | sizes | {"num_hidden_layers": 1}
    return tiny.write_checkpoint(tmp_path_factory.mktemp("qwen"), config)


def test_words():
    """Of the packing loops of AutoGPTQ and AutoAWQ."""
    values = np.arange(16)
    np.testing.assert_array_equal(pack(values, 4), words(0x76543210, 0xFEDCBA98))
    np.testing.assert_array_equal(packed.pack_awq(values), words(0x75316420, 0xFDB9ECA8))
    np.testing.assert_array_equal(pack(np.arange(252, 256), 8), words(0xFFFEFDFC))
    np.testing.assert_array_equal(pack(np.arange(1, 11), 4), words(0x87654321, 0x000000A9))


def test_layouts_of_awq():
    """Input 1 of output 3, and the zero of group 1 of output 5."""
    weight = np.zeros((16, 64), np.float32)
    weight[3, 1], weight[5, 40] = 1, -1
    made = integers(weight, bits=4, group_size=32, symmetric=False, scale_dtype=np.float16)
    tensors = packed.awq_tensors(made)
    assert {n: t.shape for n, t in tensors.items()} == {
        "qweight": (64, 2),
        "qzeros": (2, 2),
        "scales": (2, 16),
    }
    expected = np.zeros((64, 2), np.int32)
    expected[1, 0] = 15 << 20  # columns 0 2 4 6 1 3: the sixth four bits
    expected[32:, 0] = words(15 << 24)[0]  # zeros are 15 where the range is -1 .. 0
    expected[40, 0] = 0
    np.testing.assert_array_equal(tensors["qweight"], expected)
    np.testing.assert_array_equal(tensors["qzeros"], [[0, 0], [15 << 24, 0]])


def test_zeros_of_gptq():
    """One less than they are, and 0 becomes the largest; as they are in the second version."""
    weight = np.ones((8, 32), np.float32)
    weight[0] = -1
    for bits, first, second in (
        (4, (0xFFFFFFFE,), (0x0000000F,)),
        (8, (0xFFFFFFFE, 0xFFFFFFFF), (0x000000FF, 0)),
    ):
        made = integers(weight, bits=bits, symmetric=False, scale_dtype=np.float16)
        for v2, expected in ((False, first), (True, second)):
            tensors = packed.gptq_tensors(made, bits, v2=v2)
            np.testing.assert_array_equal(tensors["qzeros"], words(*expected)[None])
    for bits, word in ((4, 0x77777777), (8, 0x7F7F7F7F)):
        made = integers(weight, bits=bits, symmetric=True, scale_dtype=np.float16)
        assert (packed.gptq_tensors(made, bits, v2=False)["qzeros"] == word).all()


def test_act_order():
    """Weights stay where they are; inputs that follow each other in the order share a scale."""
    order = packed.input_order("layers.0.mlp.down_proj", 128)
    weight = np.empty((8, 128), np.float32)
    weight[:, order] = np.repeat([1.0, 2.0, 3.0, 4.0], 32)
    made = integers(
        weight, bits=4, group_size=32, symmetric=False, scale_dtype=np.float16, order=order
    )
    np.testing.assert_array_equal(made.groups[order], np.repeat(np.arange(4), 32))
    np.testing.assert_allclose(made.dequantized(), weight, rtol=1e-3)
    np.testing.assert_array_equal(packed.gptq_tensors(made, 4, v2=False)["g_idx"], made.groups)


def test_layouts_of_compressed_tensors():
    """Input 1 of output 3, the zero of group 1 of output 5; a last word that is not full."""
    weight = np.zeros((12, 64), np.float32)
    weight[3, 1], weight[5, 40] = 1, -1
    made = integers(weight, bits=4, group_size=32, symmetric=False, scale_dtype=np.float16)
    tensors = compressed_tensors.packed_tensors(made, 4, zeros=True, order=False)
    expected = np.zeros((12, 8), np.int32)
    expected[3, 0] = 15 << 4
    expected[5, 4:] = words(0xFFFFFFFF, 0xFFFFFFF0, 0xFFFFFFFF, 0xFFFFFFFF)
    np.testing.assert_array_equal(tensors["weight_packed"], expected)
    np.testing.assert_array_equal(tensors["weight_zero_point"], [[0, 15 << 20], [0, 0]])
    np.testing.assert_array_equal(tensors["weight_shape"], [12, 64])
    assert tensors["weight_scale"].shape == (12, 2)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_integers_are_near(bits, symmetric):
    """Within half a step; at the ends of a range within a little more than one, as zeros and scales are rounded."""
    weight = RNG.normal(size=(16, 128)).astype(np.float32)
    made = integers(weight, bits=bits, group_size=32, symmetric=symmetric, scale_dtype=np.float16)
    steps = np.abs(made.dequantized() - weight) / made.scales.astype(np.float32)[:, made.groups]
    end = (made.q == 0) | (made.q == 2**bits - 1)
    assert steps[~end].max() < 0.501 and steps.max() < 1.15
    assert (made.zeros == 2 ** (bits - 1)).all() == symmetric


def test_float8_is_near():
    """Three bits of mantissa, with a scale for each block, smaller ones at the ends among them."""
    weight = RNG.normal(size=(200, 130)).astype(np.float32)
    weight[128:] *= 1e-4
    values, scales, meaning = float8.float8(weight, (128, 128), np.float32)
    assert values.dtype == float8.FLOAT8 and scales.shape == (2, 2)
    np.testing.assert_allclose(np.abs(values[128:, 128:].astype(np.float32)).max(), 448)
    tolerance = np.maximum(np.abs(weight) / 16, np.repeat(scales.max(1), [128, 72])[:, None] / 512)
    assert (np.abs(meaning - weight) <= tolerance * 1.01).all()


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(qwen, tmp_path, name):
    """Weights are near those of the source; embeddings and biases are there; config.json says what it is."""
    weights = write(qwen, tmp_path / "quantized", FORMATS[name])
    source = float_weights(qwen)
    assert weights.keys() == source.keys()
    for tensor, original in source.items():
        bound = 0.13 * np.abs(original).max() + 1e-6
        assert np.abs(weights[tensor] - original).max() < bound, tensor
    stored = header(tmp_path / "quantized")
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias"} <= stored.keys()
    written = json.loads((tmp_path / "quantized" / FORMATS[name].config_file).read_text())
    method = written.get("quantization_config", written)["quant_method"]
    assert method == METHODS[name.split("-")[0]]
    write_float(qwen, tmp_path / "float", weights)
    assert {kind for kind, _ in header(tmp_path / "float").values()} == {"F32"}


def test_shapes_of_scales(qwen, tmp_path):
    """Of the key projection, float[64, 128]."""
    expected = {
        "fp8-tensor": ("weight_scale", "F32", ()),
        "fp8-static": ("input_scale", "F32", (1,)),
        "fp8-block": ("weight_scale_inv", "BF16", (1, 1)),
        "ct-fp8": ("weight_scale", "BF16", (1,)),
        "ct-fp8-dynamic": ("weight_scale", "BF16", (64, 1)),
        "ct-w8a8": ("weight_scale", "BF16", (64, 1)),
        "ct-w4a16-g32": ("weight_scale", "F16", (64, 4)),
        "gptq-4-channel": ("scales", "F16", (1, 64)),
        "awq-g64": ("scales", "F16", (2, 64)),
    }
    for name, (suffix, kind, size) in expected.items():
        write(qwen, tmp_path / name, FORMATS[name])
        stored = header(tmp_path / name)
        assert stored[f"model.layers.0.self_attn.k_proj.{suffix}"] == (kind, size), name


def test_ignored_layers(qwen, tmp_path):
    """They stay float, and the config names them in the method's own way."""
    ignore = ("lm_head", "re:.*down_proj", "model.layers.0.self_attn.k_proj")
    for name, key in (("ct-w4a16", "ignore"), ("fp8-tensor", "ignored_layers")):
        weights = write(qwen, tmp_path / name, FORMATS[name], ignore=ignore, dtype="float32")
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["quantization_config"][key] == list(ignore)
        for layer in ("self_attn.k_proj", "mlp.down_proj"):
            tensor = f"model.layers.0.{layer}.weight"
            np.testing.assert_array_equal(weights[tensor], float_weights(qwen)[tensor])
            assert header(tmp_path / name)[tensor][0] == "F32"
    write(qwen, tmp_path / "gptq", FORMATS["gptq-4-g32"], ignore=ignore)
    config = json.loads((tmp_path / "gptq" / "config.json").read_text())["quantization_config"]
    rules = [rule.removeprefix("-:") for rule in config["dynamic"]]
    assert [re.match(rules[1], f"model.layers.0.self_attn.{n}_proj") is None for n in "qk"] == [
        True,
        False,
    ]


def test_routers_and_shards(tmp_path):
    """A router is left out unless asked for; a layer's tensors may be in several files."""
    gate, up = (f"model.layers.0.mlp.{name}.weight" for name in ("gate", "experts.0.up_proj"))
    tensors = {name: RNG.normal(size=(8, 128)).astype(np.float32) for name in (gate, up)}
    source = tiny.write_checkpoint(tmp_path / "source", {"model_type": "any"}, tensors=tensors)
    write(source, tmp_path / "one", FORMATS["fp8-block"])
    assert [header(tmp_path / "one")[name][0] for name in (gate, up)] == ["BF16", "F8_E4M3"]
    config = json.loads((tmp_path / "one" / "config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"] == ["lm_head", gate.removesuffix(".weight")]
    write(source, tmp_path / "two", FORMATS["awq-g32"], routers=True, shards=2)
    files = json.loads((tmp_path / "two" / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    assert len(files) == 6 and len(set(files.values())) == 2
    assert not (tmp_path / "two" / "model.safetensors").exists()
