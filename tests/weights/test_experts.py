"""Experts in checkpoints: one tensor for each or all in one, gpt-oss's order, mxfp4; loaded, sharded and saved."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import Mesh

from jaxpage.models.registry import build
from jaxpage.weights.convert import convert
from jaxpage.weights.dummy import initialise
from jaxpage.weights.load import load
from jaxpage.weights.safetensors import StoredTensor
from jaxpage.weights.save import save
from jaxpage.weights.spec import variables
from jaxpage.weights.stored import mxfp4_values
from tests import checkpoints, mixtures, picture_models

LAYER = "model.layers.0.mlp.experts"
VL_LAYER = "model.language_model.layers.0.mlp.experts"  # of Qwen3-VL in checkpoints
SIZES = {"hidden_size": 64, "intermediate_size": 96}  # whole blocks of mxfp4


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory) -> Path:
    return mixtures.build("mixtral", 0, tmp_path_factory.mktemp("mixtral"))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory) -> Path:
    return mixtures.build("gpt_oss", 0, tmp_path_factory.mktemp("gpt_oss"), **SIZES)


def abstract(path: Path, dtype: str = "float32") -> nnx.Module:
    return build(checkpoints.config(path), dtype=dtype)


def loaded(path: Path, mesh: Mesh | None = None) -> nnx.Module:
    return load(abstract(path), path, mesh=mesh, use_tqdm=False)


def values(model: nnx.Module) -> dict[str, np.ndarray]:
    return {path: np.asarray(variable.get_value()) for path, variable in variables(model).items()}


def tensors(path: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(path / "model.safetensors")


def copy_with(path: Path, target: Path, changed: dict[str, np.ndarray]) -> Path:
    target.mkdir()
    (target / "config.json").write_bytes((path / "config.json").read_bytes())
    safetensors.numpy.save_file(changed, target / "model.safetensors")
    return target


def test_experts_are_stacked_gate_before_up(mixtral):
    stored, model = tensors(mixtral), values(loaded(mixtral))
    assert not any("mlp" in name for name in stored)  # all names are Mixtral's own
    for x in range(4):
        names = f"model.layers.0.block_sparse_moe.experts.{x}"
        gate_up = np.concatenate([stored[f"{names}.w1.weight"], stored[f"{names}.w3.weight"]])
        np.testing.assert_array_equal(model[f"{LAYER}.gate_up_proj"][x], gate_up)
        np.testing.assert_array_equal(model[f"{LAYER}.down_proj"][x], stored[f"{names}.w2.weight"])


@pytest.mark.parametrize(
    "family",
    [
        *("mixtral", "qwen3_moe", "minimax_m2", "granitemoe", "ernie4_5_moe"),
        pytest.param("qwen3_next", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
        pytest.param("nemotron_h_moe", marks=pytest.mark.slow),
        pytest.param("lfm2_moe", marks=pytest.mark.slow),
    ],
)
def test_checkpoints_with_stacked_experts_are_the_same_model(family, tmp_path):
    """As transformers 5 has them in memory, and can write them."""
    import transformers

    path = mixtures.build(family, 0, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path)
    theirs.save_pretrained(tmp_path / "stacked", save_original_format=False)
    stored = tensors(tmp_path / "stacked")
    names = (".experts.gate_up_proj", ".experts.up_proj")
    stacked = [name for name in stored if name.endswith(names)]
    assert stacked and stored.keys() != tensors(path).keys()
    expected, got = values(loaded(path)), values(loaded(tmp_path / "stacked"))
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array)


def test_each_device_reads_its_own_experts_once(mixtral, monkeypatch):
    bytes_read = Counter()
    read = StoredTensor.read

    def counting(tensor, index=()):
        found = read(tensor, index)
        bytes_read[tensor.name] += found.nbytes
        return found

    monkeypatch.setattr(StoredTensor, "read", counting)
    mesh = Mesh(np.array(jax.devices()[:4]), ("tensor",))
    model = loaded(mixtral, mesh)
    stored = tensors(mixtral)
    assert bytes_read == {name: array.nbytes for name, array in stored.items()}
    gate_up = variables(model)[f"{LAYER}.gate_up_proj"].get_value()
    assert gate_up.sharding.shard_shape(gate_up.shape) == (1, 144, 32)
    expected = values(loaded(mixtral))
    for name, array in values(model).items():
        np.testing.assert_array_equal(array, expected[name])


def test_experts_of_one_layer_at_a_time_are_in_memory(tmp_path, monkeypatch):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8}
    path = mixtures.build("mixtral", 0, tmp_path, **sizes)
    stack = 4 * 4 * 2 * 256 * 128
    assert sum(array.nbytes for array in tensors(path).values()) > 10 * stack
    # The CPU back end adopts NumPy's memory; a copy tells host and device apart again.
    make = jax.make_array_from_callback
    monkeypatch.setattr(
        jax, "make_array_from_callback", lambda *args: jnp.array(make(*args), copy=True)
    )
    model = abstract(path)
    load(model, path, use_tqdm=False)  # compiles the copies
    tracemalloc.start()
    load(model, path, use_tqdm=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.2 * stack + 300_000  # and the stack before it, as long as jaxlib keeps it


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("mixtral", 1),
        ("qwen2_moe", 0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("olmoe", 0),
                ("gpt_oss", 2),
                ("glm4_moe", 1),
                ("minimax_m2", 1),
                ("granitemoe", 1),
                ("deepseek_v2", 0),
                ("deepseek_v3", 1),
            )
        ),
    ],
)
def test_what_is_saved_is_what_was_loaded(family, variant, tmp_path):
    path = mixtures.build(family, variant, tmp_path / "hf")
    save(loaded(path), tmp_path / "saved", files=path, format="safetensors")
    stored, expected = tensors(tmp_path / "saved"), tensors(path)
    assert stored.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(stored[name], array)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "variant"), [("qwen3_moe", 1), ("gpt_oss", 1), ("deepseek_v3", 1)]
)
def test_to_orbax_and_back_is_bitwise_the_same(family, variant, tmp_path):
    path = mixtures.build(family, variant, tmp_path / "hf")
    convert(path, tmp_path / "orbax")
    convert(tmp_path / "orbax", tmp_path / "back")
    stored, expected = tensors(tmp_path / "back"), tensors(path)
    assert stored.keys() == expected.keys()
    for name, array in expected.items():
        assert stored[name].tobytes() == array.tobytes(), name


@pytest.fixture(scope="module")
def qwen3_vl(tmp_path_factory) -> Path:
    """As transformers 5 saves it, with all experts in one tensor in the order of memory."""
    config = picture_models.qwen3_vl_moe_config()
    return picture_models.save(config, tmp_path_factory.mktemp("qwen3_vl"), seed="qwen3_vl")


def separated(experts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A tensor for each projection of each expert, of arrays [X, O, I] of all."""
    found = {}
    for name, array in experts.items():
        layer, _, projection = name.rpartition(".")
        parts = {projection: array}
        if projection == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), np.split(array, 2, axis=1), strict=True))
        for part, of_all in parts.items():
            weights = (f"{layer}.{x}.{part}.weight" for x in range(len(of_all)))
            found |= {weight: one.copy() for weight, one in zip(weights, of_all, strict=True)}
    return found


def test_experts_may_have_inputs_before_outputs(qwen3_vl, tmp_path):
    """Qwen3-VL: what was released, and a tensor for each projection, as tools write that quantise experts."""
    stored = tensors(qwen3_vl)
    experts = {name: array for name, array in stored.items() if ".experts." in name}
    assert len(experts) == 4 and experts[f"{VL_LAYER}.gate_up_proj"].shape == (6, 40, 48)
    others = {name: array for name, array in stored.items() if name not in experts}
    turned = {name: array.swapaxes(1, 2).copy() for name, array in experts.items()}
    expected = values(loaded(qwen3_vl))
    for form, given in (("turned", turned), ("separate", separated(experts))):
        path = copy_with(qwen3_vl, tmp_path / form, others | given)
        got = values(loaded(path))
        assert got.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(got[name], array)
    # What is saved is as released.
    save(loaded(qwen3_vl), tmp_path / "saved", files=qwen3_vl, format="safetensors")
    saved = tensors(tmp_path / "saved")
    for name, array in turned.items():
        np.testing.assert_array_equal(saved[name.replace(".language_model", "")], array)
    wrong = others | turned | {f"{VL_LAYER}.gate_up_proj": turned[f"{VL_LAYER}.gate_up_proj"][:5]}
    refused(
        copy_with(qwen3_vl, tmp_path / "wrong", wrong),
        r"gate_up_proj has shape \[5, 48, 40\] .* wants \[6, 40, 48\]",
    )


@pytest.mark.parametrize(
    "family",
    [
        "glm4_moe",
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
        pytest.param("glm4_moe_lite", marks=pytest.mark.slow),
    ],
)
def test_layers_after_the_last_are_not_used(family, tmp_path):
    """GLM-4.5 has one that predicts a second token; a converted checkpoint has none."""
    path = mixtures.build(family, 0, tmp_path / "hf")
    stored = tensors(path)
    more = {
        name.replace("layers.1", "layers.2"): 1 - array
        for name, array in stored.items()
        if ".layers.1." in name
    }
    more["model.layers.2.shared_head.norm.weight"] = stored["model.norm.weight"]
    longer = copy_with(path, tmp_path / "longer", stored | more)
    expected, got = values(loaded(path)), values(loaded(longer))
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array)
    back = convert(longer, tmp_path / "converted", format="safetensors")
    assert tensors(back).keys() == stored.keys()
    # ERNIE has modules instead.
    path = mixtures.build("ernie4_5_moe", 0, tmp_path / "ernie")
    more = {"model.mtp_block.0.input_layernorm.weight": tensors(path)["model.norm.weight"]}
    longer = copy_with(path, tmp_path / "more", tensors(path) | more)
    assert values(loaded(longer)).keys() == values(loaded(path)).keys()
    # Other families have no such layers.
    mixtures.build("olmoe", 0, tmp_path / "olmoe")
    stored = tensors(tmp_path / "olmoe")
    other = stored | {"model.layers.2.input_layernorm.weight": stored["model.norm.weight"]}
    refused(
        copy_with(tmp_path / "olmoe", tmp_path / "other", other),
        "has model.layers.2.input_layernorm.weight, which the model does not know",
    )


def test_corrections_of_routers_stay_float32(tmp_path):
    path = mixtures.build("glm4_moe", 0, tmp_path)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model = load(abstract(path, "bfloat16"), path, use_tqdm=False)
    correction = values(model)[name]
    assert correction.dtype == np.float32
    np.testing.assert_array_equal(correction, tensors(path)[name])


def test_dummy_weights_of_experts_are_spread_as_the_config_says(mixtral):
    model = values(initialise(abstract(mixtral), seed=0))
    gate_up = model[f"{LAYER}.gate_up_proj"]
    assert gate_up.std() == pytest.approx(0.02, rel=0.05)
    assert len(np.unique(gate_up[:, 0, 0])) == 4  # no two experts are alike


def pack(values_of: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Random blocks and scales of mxfp4 for a parameter of this shape [X, O, I]."""
    shape = (*values_of.shape[:2], values_of.shape[2] // 32)
    blocks = rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
    return blocks, rng.integers(119, 124, shape, dtype=np.uint8)


def in_mxfp4(path: Path, target: Path) -> Path:
    """A copy of a gpt-oss checkpoint whose experts are random mxfp4."""
    stored, rng = tensors(path), np.random.default_rng(0)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        array = stored.pop(name)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = pack(array.swapaxes(1, 2), rng)
    copy_with(path, target, stored)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_numbers_of_mxfp4_are_those_of_transformers():
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), dtype=np.uint8)
    blocks[0, 0] = np.arange(48).reshape(3, 16) * 5 % 256
    scales = rng.integers(90, 160, (2, 6, 3), dtype=np.uint8)
    theirs = convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
    )
    np.testing.assert_array_equal(mxfp4_values(blocks, scales), theirs.numpy().swapaxes(1, 2))


def test_mxfp4_is_defined_by_its_bits():
    """1 sign, 2 exponent and 1 mantissa bit; the lower 4 bits of a byte come first; a power of 2 for 32 numbers."""
    blocks = np.zeros((1, 2, 16), np.uint8)
    blocks[0, 0, 0] = 0xF1  # 0.5, then -6
    blocks[0, 1, 15] = 0x92  # 1, then -0.5
    scales = np.array([[127, 129]], np.uint8)
    expected = np.zeros(64, np.float32)
    expected[:2], expected[62:] = (0.5, -6.0), (4.0, -2.0)
    np.testing.assert_array_equal(mxfp4_values(blocks, scales)[0], expected)
    assert np.isnan(mxfp4_values(blocks, np.full((1, 2), 255, np.uint8))).any()


def test_a_checkpoint_in_mxfp4_is_loaded_as_its_numbers(gpt_oss, tmp_path):
    """Equal to a checkpoint of those numbers in float32; on a mesh too."""
    packed = in_mxfp4(gpt_oss, tmp_path / "packed")
    stored = tensors(packed)
    for name in [name for name in stored if name.endswith("_blocks")]:
        whole = name.removesuffix("_blocks")
        numbers = mxfp4_values(stored.pop(name), stored.pop(f"{whole}_scales"))
        stored[whole] = np.ascontiguousarray(numbers.swapaxes(1, 2))
    expected = values(loaded(copy_with(gpt_oss, tmp_path / "plain", stored)))
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    for model in (loaded(packed), loaded(packed, mesh)):
        for name, array in values(model).items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name)
    assert len(np.unique(expected[f"{LAYER}.gate_up_proj"])) > 20


def test_what_was_mxfp4_is_saved_as_its_numbers(gpt_oss, tmp_path):
    packed = in_mxfp4(gpt_oss, tmp_path / "packed")
    saved = convert(packed, tmp_path / "saved", format="safetensors")
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    stored = tensors(saved)
    assert stored[f"{LAYER}.gate_up_proj"].dtype.name == "bfloat16" and len(stored) == len(
        tensors(gpt_oss)
    )
    expected = values(loaded(packed))
    for name, array in values(loaded(saved)).items():
        np.testing.assert_array_equal(array, expected[name])


def test_gate_and_up_of_gpt_oss_are_parted(gpt_oss):
    stored, model = tensors(gpt_oss), values(loaded(gpt_oss))
    for name, axis in ((f"{LAYER}.gate_up_proj", 2), (f"{LAYER}.gate_up_proj_bias", 1)):
        theirs = np.moveaxis(stored[name], axis, 1)
        expected = np.concatenate([theirs[:, 0::2], theirs[:, 1::2]], axis=1)
        np.testing.assert_array_equal(model[name], expected)


def refused(path: Path, message: str) -> None:
    model = abstract(path)
    with pytest.raises(ValueError, match=message):
        load(model, path, use_tqdm=False)
    leaves = jax.tree.leaves(nnx.state(model))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)  # nothing was begun


def test_what_does_not_fit_is_refused_by_name(mixtral, gpt_oss, tmp_path):
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    stored = tensors(mixtral)
    for number, (change, message) in enumerate(
        [
            (None, f"lacks {name}"),
            (stored[name][:-1], rf"{name} has shape \[71, 32\] .* \[4, 144, 32\], so \[72, 32\]"),
            (stored[name].astype(np.float16), f"{name} is stored as float16, and .* as float32"),
            (
                stored[name].astype(np.int8),
                f"{name} is stored as int8, but config.json does not say",
            ),
        ]
    ):
        changed = {k: v for k, v in stored.items() if k != name}
        changed |= {} if change is None else {name: change}
        refused(copy_with(mixtral, tmp_path / str(number), changed), message)
    packed = in_mxfp4(gpt_oss, tmp_path / "packed")
    stored = tensors(packed)
    stored[f"{LAYER}.down_proj_scales"] = stored[f"{LAYER}.down_proj_scales"][:, :-1].copy()
    safetensors.numpy.save_file(stored, packed / "model.safetensors")
    refused(packed, r"down_proj_scales has shape .*, so \[4, 64, 3\]")
    # Another family's weights in mxfp4, and gpt-oss's in another format, are as quantised as any.
    other = copy_with(mixtral, tmp_path / "other", tensors(mixtral))
    for path, method in ((other, "mxfp4"), (gpt_oss_in(gpt_oss, tmp_path / "awq"), "awq")):
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"] = {"quant_method": method}
        (path / "config.json").write_text(json.dumps(config))
        refused_as_quantised(path, method)


def gpt_oss_in(path: Path, target: Path) -> Path:
    return copy_with(path, target, tensors(path))


def refused_as_quantised(path: Path, method: str) -> None:
    from jaxpage.checkpoint_config import load_hf_config

    model = build(load_hf_config(str(path)), dtype="float32")
    with pytest.raises(ValueError, match=rf"quantised \({method}\)"):
        load(model, path, use_tqdm=False)
