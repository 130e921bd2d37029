"""Products with weights that are not quantised: the definition and XLA's, and which implementation is chosen."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpage.device import Device
from jaxpage.ops import matmul as ops
from pallas_kernels import hopper, tile_sizes
from pallas_kernels.matmul import cases, gpu, reference, tune, xla
from pallas_kernels.tile_sizes import tuned_sizes
from tests.kernels.matmul import MatmulTests
from tests.kernels.quant_matmul import distance

H200 = Device(platform="gpu", kind="NVIDIA H200", compute_capability="9.0")
WEIGHT = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)


class TestReference(MatmulTests):
    def product(self, **arguments):
        return np.asarray(reference.matmul(**arguments))


class TestXLA(MatmulTests):
    def product(self, *, dtype=jnp.float32, **arguments):
        return np.asarray(jax.jit(partial(xla.matmul, dtype=dtype))(**arguments))

    def test_x_may_have_more_axes(self):
        arguments = cases.arguments(cases.SMALL[3])
        want = self.product(**arguments)
        arguments["x"] = arguments["x"][None, :, None]
        np.testing.assert_array_equal(self.product(**arguments)[0, :, 0], want)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """An H200 on which the kernel is faster for up to 64 tokens; with a jax and ptxas that can compile it."""
    monkeypatch.setattr(gpu, "unsupported_jax", lambda: None)
    monkeypatch.setattr(hopper, "unsupported_ptxas_here", lambda: None)
    sizes = gpu.TileSizes(rows=64, xla_from=65)
    tile_sizes.write(H200.kind, sizes, {}, tmp_path)
    monkeypatch.setattr(ops, "tuned_sizes", partial(tuned_sizes, folder=tmp_path))
    return sizes


def test_the_kernel_multiplies_few_tokens_where_it_was_measured_to_be_faster(measured, monkeypatch):
    choice = ops.choose(WEIGHT, H200)
    assert choice.chosen == ops.MatmulKernel("gpu", measured)
    calls = []

    def kernel(x, weight, *, sizes, **last):
        calls.append((x.shape, sizes))
        return xla.matmul(x, weight, **last)

    monkeypatch.setattr(gpu, "matmul", kernel)
    weight = jnp.ones(WEIGHT.shape, WEIGHT.dtype)
    for shape in ((64, 512), (2, 32, 512), (65, 512), (2, 33, 512)):
        out = ops.matmul(jnp.ones(shape, jnp.bfloat16), weight, kernel=choice.chosen)
        assert out.shape == (*shape[:-1], 256)
    assert calls == [((64, 512), measured)] * 2


@pytest.mark.parametrize("spec", [P(), P("t"), P(None, "t")], ids=str)
def test_devices_multiply_their_shares_of_a_weight(spec, monkeypatch):
    shapes = []

    def kernel(x, weight, *, sizes, **last):
        shapes.append((x.shape, weight.shape))
        return xla.matmul(x, weight, **last)

    monkeypatch.setattr(gpu, "matmul", kernel)
    mesh = jax.make_mesh((2,), ("t",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    kernel_of_two = ops.MatmulKernel("gpu", gpu.TileSizes(xla_from=9), mesh, spec)
    arguments = cases.arguments(cases.SMALL[3])
    want = xla.matmul(**arguments)
    x, weight, bias = arguments.values()
    multiply = jax.jit(partial(ops.matmul, kernel=kernel_of_two))
    out = multiply(x[:, None], weight, bias=bias)[:, 0]
    assert distance(out, np.asarray(want, np.float64)) < 5e-6
    outputs, inputs = (1 + (axis == "t") for axis in (*spec, None, None)[:2])
    assert shapes == [((5, 512 // inputs), (256 // outputs, 512 // inputs))]


@pytest.mark.parametrize(
    ("device", "weight", "reason"),
    [
        (H200, jax.ShapeDtypeStruct((200, 512), jnp.bfloat16), "200 outputs are no multiple of"),
        (H200, jax.ShapeDtypeStruct((256, 96), jnp.bfloat16), "96 inputs are no multiple of 64"),
        (H200, jax.ShapeDtypeStruct((256, 512), jnp.float32), "the weight is float32"),
        (Device(platform="gpu", kind="A100", compute_capability="8.0"), WEIGHT, "for Hopper GPUs"),
        (Device(platform="gpu", kind="H20", compute_capability="9.0"), WEIGHT, "faster on H20"),
        (Device(platform="cpu"), WEIGHT, None),
        (Device(platform="tpu", kind="TPU v6 lite"), WEIGHT, None),
    ],
    ids=str,
)
def test_everything_else_is_left_to_xla_with_the_reason(measured, device, weight, reason):
    choice = ops.choose(weight, device)
    assert choice.chosen == ops.XLA
    assert choice.reason is None if reason is None else re.search(reason, choice.reason or "")


@pytest.mark.parametrize(
    ("faster_up_to", "seconds_then", "xla_from"),
    [(0, 2.0, 1), (16, 2.0, 17), (128, 2.0, 129), (64, 1.1, 65), (0, 1.0, 1), (0, 1.02, 1)],
    ids=str,
)
def test_tuning_finds_up_to_how_many_tokens_the_kernel_is_clearly_faster(
    faster_up_to, seconds_then, xla_from, monkeypatch
):
    """XLA takes a second for everything; 64 rows are faster."""

    def seconds(sizes, num_tokens, layer):
        if sizes is None:
            return 1.0
        fast = num_tokens <= faster_up_to
        return (0.5 if fast else seconds_then) * (1.0 if sizes.rows == 64 else 1.2)

    monkeypatch.setattr(tune, "_seconds_of", seconds)
    sizes, found = tune.tune("gpu")
    assert (sizes.rows, sizes.xla_from) == (64, xla_from)
    assert len(found) == 6 + 5


@pytest.mark.slow
def test_what_is_timed_are_products_of_all_copies_in_each_loop(monkeypatch):
    monkeypatch.setattr(tune, "LOOPS", 3)
    xs, weights = tune._arguments(2, 64, 128)
    assert len(xs) == len(weights) == tune.COPIES
    text = jax.jit(partial(tune._loops, xla.matmul)).lower(xs, weights).compile().as_text()
    results = "f32[2,128]"
    assert results in text and results not in text[text.index("ENTRY") :]
    for got, x in zip(tune._loops(xla.matmul, xs, weights), xs, strict=True):
        np.testing.assert_array_equal(got, x)


def test_there_is_nothing_to_tune_on_a_tpu():
    with pytest.raises(SystemExit, match="for Hopper GPUs only"):
        tune.tune("tpu")
