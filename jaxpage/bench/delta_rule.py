"""Are the kernels of the gated delta rule correct on this device? See `kernels`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpage.bench import oracle
from jaxpage.bench.kernel_check import BAR_FLOAT32, Check
from pallas_kernels.delta_rule import cases, tpu, tpu_windows, xla
from pallas_kernels.delta_rule.reference import Tokens


class _Row(NamedTuple):
    slot: int
    first: int  # token
    end: int
    begins: bool  # the state before is zero, whatever is in the slot


def checks(platform: str, tiny: bool) -> Iterator[Check]:
    """Rows of one token, and of several in windows. NaN is in the null slot and where a sequence begins."""
    step = 3 if tiny else 1
    for case in cases.CASES[::step]:
        arguments = cases.arguments(case)
        given = arguments["rows"]
        slots, begins = np.asarray(given.slots), np.asarray(given.begins)
        rows = [_Row(slots[i], i, i + 1, begins[i]) for i in range(case.rows)]
        kernels = {"tpu": tpu.one_token, "xla": partial(xla.one_token, together=case.most)}
        error = partial(_error, arguments["states"], given.tokens, rows)
        yield from _checks(platform, kernels, f"one token, {case.name}", arguments, error)
    for case in cases.WINDOW_CASES[::step]:
        arguments = cases.window_arguments(case)
        rows = [_Row(*row) for row in case.rows]
        kernels = {"tpu": tpu_windows.by_windows, "xla": xla.by_windows}
        error = partial(_error, arguments["states"], arguments["windows"], rows)
        yield from _checks(platform, kernels, f"windows, {case.name}", arguments, error)


def _checks(
    platform: str,
    kernels: dict[str, Callable[..., Any]],
    name: str,
    arguments: dict[str, Any],
    error: Callable[[Any], float],
) -> Iterator[Check]:
    """One for each of the kernels that this platform can run."""
    for module, run in kernels.items():
        if module in (platform, "xla"):
            given = tuple(arguments.values())
            yield Check(f"delta_rule ({module}) {name}", run, given, error, BAR_FLOAT32)


def _error(states: jax.Array, tokens: Tokens, rows: list[_Row], found: tuple) -> float:
    """The largest relative error of a row's state or outputs; inf if another slot but the null slot has changed."""
    new, out = map(np.asarray, found)
    before = np.asarray(states)
    # Tokens have one axis, or two in windows; outputs have the same.
    lead = tokens.log_decay.ndim - 2
    flat = [oracle.float64(x).reshape(-1, *x.shape[lead:]) for x in tokens]
    out = out.reshape(-1, *out.shape[lead:])
    errors = [0.0]
    for row in rows:
        state = np.zeros(before.shape[1:]) if row.begins else oracle.float64(before[row.slot])
        own = slice(row.first, row.end)
        after, wanted = oracle.delta_rule(state, *(x[own] for x in flat))
        errors += [oracle.relative(new[row.slot], after), oracle.relative(out[own], wanted)]
    others = np.setdiff1d(np.arange(1, len(before)), [row.slot for row in rows])
    if new[others].tobytes() != before[others].tobytes():
        return float("inf")
    return max(errors)
