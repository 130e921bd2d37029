"""Named rows and states, for tests: those of the delta rule, with the states of all heads of a key as one."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.delta_rule import cases, reference
from pallas_kernels.delta_rule.cases import Case, WindowCase
from pallas_kernels.mamba2.reference import Tokens

CASES = (
    Case(name="no-row", rows=0),
    Case(name="one-row", rows=1, values=4, value_dim=64),
    Case(name="all-rows", rows=5, keys=1, values=6, value_dim=64),
    Case(name="several-steps-a-row", rows=3, keys=1, values=48, value_dim=64),
    Case(name="narrow-keys", rows=4, key_dim=16),
    Case(name="one-value-a-key", rows=3, keys=8, values=1),
    Case(name="more-rows-than-a-register", rows=11, most=13, num_slots=16),
)
WINDOW_CASES = (
    WindowCase(name="no-row", rows=()),
    WindowCase(name="one-row-in-all-windows", rows=((3, 0, 128, True),), values=4, value_dim=64),
    WindowCase(
        name="rows-that-share-windows",
        rows=((2, 0, 50, True), (1, 50, 52, False), (4, 60, 127, True)),
        value_dim=32,
        values=4,
    ),
    WindowCase(
        name="several-steps-a-row", rows=((1, 5, 100, False),), keys=1, values=24, value_dim=64
    ),
    WindowCase(
        name="drafts",
        rows=((2, 0, 8, False), (1, 8, 11, True), (4, 16, 17, False), (5, 64, 73, False)),
        drafts=(3, 2, 0, 4),
        value_dim=64,
    ),
    WindowCase(name="wide-values", rows=((2, 30, 90, True),), value_dim=256),
    WindowCase(name="a-window-between", rows=((1, 0, 9, False), (5, 70, 128, True)), keys=1),
)


def arguments(case: Case) -> dict[str, Any]:
    """The arguments of `one_token`. NaN in the null slot, and where a sequence begins."""
    given = cases.arguments(case)
    tokens = _joined(given["rows"].tokens)
    return given | {
        "states": _state(given["states"]),
        "rows": given["rows"]._replace(tokens=tokens),
    }


def window_arguments(case: WindowCase) -> dict[str, Any]:
    """The arguments of `by_windows`, likewise."""
    given = cases.window_arguments(case)
    return given | {"states": _state(given["states"]), "windows": _joined(given["windows"])}


def _state(states: jax.Array) -> jax.Array:
    """[Q, N, D, J F] of [Q, N, J, D, F]"""
    turned = states.swapaxes(2, 3)
    return turned.reshape(*turned.shape[:3], -1)


def _joined(tokens: reference.Tokens) -> Tokens:
    v = tokens.v.reshape(*tokens.v.shape[:-2], -1)
    return Tokens(tokens.q, tokens.k, v, tokens.log_decay)
