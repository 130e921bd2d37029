"""The gated delta rule for rows in slots: XLA, and the kernels, interpreted, against the reference."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the races have no public name
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.delta_rule import cases, reference, tpu, tpu_windows, xla
from pallas_kernels.delta_rule.cases import CASES, OWN_WINDOWS, WINDOW_CASES, Case, WindowCase
from tests.kernels.slots import check_one_token, check_windows

INTERPRETED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def check(found, case: Case) -> None:
    check_one_token(found, case, (cases, reference))


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


def check_all(found, case: WindowCase) -> None:
    """Kernels add up three products of bfloat16."""
    wanted = reference.by_windows(**cases.window_arguments(case))
    check_windows(found, wanted, case, atol=5e-5)


each_window_case = pytest.mark.parametrize("case", WINDOW_CASES, ids=lambda case: case.name)


@pytest.mark.slow
@each_window_case
def test_xla_by_windows(case):
    check_all(jax.jit(xla.by_windows)(**cases.window_arguments(case)), case)


@pytest.mark.parametrize(
    "together", [pytest.param(n, marks=pytest.mark.slow) for n in (1, 4, 8)] + [3]
)
def test_rows_with_a_window_each(together):
    run = jax.jit(partial(xla.one_window, together=together))
    check_all(run(**cases.window_arguments(OWN_WINDOWS)), OWN_WINDOWS)


@pytest.mark.slow
@each_window_case
def test_the_kernel_by_windows(case):
    run = jax.jit(partial(tpu_windows.by_windows, interpret=INTERPRETED))
    check_all(run(**cases.window_arguments(case)), case)
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((8, 16, 2, 128, 128), None),
        ((8, 2, 1, 128, 256), None),
        ((8, 2, 1, 64, 128), "64 x 128 are not whole registers"),
        ((8, 2, 9, 128, 128), "9 states of 128 x 128"),
    ],
)
def test_which_states_the_kernel_for_windows_serves(shape, reason):
    found = tpu_windows.unsupported_reason(jax.ShapeDtypeStruct(shape, np.float32))
    assert found is None if reason is None else reason in str(found)
