"""What every implementation of a recurrent rule has to leave in the slots of states, and to return."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from pallas_kernels.delta_rule.cases import Case, WindowCase


def check_one_token(
    found: Any, case: Case, definitions: tuple[ModuleType, ModuleType], *, atol: float = 1e-5
) -> None:
    """`definitions`: of cases, and the reference; `atol`: of outputs."""
    arguments = definitions[0].arguments(case)
    states, out = map(np.asarray, found)
    wanted, wanted_out = map(np.asarray, definitions[1].one_token(**arguments))
    own = np.asarray(arguments["rows"].slots)[: case.rows]
    check_states(states, wanted, own, atol=1e-5)
    assert np.isfinite(wanted_out[: case.rows]).all()
    np.testing.assert_allclose(out[: case.rows], wanted_out[: case.rows], atol=atol, rtol=0)


def check_windows(found: Any, wanted: Any, case: WindowCase, *, atol: float) -> None:
    """Outputs may be by windows, or of all windows' tokens."""
    states, out = map(np.asarray, found)
    wanted_states, wanted_out = map(np.asarray, wanted)
    own = np.array([slot for slot, *_ in case.rows], int)
    check_states(states, wanted_states, own, atol=atol)
    out = out.reshape(-1, *out.shape[2:])
    wanted_out = wanted_out.reshape(out.shape)
    for _, first, end, _ in case.rows:
        np.testing.assert_allclose(out[first:end], wanted_out[first:end], atol=atol, rtol=0)


def check_states(states: np.ndarray, wanted: np.ndarray, own: np.ndarray, *, atol: float) -> None:
    """`own`: slots with rows. Others are as they were, to the bit; the null slot may be anything."""
    others = np.setdiff1d(np.arange(1, len(states)), own)
    np.testing.assert_array_equal(states[others], wanted[others])
    assert np.isfinite(wanted[own]).all()
    np.testing.assert_allclose(states[own], wanted[own], atol=atol, rtol=0)
