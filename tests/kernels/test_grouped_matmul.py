"""The grouped product in XLA, and JAX's TPU kernel as we call it, interpreted, against the definition."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import cases, reference, tpu, xla

IMPLEMENTATIONS = {
    "xla": jax.jit(xla.grouped_matmul),
    "tpu": jax.jit(partial(tpu.grouped_matmul, interpret=True)),
}
FAST = ("odd", "padding", "nothing")
CASES = [
    pytest.param(case, id=case.name, marks=() if case.name in FAST else pytest.mark.slow)
    for case in cases.SMALL
]
BOTH = [pytest.param("xla"), pytest.param("tpu", marks=pytest.mark.slow)]


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("case", CASES)
def test_every_case(case, implementation):
    arguments = cases.arguments(case)
    got = IMPLEMENTATIONS[implementation](**arguments)
    assert got.dtype == jnp.float32
    with jax.default_matmul_precision("highest"):
        expected = reference.grouped_matmul(**arguments)
    # Products of bfloat16 are exact in float32; sums of 128 to 1536 of them are not.
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)
    assert (np.asarray(got)[sum(case.group_sizes) :] == 0).all()


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_row_s_result_is_the_same_to_the_bit_in_any_company(implementation, dtype):
    """Alone with its expert, in other places of a tile, beside other rows, and beside experts of NaN."""
    case = cases.Case(
        name="", group_sizes=(5, 70, 0, 53), num_rows=130, num_inputs=384, dtype=dtype
    )
    arguments = cases.arguments(case)
    multiply = IMPLEMENTATIONS[implementation]
    together = np.asarray(multiply(**arguments))
    for row, group in ((6, 1), (74, 1), (127, 3), (0, 0)):
        for before in (0, 1, 31, 40):  # rows of its own group
            moved = cases.arguments(replace(case, group_sizes=(0,) * 4), seed=row + before)
            x = moved["x"].at[:before].set(1.5).at[before].set(arguments["x"][row])
            sizes = jnp.zeros(4, jnp.int32).at[group].set(before + 1)
            is_own = (jnp.arange(4) == group)[:, None, None]
            weights = jnp.where(is_own, arguments["weights"], jnp.nan)
            alone = np.asarray(multiply(x=x, weights=weights, group_sizes=sizes))
            np.testing.assert_array_equal(alone[before], together[row])
