"""What the engine does to weights it loaded: joined projections compute the same, int8 and fp8 nearly the same."""

from __future__ import annotations

import copy
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx

from jaxpage.device import Device
from jaxpage.models.layers import Embedding, Normal
from jaxpage.models.registry import build
from jaxpage.ops import embedding
from jaxpage.ops.embedding import LookupKernel
from jaxpage.ops.implementations import Choice
from jaxpage.ops.matmul import XLA, MatmulKernel, choose, matmul
from jaxpage.weights.dummy import initialise
from jaxpage.weights.transform import choose_lookups, choose_products, join_projections, quantize
from pallas_kernels.quant_matmul import quantized
from tests import checkpoints, dense_families, mixtures

# Biases, norms of q and k, another layer with the same parts.
FAMILIES = ["qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "gemma2"))]


def model_of(family: str, path) -> nnx.Module:
    hf_config = checkpoints.config(checkpoints.build(family, 0, path))
    return initialise(build(hf_config, dtype="float32", max_model_len=64), seed=3)


def logits(model: nnx.Module) -> np.ndarray:
    graphdef, state = nnx.split(model)
    run = jax.jit(lambda state, token_ids: nnx.merge(graphdef, state)(token_ids))
    return np.asarray(run(state, jnp.arange(3, 27, dtype=jnp.int32).reshape(2, 12)))


def parameters(model: nnx.Module) -> dict[str, jax.Array]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): variable.get_value() for path, variable in flat}


@pytest.mark.parametrize("family", FAMILIES)
def test_joined_projections_compute_the_same(family, tmp_path):
    model = model_of(family, tmp_path)
    expected, before = logits(model), parameters(model)
    join_projections(model)
    np.testing.assert_allclose(logits(model), expected, rtol=1e-4, atol=1e-5)
    after = parameters(model)
    assert sum(x.size for x in after.values()) == sum(x.size for x in before.values())
    assert not [name for name in after if "q_proj" in name or "up_proj" in name.split("gate_")[0]]
    qkv = [before[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"]
    np.testing.assert_array_equal(
        after["model.layers.0.self_attn.qkv_proj.weight"], np.concatenate(qkv)
    )


def test_projections_of_recurrent_layers_may_stay_apart(tmp_path):
    hf_config = checkpoints.config(dense_families.build("granite_hybrid", 0, tmp_path))
    found = []
    for recurrent in (False, True):
        model = initialise(build(hf_config, dtype="float32", max_model_len=64), seed=3)
        join_projections(model, recurrent=recurrent)
        names = " ".join(parameters(model))
        assert "qkv_proj.weight" in names
        assert ("in_proj_x.weight" in names, "in_proj.weight" in names) == (
            not recurrent,
            recurrent,
        )
        found.append(logits(model))
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
# 7 bits and a sign, also of activations; or 3 bits and those of the float's exponent.
@pytest.mark.parametrize(
    "quantization, dtype, bound", [("int8", jnp.int8, 0.15), ("fp8", jnp.float8_e4m3fn, 0.3)]
)
def test_rounded_weights_are_close_and_small(family, quantization, dtype, bound, tmp_path):
    model = model_of(family, tmp_path)
    expected, head = logits(model), model.lm_head
    join_projections(model)
    quantize(model, quantization, lambda weight, *_: choose(weight, Device(platform="cpu")))
    weights = {name: x for name, x in parameters(model).items() if name.endswith("proj.weight")}
    assert weights and {x.dtype for x in weights.values()} == {jnp.dtype(dtype)}
    if quantization == "fp8":
        assert model.lm_head is head and (head is None or head.quantized is None)
    error = np.abs(logits(model) - expected).max() / expected.std()
    assert 0 < error < bound


@pytest.mark.parametrize("quantization, head", [("int8", set()), ("fp8", {"lm_head.weight"})])
@pytest.mark.parametrize(
    "family, others",
    [
        ("deepseek_v3", {"self_attn.kv_b_proj.weight"}),
        (
            "qwen3_next",
            {"mlp.shared_expert_gate.weight", *(f"linear_attn.conv.{x}" for x in "qkv")},
        ),
    ],
)
def test_what_stays_in_floats(family, others, quantization, head):
    """Experts are rounded, and all linear layers but routers and gates."""
    arguments = checkpoints.SMALL | copy.deepcopy(mixtures.VARIANTS[family][0])
    hf_config = getattr(transformers, mixtures.CLASSES[family])(**arguments)
    hf_config.architectures = [mixtures.CLASSES[family].replace("Config", "ForCausalLM")]
    model = build(hf_config, dtype="bfloat16", max_model_len=64)
    quantize(model, quantization, lambda *_: Choice("xla", XLA))
    floats = {
        re.sub(r"^model\.layers\.\d+\.", "", name)
        for name, x in parameters(model).items()
        if x.dtype in (jnp.bfloat16, jnp.float32) and len(x.shape) > 1 and "scale" not in name
    }
    assert floats == {"model.embed_tokens.weight", "mlp.gate.weight", *others, *head}


def test_an_int8_product_is_the_exact_product_of_what_was_rounded():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(5, 64)).astype(np.float32), rng.normal(size=(9, 64)).astype(np.float32)
    weight = quantized.quantize(jnp.asarray(w), "int8")
    rounded, row_scale = (np.asarray(a, np.float64) for a in quantized.round_rows(jnp.asarray(x)))
    data, scale = np.asarray(weight.data, np.float64), np.asarray(weight.scale)
    expected = (rounded * row_scale) @ (data * scale[:, None]).T
    got = matmul(jnp.asarray(x), weight, kernel=XLA)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_rounding_is_within_half_a_scale_and_knows_zero():
    x = jnp.asarray([[0.0, 0.0], [3.0, -5.0], [1e-30, 2e-30]], jnp.float32)
    rounded, scale = (np.asarray(part, np.float32) for part in quantized.round_rows(x))
    np.testing.assert_array_equal(rounded[0], [0, 0])
    assert np.abs(rounded * scale - x).max() <= scale.max() / 2
    assert np.abs(rounded[1:]).max(axis=1).tolist() == [127, 127]


def test_kernels_are_chosen_for_layers_that_are_not_quantized_and_not_for_the_head(tmp_path):
    model = model_of("qwen3", tmp_path)
    join_projections(model)
    kernel, shapes = MatmulKernel("gpu"), set()

    def chosen(weight, axes, units):
        shapes.add(weight.shape)
        assert len(axes) == len(units) == 2
        return Choice("hopper", kernel) if axes[1] == "embed" else Choice("xla", XLA)

    choose_products(model, chosen)
    layer = model.model.layers[0]
    assert layer.self_attn.qkv_proj.matmul_kernel is kernel
    assert layer.mlp.down_proj.matmul_kernel is XLA
    assert shapes == {
        each.weight.get_value().shape
        for each in (
            layer.self_attn.qkv_proj,
            layer.self_attn.o_proj,
            layer.mlp.gate_up_proj,
            layer.mlp.down_proj,
        )
    }
    quantize(model, "int8", lambda weight, *_: Choice("xla", XLA))
    assert model.lm_head.matmul_kernel is XLA
    choose_products(model, lambda *_: pytest.fail("there is nothing to choose"))


def test_a_kernel_is_chosen_for_the_embedding_of_each_model_and_not_of_its_vision_tower(tmp_path):
    model, kernel, shapes = model_of("qwen3", tmp_path), LookupKernel("tpu", 9), set()
    model.visual = nnx.data(Embedding(4, 16, init=Normal(1.0), dtype=jnp.dtype(jnp.float32)))

    def chosen(table, axes, units):
        shapes.add((table.shape, axes, units))
        return Choice("tpu", kernel)

    choose_lookups(model, chosen)
    shape = model.model.embed_tokens.weight.get_value().shape
    assert shapes == {(shape, ("vocab", "embed"), shape)}
    assert model.model.embed_tokens.kernel is kernel
    assert model.visual.kernel is embedding.XLA
