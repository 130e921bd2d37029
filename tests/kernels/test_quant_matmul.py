"""Products with quantised weights: rounding and packing against NumPy, and XLA's product against the definition."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpage.aot.hlo import collectives
from jaxpage.ops import matmul as ops
from pallas_kernels.quant_matmul import cases, reference, xla
from pallas_kernels.quant_matmul.cases import Case
from pallas_kernels.quant_matmul.quantized import (
    FORMATS,
    QuantizedWeight,
    pack,
    quantize,
    round_rows,
)


def numpy_weight(weight: QuantizedWeight) -> np.ndarray:
    """float64[F, E] of a formula written out, a number at a time."""
    data, scale = np.asarray(weight.data), np.asarray(weight.scale, np.float64)
    if weight.format != "int4":
        return data.astype(np.float64) * scale[:, None]
    num_out, num_in = weight.shape
    size, out = weight.group_size, np.zeros((num_out, num_in))
    for column in range(num_in):
        group = column // size
        byte = data[:, group // 2 * size + column % size].astype(int)
        q = byte // 16 if group % 2 else byte % 16
        zero = 8 if weight.zero is None else np.asarray(weight.zero)[group].astype(int)
        out[:, column] = (q - zero) * scale[group]
    return out


def numpy_product(x, weight: QuantizedWeight, round_x: bool) -> np.ndarray:
    x, w = np.asarray(x, np.float64), numpy_weight(weight)
    if round_x:  # whose oracle is a test below: which way half a step is rounded depends on the last bit of the scale
        integers, scale = (np.asarray(each, np.float64) for each in jax.jit(round_rows)(x))
        x = integers * scale
    return x @ w[:, : x.shape[1]].T


def marked(every: Iterable[Case]) -> list:
    """One case of each kind for the fast core."""
    fast = ("int8", "int8-rounded-x", "int4-odd-number-of-groups", "fp8")
    slow = pytest.mark.slow
    return [
        pytest.param(case, id=case.name, marks=() if case.name in fast else slow) for case in every
    ]


def distance(got, want) -> float:
    """The greatest norm of a row's error, in units of the row's norm."""
    error = np.linalg.norm(np.asarray(got, np.float64) - want, axis=1)
    return float((error / np.linalg.norm(want, axis=1)).max())


@pytest.mark.parametrize("case", marked(cases.SMALL))
def test_the_definition_and_xla_against_numpy(case):
    x, weight = cases.arguments(case)
    want = numpy_product(x, weight, case.round_x)
    for implementation, bound in ((reference, 1e-6), (xla, 3e-3)):
        product = jax.jit(partial(implementation.quant_matmul, round_x=case.round_x))
        got = product(x, weight)
        assert got.shape == want.shape and got.dtype == jnp.float32
        assert distance(got, want) < bound


@pytest.mark.parametrize(
    ("format", "group_size", "half_step"),
    [("int8", None, 0.5 / 127), ("int4", 64, 1 / 15), ("fp8_e4m3", None, 2.0**-4)],
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


def test_the_first_of_two_groups_has_the_low_halves_of_bytes():
    q = jnp.asarray(np.arange(6, dtype=np.uint8)[None])  # groups 01 23 45
    weight = pack(q, jnp.ones((3, 1), jnp.float32), jnp.full((3, 1), 2, jnp.uint8))
    np.testing.assert_array_equal(weight.data, [[0x20, 0x31, 0x04, 0x05]])
    assert (weight.shape, weight.group_size) == ((1, 8), 2)
    np.testing.assert_array_equal(reference.dequantize(weight)[0], [-2, -1, 0, 1, 2, 3, 0, 0])


@pytest.mark.parametrize(("by_out", "expected"), [(True, {}), (False, {"all-reduce": 1})])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_xla_divides_a_product_as_the_weight_is_divided(name, by_out, expected):
    """Over outputs without a word between devices, over inputs with one sum: int4 by pairs of groups."""
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
    found = collectives(product.as_text() or "")
    assert {kind: each["count"] for kind, each in found.items()} == expected
    assert distance(product(*arguments), numpy_product(x, weight, False)) < 3e-3


def test_what_does_not_fit_is_refused():
    x, weight = cases.arguments(cases.SMALL[0])
    with pytest.raises(ValueError, match="x has 500 inputs and the int8 weight 512"):
        reference.quant_matmul(x[:, :500], weight)
    with pytest.raises(ValueError, match="512 inputs are not divided into groups of 100"):
        quantize(jnp.zeros((8, 512)), "int4", 100)
    x, weight = cases.arguments(Case(name="", format="fp8_e4m3"))
    with pytest.raises(ValueError, match="x is rounded for int8 weights, and this one is fp8_e4m3"):
        xla.quant_matmul(x, weight, round_x=True)


def test_a_kernel_serves_where_it_can_and_says_why_not_elsewhere():
    _, weight = cases.arguments(Case(name="", num_out=200))
    chosen, reason = ops.choose(weight, platform="tpu", num_devices=1)
    assert chosen.name == "tpu" and reason is None
    for options, reason in (
        (dict(platform="tpu", num_devices=4), "4 devices share the weight"),
        (dict(platform="tpu", num_devices=1, dtype="float32"), "x is float32"),
        (
            dict(platform="gpu", num_devices=1, compute_capability="8.0"),
            r"9\.0; this device's is 8",
        ),
        (
            dict(platform="gpu", num_devices=1),
            r"200 outputs are no multiple of 128|the kernels need jax",
        ),
    ):
        implementation, said = ops.choose(weight, **options)
        assert implementation == ops.XLA and re.search(reason, said or "")


@pytest.mark.parametrize("format", FORMATS)
def test_a_cpu_has_xla_and_no_reason_is_asked_for(format):
    x, weight = cases.arguments(Case(name="", format=format, group_size=64))
    assert ops.choose(weight, platform="cpu", num_devices=1) == (ops.XLA, None)
    product = jax.jit(partial(ops.quant_matmul, implementation=ops.XLA))
    np.testing.assert_array_equal(product(x, weight), jax.jit(xla.quant_matmul)(x, weight))
