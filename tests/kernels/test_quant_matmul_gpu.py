"""The Mosaic GPU kernel of products with quantised weights against the definition: interpreted anywhere, and for real
with `-m gpu`.

With a jax that is not of `hopper.JAX_VERSIONS` there is nothing to collect; CI has an environment for it. The
interpreter checks every access against its buffer, fills fresh memory with NaN, and detects races.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from pallas_kernels.hopper import unsupported_jax
from pallas_kernels.quant_matmul import cases, gpu
from pallas_kernels.quant_matmul.cases import Case
from tests.kernels.hopper import interpreter, look_for_races_of_wgmma, sum_in_float64
from tests.kernels.quant_matmul import QuantMatmulTests, case_of, scale_of_powers_of_two

__test__ = unsupported_jax() is None
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fast_compiler")]

ONE_OF_EACH = ("int8", "int4", "fp8", "int8-rounded-x", "int8-groups", "fp8-groups")
# Of a model's depth, so that inputs are split: 3 and 4 chunks a program.
SPLIT = (
    Case(name="int8-split", num_in=1408, num_out=128, num_tokens=3),
    Case(name="int8-rounded-x-split", num_in=1408, num_out=128, num_tokens=3, round_x=True),
    Case(name="fp8-split", num_in=1408, num_out=128, num_tokens=3, format="fp8_e4m3"),
    Case(name="int4-split", num_in=2816, num_out=128, num_tokens=3, format="int4", group_size=128),
    Case(name="int8-groups-split", num_in=1408, num_out=128, num_tokens=3, group_size=128),
    Case(
        name="fp8-groups-split",
        num_in=1408,
        num_out=128,
        num_tokens=3,
        format="fp8_e4m3",
        group_size=128,
    ),
)


def run(x, weight, *, round_x: bool = False, **options) -> np.ndarray:
    return np.asarray(jax.jit(partial(gpu.quant_matmul, round_x=round_x, **options))(x, weight))


class Hopper(QuantMatmulTests):
    """Weights and x are not rounded, so only the order of float32's sums differs."""

    cases, bound = cases.SMALL + SPLIT, 5e-6

    @pytest.mark.parametrize("name", [*ONE_OF_EACH, "int8-rounded-x-split", "fp8-groups-split"])
    def test_bias_and_cast_come_last(self, name):
        """In the kernel, or after the sum of parts."""
        (case,) = (case for case in self.cases if case.name == name)
        self.check_what_comes_last(case)

    def product(self, x, weight, *, round_x, **options):
        return run(x, weight, round_x=round_x, **options)


class TestInterpreted(Hopper):
    def product(self, x, weight, *, round_x, **options):
        return run(x, weight, round_x=round_x, **(dict(interpret=interpreter()) | options))


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_no_two_copies_touch_the_same_memory_unordered(name, monkeypatch, capsys):
    """More chunks than stages. wgmma reads as a load would, but needs no fence before a copy over what it has read."""
    look_for_races_of_wgmma(monkeypatch)
    case = replace(case_of(name), num_in=1024, num_out=128, num_tokens=9)
    options = dict(sizes=gpu.TileSizes(most_stages=2), interpret=interpreter(detect_races=True))
    TestInterpreted().check(case, **options)
    # Not `get_races().races_found`, which knows the last kernel only.
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize("case", [*map(case_of, ONE_OF_EACH), *SPLIT], ids=lambda c: c.name)
def test_a_row_is_the_same_to_the_bit_among_any_number_of_rows(case, monkeypatch):
    """Also where one program takes all splits, and with fewer stages. How a chunk is summed is up to the GPU: here it
    is rounded correctly, and the scales of groups are powers of two. (NumPy's order depends on the shape, and
    XLA:CPU rounds a product before it is added or not, as it likes.)
    """
    sum_in_float64(monkeypatch)
    x, weight = cases.arguments(replace(case, num_tokens=64))
    weight = replace(weight, scale=scale_of_powers_of_two(weight))
    options = dict(round_x=case.round_x, interpret=interpreter())
    out = run(x, weight, **options)
    for rows in (slice(0, 1), slice(3, 11)):
        np.testing.assert_array_equal(run(x[rows], weight, **options), out[rows])
    for sizes in (gpu.TileSizes(enough_programs=1), gpu.TileSizes(smem_kib=40, most_stages=1)):
        np.testing.assert_array_equal(run(x, weight, sizes=sizes, **options), out)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype="float32"), "x is float32; the kernel reads bfloat16"),
        (dict(num_out=200), "200 outputs are no multiple of 128"),
        (dict(num_in=448), "448 inputs of int8 are no multiple of 128 bytes"),
        (dict(num_in=384, format="int4", group_size=64), "384 inputs of int4 are no multiple"),
        (dict(format="int4", group_size=256), "groups have 256 inputs, none of"),
        (dict(format="fp8_e4m3", round_x=True), "x is rounded for int8 weights"),
        (dict(group_size=128, round_x=True), "x is rounded for a scale per output"),
        (dict(group_size=64), r"groups have 64 inputs, none of \(128,\)"),
        (dict(format="fp8_e4m3", group_size=256), r"groups have 256 inputs, none of \(128,\)"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_what_the_kernel_cannot_do_it_refuses_with_the_reason(change, reason):
    case = Case(name="", **change)
    x, weight = cases.arguments(case)
    with pytest.raises(NotImplementedError, match=reason):
        gpu.quant_matmul(x, weight, round_x=case.round_x)


@pytest.mark.gpu
class TestOnARealGPU(Hopper):
    """As compiled: widened weights in registers, accumulators that begin at a value."""


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [(3584, 37888), (18944, 3584), (4864, 896)], ids=str)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_on_a_real_gpu_a_row_of_a_model_s_layer_does_not_depend_on_the_others(name, layer):
    case = replace(case_of(name), num_in=layer[0], num_out=layer[1], num_tokens=2048)
    TestOnARealGPU().check(case)
    x, weight = cases.arguments(case)
    out = run(x, weight, round_x=case.round_x)
    np.testing.assert_array_equal(run(x, weight, round_x=case.round_x), out)
    for num_tokens in (1, 8, 64, 100):
        np.testing.assert_array_equal(
            run(x[:num_tokens], weight, round_x=case.round_x), out[:num_tokens]
        )
