"""The Mosaic GPU kernel of the grouped product against the definition, in jax's interpreter.

With a jax that is not of `hopper.JAX_VERSIONS` there is nothing to collect; CI has an environment for it.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.device import Device
from jaxpage.ops import experts
from pallas_kernels import hopper
from pallas_kernels.grouped_matmul import cases, gpu
from pallas_kernels.quant_matmul.quantized import QuantizedWeight
from tests.kernels.grouped_matmul import GroupedMatmulTests, case_of, check

__test__ = hopper.unsupported_jax() is None


def multiply(arguments, sizes=gpu.DEFAULT, **options):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    options = dict(sizes=sizes, interpret=plgpu.InterpretGPUParams(**options))
    return np.asarray(jax.jit(partial(gpu.grouped_matmul, **options))(**arguments))


def is_served(case: cases.Case) -> bool:
    arguments = jax.eval_shape(partial(cases.arguments, case))
    return gpu.unsupported_reason(arguments["x"], arguments["weights"]) is None


class Hopper(GroupedMatmulTests):
    cases = tuple(filter(is_served, cases.SMALL))


@pytest.mark.slow
class TestInterpreted(Hopper):
    def multiply(self, **arguments):
        return multiply(arguments, detect_races=True)

    @pytest.fixture(autouse=True)
    def no_race_was_seen(self, capsys):
        yield
        assert "RACE DETECTED" not in capsys.readouterr().out

    def test_a_row_is_the_same_to_the_bit_in_any_company(self):
        """And in larger tiles. Sums are exact: the interpreter adds up on the CPU, each CPU in an order of its own."""
        rows = (6, 1), (127, 3)
        self.check_rows_alone("bfloat16", rows, before=(0, 31), lengths=(130, 300), exact=True)

    @pytest.mark.parametrize(
        ("number", "size"), [("int4", 128), ("int4", 64), ("int4", 32), ("fp8_e4m3", 128)]
    )
    def test_and_so_with_groups(self, number, size):
        options = dict(format=number, group_size=size, symmetric=number == "int4", num_outputs=128)
        options |= dict(lengths=(130, 300), exact=True)
        self.check_rows_alone("bfloat16", ((6, 1), (127, 3)), before=(0, 31), **options)


@pytest.mark.gpu
class TestOnARealGPU(Hopper):
    def multiply(self, **arguments):
        return np.asarray(jax.jit(gpu.grouped_matmul)(**arguments))

    def test_a_row_is_the_same_to_the_bit_in_any_company(self):
        """And in larger tiles."""
        rows = (6, 1), (127, 3)
        self.check_rows_alone("bfloat16", rows, before=(0, 31), lengths=(130, 300))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("odd", gpu.TileSizes(few_rows=1, many_stages=2)),
        ("wide", gpu.TileSizes(few_columns=256, few_stages=2)),
        ("edges-of-tiles", gpu.TileSizes(few_rows=1, many_stages=2)),
        ("int8", gpu.TileSizes(few_rows=1, many_stages=2)),
    ],
    ids=["odd", "wide", "edges-of-tiles", "int8"],
)
def test_other_sizes_are_right_too(name, sizes, capsys):
    """Twice as many columns, or tiles of 128 rows for few; no more stages than there must be."""
    case = case_of(name)
    arguments = cases.arguments(case)
    check(case, multiply(arguments, sizes, detect_races=True), arguments)
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype=jnp.float32), "x is float32 and the weights float32; they must be bfloat16"),
        (dict(num_inputs=96), "weights of 256 outputs and 96 inputs; they must be multiples of"),
        (dict(num_outputs=200), "weights of 200 outputs and 128 inputs"),
        (dict(num_inputs=192, dtype=jnp.int8), "192 inputs; they must be multiples of 128 and 128"),
    ],
    ids=str,
)
def test_what_the_kernel_cannot_do_it_refuses_with_the_reason(change, reason):
    shape = dict(num_inputs=128, num_outputs=256, dtype=jnp.bfloat16) | change
    x = jnp.zeros((8, shape["num_inputs"]), shape["dtype"])
    weights = jnp.zeros((2, shape["num_outputs"], shape["num_inputs"]), shape["dtype"])
    if weights.dtype == jnp.int8:
        weights = QuantizedWeight(data=weights, scale=jnp.ones(weights.shape[:2]))
    with pytest.raises(NotImplementedError, match=reason):
        gpu.grouped_matmul(x, weights, jnp.ones(2, jnp.int32))


SHAPE = (8, 256, 256)
WEIGHTS = {
    "bfloat16": jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16),
    "int8": QuantizedWeight(
        data=jax.ShapeDtypeStruct(SHAPE, jnp.int8),
        scale=jax.ShapeDtypeStruct((8, 256), jnp.float32),
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_experts_are_multiplied_by_the_kernel(monkeypatch, name):
    """In the dtype of the model, and rounded to int8."""
    monkeypatch.setattr(hopper, "unsupported_ptxas_here", lambda: None)
    device = Device(platform="gpu", kind="NVIDIA H200", compute_capability="9.0")
    assert experts.choose(WEIGHTS[name], WEIGHTS[name], device).chosen.platform == "gpu"


@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_int4_is_loaded_while_it_is_multiplied_by_two_programs_of_an_sm(group_size, tile):
    from pallas_kernels.grouped_matmul.gpu_quantized import MOST_STAGES, SMEM_KIB
    from pallas_kernels.quant_matmul.gpu_tile import memory_of, operands_of

    by_group = 2, 512 // group_size, 256
    weights = QuantizedWeight(
        data=jnp.zeros((2, 256, 256), jnp.uint8),
        scale=jnp.ones(by_group),
        zero=jnp.zeros(by_group, jnp.uint8),
    )
    operands = operands_of(jnp.zeros((tile, 512), jnp.bfloat16), weights)
    options = {"smem_kib": SMEM_KIB, "most_stages": MOST_STAGES, "interpret": None}
    stages = memory_of(operands, weights, tile, **options).stages
    num_stages = stages.x.shape[0]
    assert num_stages >= 2
    arrays = ((each.shape, jnp.dtype(each.dtype)) for each in stages.present())
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in arrays)
    # An SM has 228 KiB, and keeps 1 of them for each program. A stage has a barrier of 8 bytes.
    assert 2 * (size + 8 * num_stages) <= (228 - 2) * 1024
