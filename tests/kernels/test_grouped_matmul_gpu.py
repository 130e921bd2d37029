"""The Mosaic GPU kernel of the grouped product against the definition, in jax's interpreter.

With a jax that is not of `hopper.JAX_VERSIONS` there is nothing to collect; CI has an environment for it.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import cases, gpu, reference
from pallas_kernels.hopper import unsupported_jax

__test__ = unsupported_jax() is None

CASES = [
    case
    for case in cases.SMALL
    if gpu.unsupported_reason(
        **{k: v for k, v in cases.arguments(case).items() if k != "group_sizes"}
    )
    is None
]


def multiply(arguments, sizes=gpu.DEFAULT, **options):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    options = dict(sizes=sizes, interpret=plgpu.InterpretGPUParams(**options))
    return np.asarray(jax.jit(partial(gpu.grouped_matmul, **options))(**arguments))


def check(case, got):
    expected = reference.grouped_matmul(**cases.arguments(case))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)
    assert (got[sum(case.group_sizes) :] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case(case, capsys):
    check(case, multiply(cases.arguments(case), detect_races=True))
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_row_s_result_is_the_same_to_the_bit_in_any_company():
    """Alone with its expert, in other places of a tile, beside experts of NaN, and in larger tiles."""
    case = cases.Case(name="", group_sizes=(5, 70, 0, 53), num_rows=130, num_inputs=384)
    arguments = cases.arguments(case)
    together = multiply(arguments)
    for row, group in ((6, 1), (127, 3)):
        for before, num_rows in ((0, 130), (31, 300)):
            x = jnp.full((num_rows, case.num_inputs), 1.5, jnp.bfloat16)
            x = x.at[before].set(arguments["x"][row])
            is_own = (jnp.arange(4) == group)[:, None, None]
            alone = {
                "x": x,
                "weights": jnp.where(is_own, arguments["weights"], jnp.nan),
                "group_sizes": jnp.zeros(4, jnp.int32).at[group].set(before + 1),
            }
            np.testing.assert_array_equal(multiply(alone)[before], together[row])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["odd", "wide", "edges-of-tiles"])
def test_other_sizes_are_right_too(name, capsys):
    """Twice as many columns, or tiles of 128 rows for few; no more stages than there must be."""
    case = next(case for case in CASES if case.name == name)
    for sizes in (
        gpu.TileSizes(few_columns=256, few_stages=2),
        gpu.TileSizes(few_rows=1, many_stages=2),
    ):
        check(case, multiply(cases.arguments(case), sizes, detect_races=True))
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype=jnp.float32), "x is float32 and the weights float32; they must be bfloat16"),
        (dict(num_inputs=96), "weights of 256 outputs and 96 inputs; they must be multiples of"),
        (dict(num_outputs=200), "weights of 200 outputs and 128 inputs"),
    ],
    ids=str,
)
def test_what_the_kernel_cannot_do_it_refuses_with_the_reason(change, reason):
    shape = dict(num_inputs=128, num_outputs=256, dtype=jnp.bfloat16) | change
    x = jnp.zeros((8, shape["num_inputs"]), shape["dtype"])
    weights = jnp.zeros((2, shape["num_outputs"], shape["num_inputs"]), shape["dtype"])
    with pytest.raises(NotImplementedError, match=reason):
        gpu.grouped_matmul(x, weights, jnp.ones(2, jnp.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_a_real_gpu(case):
    check(case, np.asarray(jax.jit(gpu.grouped_matmul)(**cases.arguments(case))))
