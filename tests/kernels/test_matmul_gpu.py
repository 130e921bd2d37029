"""The Mosaic GPU kernel of products of few tokens against the definition: interpreted anywhere, and for real with
`-m gpu`.

With a jax that is not of `hopper.JAX_VERSIONS` there is nothing to collect; CI has an environment for it. The
interpreter checks every access against its buffer, fills fresh memory with NaN, and detects races.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper import unsupported_jax
from pallas_kernels.matmul import cases, gpu
from pallas_kernels.quant_matmul.cases import LAYERS
from tests.kernels.hopper import interpreter, look_for_races_of_wgmma, sum_in_float64
from tests.kernels.matmul import MatmulTests

__test__ = unsupported_jax() is None
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fast_compiler")]


def run(*, dtype=jnp.float32, sizes=gpu.DEFAULT, interpret=None, **arguments) -> np.ndarray:
    options = dict(dtype=dtype, sizes=sizes, interpret=interpret)
    return np.asarray(jax.jit(partial(gpu.matmul, **options))(**arguments))


class TestInterpreted(MatmulTests):
    def product(self, **arguments):
        return run(**(dict(interpret=interpreter()) | arguments))


def test_no_two_copies_touch_the_same_memory_unordered(monkeypatch, capsys):
    """More chunks than stages. wgmma reads as a load would, but needs no fence before a copy over what it has read."""
    look_for_races_of_wgmma(monkeypatch)
    case = cases.Case(name="", num_in=1024, num_out=128, num_tokens=9)
    options = dict(
        sizes=gpu.TileSizes(rows=64, smem_kib=20), interpret=interpreter(detect_races=True)
    )
    TestInterpreted().check(case, **options)
    # Not `get_races().races_found`, which knows the last kernel only.
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize("case", [cases.SMALL[0], cases.SMALL[-1]], ids=str)
def test_a_row_is_the_same_to_the_bit_among_any_number_of_rows(case, monkeypatch):
    """Also with other sizes. How a chunk is summed is up to the GPU: here it is rounded correctly."""
    sum_in_float64(monkeypatch)
    arguments = cases.arguments(replace(case, num_tokens=64))
    options = dict(weight=arguments["weight"], interpret=interpreter())
    out = run(x=arguments["x"], **options)
    for rows in (slice(0, 1), slice(3, 11)):
        np.testing.assert_array_equal(run(x=arguments["x"][rows], **options), out[rows])
    for sizes in (gpu.TileSizes(rows=64), gpu.TileSizes(smem_kib=40)):
        np.testing.assert_array_equal(run(x=arguments["x"], sizes=sizes, **options), out)


@pytest.mark.gpu
class TestOnARealGPU(MatmulTests):
    def product(self, **arguments):
        return run(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS["3b"], ids=str)
def test_on_a_real_gpu_a_row_of_a_model_s_layer_does_not_depend_on_the_others(layer):
    case = cases.Case(name="", num_in=layer[0], num_out=layer[1], num_tokens=128)
    TestOnARealGPU().check(case)
    x, weight, _ = cases.arguments(case).values()
    out = run(x=x, weight=weight)
    for sizes in (gpu.DEFAULT, gpu.TileSizes(rows=64)):
        for num_tokens in (1, 8, 64, 100):
            some = run(x=x[:num_tokens], weight=weight, sizes=sizes)
            np.testing.assert_array_equal(some, out[:num_tokens])
