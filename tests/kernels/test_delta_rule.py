"""One token of the gated delta rule for rows in slots: XLA, and the kernel, interpreted, against the reference."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the races have no public name
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.delta_rule import cases, reference, tpu, xla
from pallas_kernels.delta_rule.cases import CASES, Case

INTERPRETED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def check(found, case: Case) -> None:
    """Other slots are as they were, to the bit; the null slot may be anything."""
    arguments = cases.arguments(case)
    states, out = map(np.asarray, found)
    wanted, wanted_out = map(np.asarray, reference.one_token(**arguments))
    own = np.asarray(arguments["rows"].slots)[: case.rows]
    others = np.setdiff1d(np.arange(1, case.num_slots), own)
    np.testing.assert_array_equal(states[others], wanted[others])
    assert np.isfinite(wanted[own]).all() and np.isfinite(wanted_out[: case.rows]).all()
    np.testing.assert_allclose(states[own], wanted[own], atol=1e-5, rtol=0)
    np.testing.assert_allclose(out[: case.rows], wanted_out[: case.rows], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("case", "together"),
    [
        *(pytest.param(case, 2, id=case.name, marks=pytest.mark.slow) for case in CASES),
        *((CASES[2], together) for together in (1, 5)),
    ],
)
def test_xla(case, together):
    check(jax.jit(partial(xla.one_token, together=together))(**cases.arguments(case)), case)


@pytest.mark.slow
@each_case
def test_the_kernel(case):
    check(jax.jit(partial(tpu.one_token, interpret=INTERPRETED))(**cases.arguments(case)), case)
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((8, 16, 2, 128, 128), None),
        ((8, 2, 1, 64, 256), None),
        ((8, 2, 1, 128, 64), "128 x 64 are not whole registers"),
        ((8, 2, 1, 12, 128), "12 x 128 are not whole registers"),
        ((8, 2, 32, 128, 128), "32 heads with one key"),
    ],
)
def test_which_states_the_kernel_serves(shape, reason):
    found = tpu.unsupported_reason(jax.ShapeDtypeStruct(shape, np.float32))
    assert found is None if reason is None else reason in str(found)
