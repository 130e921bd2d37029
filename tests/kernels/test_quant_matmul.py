"""Products with quantised weights: rounding and packing against NumPy, and XLA's product against the definition."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpage.aot.contents import exchanges
from jaxpage.aot.hlo import parse
from jaxpage.device import Device
from jaxpage.ops import matmul as ops
from pallas_kernels.quant_matmul import cases, reference, xla
from pallas_kernels.quant_matmul.cases import Case
from pallas_kernels.quant_matmul.quantized import (
    FORMATS,
    FP8,
    QuantizedWeight,
    pack,
    quantize,
    round_rows,
)
from tests.kernels.quant_matmul import (
    QuantMatmulTests,
    case_of,
    distance,
    numpy_product,
    numpy_weight,
)

# One case of each kind, and both ways of XLA with groups.
FAST = (
    "int8",
    "int8-rounded-x",
    "int4-odd-number-of-groups",
    "fp8",
    "int8-groups-many-tokens",
    "fp8-groups-odd-number",
)


class TestReference(QuantMatmulTests):
    fast = ("int8-rounded-x", "int4-odd-number-of-groups", "fp8-groups-odd-number")
    bound = 1e-6

    def product(self, x, weight, *, round_x, **options):
        options = dict(round_x=round_x, **options)
        return np.asarray(jax.jit(partial(reference.quant_matmul, **options))(x, weight))


def bound_of_xla(name: str) -> float:
    """With many tokens every weight with 8 bits in groups is rounded: by half of bfloat16's step of 2^-7 at most."""
    return 2.0**-8 if name.endswith("many-tokens") else 3e-3


class TestXLA(QuantMatmulTests):
    """Weights are rounded to x's dtype, those with groups with their scale."""

    fast, bound = FAST, 3e-3

    def bound_of(self, case):
        return bound_of_xla(case.name)

    def product(self, x, weight, *, round_x, **options):
        options = dict(round_x=round_x, **options)
        return np.asarray(jax.jit(partial(xla.quant_matmul, **options))(x, weight))

    @pytest.mark.parametrize("name", ["int8", "int8-rounded-x"])
    def test_bias_and_cast_come_last(self, name):
        self.check_what_comes_last(case_of(name))


@pytest.mark.parametrize(
    ("format", "group_size", "half_step"),
    [
        ("int8", None, 0.5 / 127),
        ("int8", 64, 0.5 / 127),
        ("int4", 64, 1 / 15),
        ("fp8_e4m3", None, 2.0**-4),
        ("fp8_e4m3", 64, 2.0**-4),
    ],
)
def test_rounding_is_off_by_no_more_than_the_format_allows(format, group_size, half_step):
    """int4's ends may be cut off by the rounding of its zero: a whole step. fp8's error is relative."""
    w = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    w[3] = 0.0
    w[4] = np.abs(w[4])  # all of one sign: zero is still a number that int4 has
    got = numpy_weight(quantize(jnp.asarray(w), format, group_size))
    groups = w.reshape(64, -1, group_size or 256)
    high, low = groups.max(axis=2, keepdims=True), groups.min(axis=2, keepdims=True)
    span = (
        np.maximum(high, 0) - np.minimum(low, 0)
        if format == "int4"
        else np.abs(groups).max(axis=2, keepdims=True)
    )
    bound = half_step * (np.abs(groups) + span / 448 if format == "fp8_e4m3" else span)
    assert (np.abs(got.reshape(groups.shape) - groups) <= bound * 1.001).all()
    assert (got[3] == 0).all()


def test_a_row_of_x_is_off_by_half_a_step_at_most():
    x = np.random.default_rng(0).standard_normal((40, 100)).astype(np.float32)
    x[7] = 0.0
    integers, scale = map(np.asarray, jax.jit(round_rows)(x))
    assert integers.dtype == np.int8 and (np.abs(integers).max(axis=1)[x.any(axis=1)] == 127).all()
    np.testing.assert_allclose(scale[:7, 0], np.abs(x[:7]).max(axis=1) / 127, rtol=1e-6)
    assert (np.abs(integers * scale.astype(np.float64) - x) <= scale * 0.50001).all()


def test_what_is_in_the_middle_of_two_integers_is_rounded_alike_on_one_device_and_on_two():
    rng = np.random.default_rng(0)
    largest = rng.uniform(1, 9, (300, 1)).astype(np.float32)
    middles = (rng.integers(-126, 126, (300, 63)) + np.float32(0.5)) * (largest / np.float32(127))
    x = jnp.asarray(np.concatenate([largest, middles], axis=1))
    weight = quantize(jnp.asarray(rng.standard_normal((64, 64)), jnp.float32), "int8")
    product = jax.jit(partial(xla.quant_matmul, round_x=True))
    expected = product(x, weight)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    for by_out, by_in in (("x", None), (None, "x")):
        share = QuantizedWeight(
            data=jax.device_put(weight.data, NamedSharding(mesh, P(by_out, by_in))),
            scale=jax.device_put(weight.scale, NamedSharding(mesh, P(by_out))),
        )
        whole = jax.device_put(x, NamedSharding(mesh, P()))
        np.testing.assert_array_equal(product(whole, share), expected)


def test_the_first_of_two_groups_has_the_low_halves_of_bytes():
    q = jnp.asarray(np.arange(6, dtype=np.uint8)[None])  # groups 01 23 45
    weight = pack(q, jnp.ones((3, 1), jnp.float32), jnp.full((3, 1), 2, jnp.uint8))
    np.testing.assert_array_equal(weight.data, [[0x20, 0x31, 0x04, 0x05]])
    assert (weight.shape, weight.group_size) == ((1, 8), 2)
    np.testing.assert_array_equal(reference.dequantize(weight)[0], [-2, -1, 0, 1, 2, 3, 0, 0])


@pytest.mark.parametrize(
    ("by_out", "expected"),
    [pytest.param(True, {}, marks=pytest.mark.slow), (False, {"all-reduce": 1})],
)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("int8", marks=pytest.mark.slow),
        "int4",
        "fp8-groups",
        pytest.param("fp8-groups-many-tokens", marks=pytest.mark.slow),
    ],
)
def test_xla_divides_a_product_as_the_weight_is_divided(name, by_out, expected):
    """Over outputs without a word between devices, over inputs with one sum: int4 by pairs of groups, other
    formats by groups.
    """
    case = next(case for case in cases.SMALL if case.name == name)
    x, weight = cases.arguments(replace(case, num_in=1024))
    mesh = Mesh(np.array(jax.devices()[:4]), ("tensor",))

    def place(array, axis):
        spec = [None] * array.ndim
        if axis is not None:
            spec[axis] = "tensor"
        return jax.device_put(array, NamedSharding(mesh, P(*spec)))

    scale = weight.scale
    of_groups = scale.ndim - 1 if by_out else (0 if scale.ndim == 2 else None)
    placed = QuantizedWeight(
        data=place(weight.data, 0 if by_out else 1),
        scale=place(scale, of_groups),
        zero=None if weight.zero is None else place(weight.zero, of_groups),
    )
    arguments = place(x, None if by_out else 1), placed
    product = jax.jit(xla.quant_matmul).lower(*arguments).compile()
    found = exchanges(parse(product.as_text() or ""))
    assert {each.kind: each.count for each in found} == expected
    assert distance(product(*arguments), numpy_product(x, weight, False)) < bound_of_xla(name)


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3"])
def test_zeros_and_numbers_too_small_for_a_scale_are_zero(format):
    weight = jnp.asarray([[0.0, 0.0], [1e-36, -1e-37]], jnp.float32)
    found = quantize(weight, format)
    assert (np.asarray(found.data, np.float32) == 0).all() and (np.asarray(found.scale) == 1).all()


def test_what_does_not_fit_is_refused():
    x, weight = cases.arguments(cases.SMALL[0])
    with pytest.raises(ValueError, match="x has 500 inputs and the int8 weight 512"):
        reference.quant_matmul(x[:, :500], weight)
    with pytest.raises(ValueError, match="512 inputs are not divided into groups of 100"):
        quantize(jnp.zeros((8, 512)), "int4", 100)
    with pytest.raises(ValueError, match="512 inputs are not divided into groups of 100"):
        quantize(jnp.zeros((8, 512)), "fp8_e4m3", 100)
    x, weight = cases.arguments(Case(name="", format="fp8_e4m3"))
    with pytest.raises(ValueError, match="x is rounded for int8 weights, and this one is fp8_e4m3"):
        xla.quant_matmul(x, weight, round_x=True)
    x, weight = cases.arguments(Case(name="", group_size=128))
    with pytest.raises(ValueError, match="a scale per output, and this weight has groups of 128"):
        xla.quant_matmul(x, weight, round_x=True)


def test_a_scale_per_block_is_repeated_for_its_outputs():
    """As checkpoints with blocks of 128 x 128 have it: the weight is the same."""
    rng = np.random.default_rng(0)
    data = rng.standard_normal((256, 384)).astype(FP8)
    blocks = np.exp(rng.standard_normal((2, 3))).astype(np.float32)  # [outputs, inputs] / 128
    scale = jnp.asarray(np.repeat(blocks, 128, axis=0).T)
    weight = QuantizedWeight(data=jnp.asarray(data), scale=scale)
    assert (weight.shape, weight.group_size, weight.has_groups) == ((256, 384), 128, True)
    wanted = data.astype(np.float32) * np.kron(blocks, np.ones((128, 128), np.float32))
    np.testing.assert_array_equal(jax.jit(reference.dequantize)(weight), wanted)


TPU, CPU = Device(platform="tpu", kind="TPU v6 lite"), Device(platform="cpu")
HOPPER = Device(platform="gpu", kind="NVIDIA H200", compute_capability="9.0")
MESH = Mesh(np.array(jax.devices()[:8]), ("tensor",))


def test_a_kernel_serves_where_it_can_and_says_why_not_elsewhere():
    _, weight = cases.arguments(Case(name="", num_out=200))
    chosen = ops.choose(weight, TPU)
    assert chosen.chosen.platform == "tpu" and chosen.reason is None
    ampere = replace(HOPPER, compute_capability="8.0")
    for device, options, reason in (
        (
            TPU,
            dict(mesh=MESH, spec=P(None, "tensor")),
            "128 inputs are no multiple|64 inputs are no",
        ),
        (TPU, dict(dtype="float32"), "x is float32"),
        (ampere, {}, r"9\.0; this device's is 8"),
        (HOPPER, {}, r"200 outputs are no multiple of 128|the kernels need jax"),
    ):
        choice = ops.choose(weight, device, **options)
        assert choice.chosen == ops.XLA and re.search(reason, choice.reason or "")


@pytest.mark.parametrize("format", FORMATS)
def test_a_cpu_has_xla_and_no_reason_is_asked_for(format):
    """Rows of x are rounded for int8 weights."""
    group_size = 64 if format == "int4" else None
    x, weight = cases.arguments(Case(name="", format=format, group_size=group_size))
    choice = ops.choose(weight, CPU)
    assert choice.chosen == ops.XLA and choice.reason is None
    product = jax.jit(partial(ops.matmul, kernel=ops.XLA))
    wanted = jax.jit(partial(xla.quant_matmul, round_x=format == "int8"))
    np.testing.assert_array_equal(product(x, weight), wanted(x, weight))
