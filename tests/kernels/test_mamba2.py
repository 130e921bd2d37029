"""Mamba-2 for rows in slots: XLA, and the kernel, interpreted, against the reference."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the races have no public name
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.delta_rule import xla
from pallas_kernels.delta_rule.cases import OWN_WINDOWS, Case, WindowCase
from pallas_kernels.mamba2 import cases, reference, tpu, tpu_windows
from pallas_kernels.mamba2.cases import CASES, WINDOW_CASES
from pallas_kernels.mamba2.chunks import MAMBA2
from tests.kernels.slots import check_one_token, check_windows

INTERPRETED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
ODD_SIZES = WindowCase(
    name="odd-sizes", rows=((2, 3, 90, False),), values=3, value_dim=24, key_dim=16
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def check(found, case: Case) -> None:
    check_one_token(found, case, (cases, reference), atol=2e-5)


@pytest.mark.parametrize("together", [1, 2, 5])
def test_xla(together):
    case = CASES[3]
    run = jax.jit(partial(xla.one_token, together=together, rule=MAMBA2))
    check(run(**cases.arguments(case)), case)


@pytest.mark.slow
@each_case
def test_the_kernel(case):
    check(jax.jit(partial(tpu.one_token, interpret=INTERPRETED))(**cases.arguments(case)), case)
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((8, 1, 128, 3072), None),
        ((8, 8, 128, 1024), None),
        ((8, 1, 16, 128), None),
        ((8, 2, 128, 192), "128 x 192 are not whole registers"),
        ((8, 2, 12, 128), "12 x 128 are not whole registers"),
        ((8, 2, 4096, 128), "128 columns of 4096 numbers"),
    ],
)
def test_which_states_the_kernel_serves(shape, reason):
    found = tpu.unsupported_reason(jax.ShapeDtypeStruct(shape, np.float32))
    assert found is None if reason is None else reason in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*WINDOW_CASES, ODD_SIZES], ids=lambda case: case.name)
def test_xla_by_windows(case):
    run = jax.jit(partial(xla.by_windows, rule=MAMBA2))
    check_all(run(**cases.window_arguments(case)), case, atol=2e-5)


@pytest.mark.slow
def test_rows_with_a_window_each():
    run = jax.jit(partial(xla.one_window, together=3, rule=MAMBA2))
    check_all(run(**cases.window_arguments(OWN_WINDOWS)), OWN_WINDOWS, atol=2e-5)


def check_all(found, case: WindowCase, *, atol: float) -> None:
    """Kernels add up three products of bfloat16."""
    check_windows(found, one_by_one(case), case, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("case", WINDOW_CASES, ids=lambda case: case.name)
def test_the_kernel_by_windows(case):
    run = jax.jit(partial(tpu_windows.by_windows, interpret=INTERPRETED))
    check_all(run(**cases.window_arguments(case)), case, atol=5e-5)
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found


@pytest.mark.parametrize(
    ("shape", "num_values", "reason"),
    [
        ((8, 1, 128, 4096), 64, None),
        ((8, 8, 128, 1024), 16, None),
        ((8, 1, 128, 3072), 48, None),
        ((8, 1, 256, 512), 2, None),
        ((8, 1, 64, 512), 2, "64 x 2 x 256 are not whole registers"),
        ((8, 1, 128, 384), 4, "128 x 4 x 96 are not whole registers"),
        ((8, 1, 128, 4096), 2, "2 heads of 2048 cannot be divided"),
    ],
)
def test_which_states_the_kernel_for_windows_serves(shape, num_values, reason):
    found = tpu_windows.unsupported_reason(jax.ShapeDtypeStruct(shape, np.float32), num_values)
    assert found is None if reason is None else reason in str(found)


def one_by_one(case: WindowCase) -> tuple[np.ndarray, np.ndarray]:
    """The states after the tokens of each row, one after the other, and the outputs of all windows' tokens."""
    arguments = cases.window_arguments(case)
    tokens = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arguments["windows"])
    states, out = np.array(arguments["states"]), np.zeros_like(tokens.v)
    drafts = case.drafts or (0,) * len(case.rows)
    for (slot, first, end, begins), num_drafts in zip(case.rows, drafts, strict=True):
        state = jnp.zeros_like(states[:1]) if begins else jnp.asarray(states[slot : slot + 1])
        for token in range(first, end):
            own = jax.tree.map(lambda x, token=token: x[token : token + 1], tokens)
            state, new = reference.next_state(state, own)
            out[token] = new[0]
            if token < end - num_drafts:
                states[slot] = state[0]
    return states, out
