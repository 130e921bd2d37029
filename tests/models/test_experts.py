"""Experts against their definition, written as loops; what a token gets does not depend on the others; gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from jaxpage.aot.contents import exchanges
from jaxpage.aot.hlo import parse
from jaxpage.device import Device
from jaxpage.models.decoder import mlp_or_experts
from jaxpage.ops.experts import XLA, ExpertsKernel, ExpertWeights, choose, experts
from jaxpage.parallel.sharding import TENSOR
from jaxpage.weights.dummy import initialise
from pallas_kernels.grouped_matmul import gradient, tpu
from pallas_kernels.quant_matmul.quantized import QuantizedWeight, quantize
from pallas_kernels.quant_matmul.reference import dequantize, quant_matmul
from tests import checkpoints, mixtures
from tests.models import test_families as families

NUM_TOKENS, NUM_EXPERTS, CHOSEN, EMBED, INNER = 40, 8, 3, 16, 12


def swiglu(gate_up):
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


def arguments(*, bias: bool, seed: int = 0) -> dict:
    """Some tokens are padding, and the last expert has none."""
    rng = np.random.default_rng(seed)

    def random(*shape):
        return jax.device_put(rng.standard_normal(shape).astype(np.float32))

    chosen = np.argsort(rng.random((NUM_TOKENS, NUM_EXPERTS - 1)), axis=1)[:, :CHOSEN]
    chosen[rng.random(NUM_TOKENS) < 0.3] = NUM_EXPERTS
    return {
        "x": random(NUM_TOKENS, EMBED),
        "chosen": jax.device_put(chosen.astype(np.int32)),
        "shares": jax.nn.softmax(random(NUM_TOKENS, CHOSEN)),
        "weights": ExpertWeights(
            gate_up=random(NUM_EXPERTS, 2 * INNER, EMBED),
            down=random(NUM_EXPERTS, EMBED, INNER),
            gate_up_bias=random(NUM_EXPERTS, 2 * INNER) if bias else None,
            down_bias=random(NUM_EXPERTS, EMBED) if bias else None,
        ),
    }


def by_loops(x, chosen, shares, weights):
    """Every expert of every token, as a sum that can be differentiated."""
    out = jnp.zeros_like(x)
    for expert in range(NUM_EXPERTS):
        hidden = x @ weights.gate_up[expert].T
        if weights.gate_up_bias is not None:
            hidden += weights.gate_up_bias[expert][None]
        result = swiglu(hidden) @ weights.down[expert].T
        if weights.down_bias is not None:
            result += weights.down_bias[expert][None]
        share = jnp.where(chosen == expert, shares, 0.0).sum(axis=-1)
        out += share[:, None] * result
    return out


@cache
def compute(kernel: ExpertsKernel = XLA):
    """Cached, so that a program is compiled once for all tests."""
    return jax.jit(partial(experts, activation=swiglu, kernel=kernel))


@pytest.mark.parametrize("bias", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tokens_get_the_sum_of_their_experts_and_padding_gets_nothing(bias):
    given = arguments(bias=bias)
    out = np.asarray(compute()(**given))
    np.testing.assert_allclose(out, jax.jit(by_loops)(**given), atol=1e-4)
    padding = np.asarray(given["chosen"][:, 0]) == NUM_EXPERTS
    assert 3 < padding.sum() < NUM_TOKENS and not out[padding].any() and out[~padding].all()


@pytest.mark.slow
def test_nothing_is_multiplied_for_padding(monkeypatch):
    """The rows of each expert, as the product is told: only those of tokens."""
    told = []

    def multiply(x, weights, group_sizes):
        told.append(np.asarray(group_sizes))
        return jnp.zeros((x.shape[0], weights.shape[1]), jnp.float32)

    monkeypatch.setattr("jaxpage.ops.experts.xla.grouped_matmul", multiply)
    given = arguments(bias=False)
    with jax.disable_jit():
        experts(**given, activation=swiglu, kernel=XLA)
    expected = np.bincount(np.asarray(given["chosen"]).ravel(), minlength=NUM_EXPERTS + 1)
    assert len(told) == 2
    for sizes in told:
        np.testing.assert_array_equal(sizes, expected[:NUM_EXPERTS])


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_token_is_the_same_to_the_bit_in_any_company(dtype):
    given = arguments(bias=True)
    given["x"], given["weights"] = jax.tree.map(
        lambda x: x.astype(dtype), (given["x"], given["weights"])
    )
    rng = np.random.default_rng(1)
    among = np.asarray(compute()(**given))
    order = rng.permutation(NUM_TOKENS)
    rows = {name: given[name][order] for name in ("x", "chosen", "shares")}
    np.testing.assert_array_equal(compute()(**given | rows), among[order])
    for token in (0, 7, 23):
        # Alone among padding, and twice in a batch where all others are what it is.
        alone = np.full((NUM_TOKENS, CHOSEN), NUM_EXPERTS, np.int32)
        alone[token] = given["chosen"][token]
        got = compute()(**given | {"chosen": alone})
        np.testing.assert_array_equal(got[token], among[token])
        copies = {name: given[name][np.full(NUM_TOKENS, token)] for name in rows}
        got = compute()(**given | copies)
        np.testing.assert_array_equal(got, np.tile(among[token], (NUM_TOKENS, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
def test_the_gradient_is_that_of_the_definition(bias):
    given = arguments(bias=bias)
    slopes = jnp.asarray(np.random.default_rng(2).standard_normal(given["x"].shape), jnp.float32)
    values = given["x"], given["shares"], given["weights"]

    def of(function):
        def value(x, shares, weights):
            return (function(x, given["chosen"], shares, weights) * slopes).sum()

        return jax.jit(jax.grad(value, argnums=(0, 1, 2)))(*values)

    got = of(partial(experts, activation=swiglu, kernel=XLA))
    expected = of(by_loops)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-3, rtol=1e-4)


def quantized(weights: ExpertWeights, *options) -> ExpertWeights:
    """options: of `quantize`."""

    def each(weight):
        return jax.jit(jax.vmap(lambda w: quantize(w, *options)))(weight)

    return replace(weights, gate_up=each(weights.gate_up), down=each(weights.down))


@pytest.mark.slow
def test_int8_experts_are_what_products_with_int8_weights_say():
    """One expert after the other, by the definition of such a product; and near to what was rounded."""
    given = arguments(bias=True)
    weights = quantized(given["weights"], "int8")
    out = np.asarray(compute()(**given | {"weights": weights}))
    expected = np.zeros_like(out)
    for expert in range(NUM_EXPERTS):
        hidden = quant_matmul(given["x"], weights.gate_up[expert], round_x=True)
        hidden = swiglu(hidden + weights.gate_up_bias[expert][None])
        result = (
            quant_matmul(hidden, weights.down[expert], round_x=True)
            + weights.down_bias[expert][None]
        )
        share = jnp.where(given["chosen"] == expert, given["shares"], 0.0).sum(axis=-1)
        expected += np.asarray(share[:, None] * result)
    exact = np.asarray(compute()(**given))
    scale = np.abs(exact).max()
    # A row that lies between two integers may be rounded either way, and moves a result by as much as a step.
    assert np.quantile(np.abs(out - expected), 0.9) < 1e-5 * scale
    np.testing.assert_allclose(out, expected, atol=2e-2 * scale)
    assert 1e-4 * scale < np.sqrt(np.mean((out - exact) ** 2)) < 2e-2 * scale


PACKED = [
    ("int4", 32),
    ("int8", 32),
    pytest.param("fp8_e4m3", 64, marks=pytest.mark.slow),
    ("fp8_e4m3", None),
]


@pytest.mark.parametrize(("format", "group_size"), PACKED)
def test_packed_experts_are_what_their_dequantised_weights_are(format, group_size):
    """With padding, and an expert without tokens; alone and shared by four devices."""
    given = wide_arguments(jnp.float32)
    packed = quantized(given["weights"], format, group_size)
    floats = replace(packed, gate_up=in_floats(packed.gate_up), down=in_floats(packed.down))
    expected = np.asarray(compute()(**given | {"weights": floats}))
    out = np.asarray(compute()(**given | {"weights": packed}))
    np.testing.assert_allclose(out, expected, atol=1e-5 * np.abs(expected).max())
    padding = np.asarray(given["chosen"][:, 0]) == NUM_EXPERTS
    assert not out[padding].any() and out[~padding].all()
    mesh = Mesh(np.array(jax.devices()[:4]), (TENSOR,))
    divided = compute(ExpertsKernel(None, mesh=mesh, divided=True))(**given | {"weights": packed})
    np.testing.assert_allclose(divided, out, atol=1e-5 * np.abs(out).max())


@pytest.mark.slow
@pytest.mark.parametrize(("format", "group_size"), [("int4", 128), ("fp8_e4m3", 128)])
def test_packed_experts_on_a_tpu_are_those_on_a_cpu(format, group_size):
    """The kernel interpreted, on one device and with experts shared by two. XLA rounds scaled int4 to bfloat16."""
    given = wide_arguments(jnp.bfloat16)
    given["weights"] = quantized(given["weights"], format, group_size)
    expected = np.asarray(compute()(**given))
    mesh = Mesh(np.array(jax.devices()[:2]), (TENSOR,))
    for options in ({}, {"mesh": mesh, "divided": True}):
        with pltpu.force_tpu_interpret_mode():
            out = compute(ExpertsKernel("tpu", tpu.DEFAULT, **options))(**given)
        np.testing.assert_allclose(out, expected, atol=1e-2 * np.abs(expected).max())


def wide_arguments(dtype) -> dict:
    """`arguments` with 256 inputs and outputs, which are divided into groups."""
    given, rng = arguments(bias=False), np.random.default_rng(1)

    def random(*shape):
        return jax.device_put(rng.standard_normal(shape).astype(dtype))

    weights = ExpertWeights(
        gate_up=random(NUM_EXPERTS, 512, 256), down=random(NUM_EXPERTS, 256, 256)
    )
    return given | {"x": random(NUM_TOKENS, 256), "weights": weights}


@jax.jit
def in_floats(weights: QuantizedWeight) -> jax.Array:
    return jax.vmap(dequantize)(weights)


@pytest.mark.slow
def test_int8_experts_on_a_tpu_are_those_on_a_cpu():
    """The kernel interpreted, on one device and with experts shared by two."""
    given = arguments(bias=False)
    given["weights"] = quantized(given["weights"], "int8")
    expected = np.asarray(compute()(**given))
    mesh = Mesh(np.array(jax.devices()[:2]), (TENSOR,))
    for kernel in (
        ExpertsKernel("tpu", tpu.DEFAULT),
        ExpertsKernel("tpu", tpu.DEFAULT, mesh, True),
    ):
        with pltpu.force_tpu_interpret_mode():
            out = compute(kernel)(**given)
        np.testing.assert_allclose(out, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_rows_of_no_group_have_no_gradient():
    """Whatever stands there and comes back."""
    x, slopes = (jnp.full((6, 4), jnp.nan).at[:3].set(1.0) for _ in range(2))
    weights, sizes = jnp.ones((2, 4, 4)), jnp.asarray([1, 2], jnp.int32)
    of_x, of_weights = gradient.gradient(x, weights, sizes, slopes)
    np.testing.assert_array_equal(of_x, [[4.0] * 4] * 3 + [[0.0] * 4] * 3)
    np.testing.assert_array_equal(of_weights, [[[1.0] * 4] * 4, [[2.0] * 4] * 4])


def test_devices_share_the_experts_and_exchange_one_sum():
    given = arguments(bias=True)
    mesh = Mesh(np.array(jax.devices()[:4]), (TENSOR,))
    divided = compute(ExpertsKernel(None, mesh=mesh, divided=True))
    np.testing.assert_allclose(divided(**given), compute()(**given), atol=1e-5)
    text = divided.lower(**given).compile().as_text()
    assert exchanges(parse(text)) == [("all-reduce", 1, 4 * NUM_TOKENS * EMBED)]
    assert f"f32[{NUM_EXPERTS // 4},{2 * INNER},{EMBED}]" in text  # of a device
    assert f"f32[{NUM_EXPERTS},{2 * INNER},{EMBED}]" not in text
    whole = compute(ExpertsKernel(None, mesh=mesh, divided=False))
    np.testing.assert_array_equal(whole(**given), compute()(**given))
    assert exchanges(parse(whole.lower(**given).compile().as_text())) == []


@pytest.mark.slow
def test_devices_share_experts_in_int8():
    given = arguments(bias=True)
    given["weights"] = quantized(given["weights"], "int8")
    mesh = Mesh(np.array(jax.devices()[:4]), (TENSOR,))
    divided = compute(ExpertsKernel(None, mesh=mesh, divided=True))
    np.testing.assert_allclose(divided(**given), compute()(**given), atol=1e-5)
    text = divided.lower(**given).compile().as_text()
    assert exchanges(parse(text)) == [("all-reduce", 1, 4 * NUM_TOKENS * EMBED)]
    assert f"s8[{NUM_EXPERTS // 4},{2 * INNER},{EMBED}]" in text  # of a device


def test_an_implementation_is_chosen_by_platform_dtype_and_sizes():
    def chosen(device, dtype="bfloat16", inner=768):
        gate_up = jax.ShapeDtypeStruct((128, 2 * inner, 2048), jnp.dtype(dtype))
        down = jax.ShapeDtypeStruct((128, 2048, inner), jnp.dtype(dtype))
        return choose(gate_up, down, device, dtype=dtype)

    assert chosen(Device(platform="cpu")).chosen == XLA
    tpu = Device(platform="tpu", kind="TPU v6 lite")
    assert chosen(tpu).chosen.platform == "tpu"
    rounded = [
        QuantizedWeight(
            data=jax.ShapeDtypeStruct((8, 256, 256), jnp.int8),
            scale=jax.ShapeDtypeStruct((8, 256), jnp.float32),
        )
    ] * 2
    assert choose(*rounded, tpu).chosen.platform == "tpu"
    refused = chosen(tpu, "float16")
    assert refused.chosen == XLA and "x is float16" in str(refused.reason)
    old = chosen(Device(platform="gpu", kind="NVIDIA A100", compute_capability="8.0"))
    assert old.chosen == XLA and old.reason
    narrow = chosen(Device(platform="gpu", kind="NVIDIA H200", compute_capability="9.0"), inner=40)
    assert narrow.chosen == XLA and narrow.reason


FAST = {("qwen2_moe", 1)}


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
        for case in mixtures.CASES
    ],
)
def test_float32_logits_equal_transformers(family, variant, tmp_path):
    path = mixtures.build(family, variant, tmp_path)
    token_ids = families.tokens(2, families.MAX_LEN)
    expected = checkpoints.torch_logits(path, token_ids)
    assert families.rms(expected) > 1  # else a mistake would not show
    got = families.logits(families.loaded(path), token_ids)
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", mixtures.VARIANTS)
def test_bfloat16_logits_are_as_close_to_float32_as_those_of_torch(family, tmp_path):
    """In the middle: where rounding makes a router choose another expert, both are far away."""
    path = mixtures.build(family, 0, tmp_path)
    token_ids = families.tokens(1, 100)
    exact = checkpoints.torch_logits(path, token_ids)
    theirs = checkpoints.torch_logits(path, token_ids, dtype="bfloat16")
    ours = families.logits(families.loaded(path, "bfloat16", max_model_len=100), token_ids)
    errors = [np.median(np.abs(each - exact)) for each in (ours, theirs)]
    assert errors[0] < 1.2 * errors[1]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            family,
            marks=pytest.mark.slow if family in ("qwen2_moe", "gpt_oss") else pytest.mark.deep,
        )
        for family in mixtures.VARIANTS
    ],
)
def test_a_trainer_can_differentiate_the_model(family, tmp_path):
    """Its gradient is a finite difference's, and every parameter of an expert that was chosen has one, except what only
    chooses.
    """
    path = mixtures.build(family, 0, tmp_path)
    graphdef, state = nnx.split(families.loaded(path))
    token_ids = jnp.asarray(families.tokens(40))
    value = jax.jit(partial(families.loss, graphdef=graphdef, token_ids=token_ids))
    gradient = jax.jit(jax.grad(value))(state)

    def experts_of(state):
        layer = state.model.layers[1]
        name = next(each for each in ("moe", "mlp", "mixer") if each in layer)
        return layer[name].experts

    for name, leaf in nnx.to_flat_state(gradient):
        only_chooses = name[-1] == "e_score_correction_bias"
        assert np.isfinite(leaf[...]).all() and np.any(leaf[...]) != only_chooses, name
    slope = np.asarray(experts_of(gradient).down_proj[...])
    length = np.linalg.norm(slope)
    step = jnp.asarray(slope / length) * 0.001

    def moved(sign: float) -> float:
        changed = jax.tree.map(lambda leaf: leaf, state)
        weight = experts_of(changed).down_proj
        weight.set_value(weight[...] + sign * step)
        return float(value(changed))

    assert (moved(1) - moved(-1)) / 0.002 == pytest.approx(length, rel=0.02)


def test_what_a_config_says_of_experts_is_checked():
    with pytest.raises(
        ValueError, match="5 experts for each token of 4: check num_experts_per_tok"
    ):
        config(num_experts=4, num_experts_per_tok=5)
    assert config(num_experts=0).experts is None
    assert config(
        num_hidden_layers=6, decoder_sparse_step=3, mlp_only_layers=[2]
    ).experts.layers == (5,)


def config(**options):
    from transformers import Qwen3MoeConfig

    from jaxpage.models.mixtures import qwen3_moe_config

    hf = Qwen3MoeConfig(architectures=["Qwen3MoeForCausalLM"], **options)
    return qwen3_moe_config(hf, dtype="float32")


@pytest.mark.slow
def test_the_tokens_of_each_expert_are_counted_without_padding():
    sizes = dict(hidden_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=8)
    options = config(**sizes, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8)
    experts_of_layer = mlp_or_experts(options, 0)
    initialise(experts_of_layer, seed=0)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 30, 16)), jnp.float32)
    is_token = rng.random((2, 30)) < 0.7
    load: list[jax.Array] = []
    out = experts_of_layer(x, jnp.asarray(is_token), load)
    np.testing.assert_array_equal(out, experts_of_layer(x, jnp.asarray(is_token)))
    logits = np.asarray(x @ experts_of_layer.gate.weight[...].T)[is_token]
    expected = np.bincount(np.argsort(-logits)[:, :2].ravel(), minlength=6)
    assert len(load) == 1 and load[0].dtype == jnp.int32
    np.testing.assert_array_equal(load[0], expected)
