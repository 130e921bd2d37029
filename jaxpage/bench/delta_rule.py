"""Are the kernels of the gated delta rule and of Mamba-2 correct on this device? See `kernels`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpage.bench import oracle
from jaxpage.bench.kernel_check import BAR_FLOAT32, Check
from jaxpage.ops.delta_rule import AnyTokens
from pallas_kernels.delta_rule import cases, tpu_windows, xla
from pallas_kernels.delta_rule.chunks import DELTA, Rule
from pallas_kernels.mamba2 import cases as mamba2_cases
from pallas_kernels.mamba2 import tpu_windows as mamba2_windows
from pallas_kernels.mamba2.chunks import MAMBA2
from pallas_kernels.tile_sizes import kernel_of


class _Row(NamedTuple):
    slot: int
    first: int  # token
    end: int
    begins: bool  # the state before is zero, whatever is in the slot


class _Rule(NamedTuple):
    name: str  # the folder of its kernels
    cases: Any  # its module of cases
    rule: Rule  # for XLA
    by_windows: Callable[..., Any]  # kernel of a TPU
    oracle: Callable[..., tuple[np.ndarray, np.ndarray]]


_RULES = (
    _Rule("delta_rule", cases, DELTA, tpu_windows.by_windows, oracle.delta_rule),
    _Rule(
        "mamba2",
        mamba2_cases,
        MAMBA2,
        mamba2_windows.by_windows,
        oracle.mamba2,
    ),
)


def checks(platform: str, tiny: bool) -> Iterator[Check]:
    """Rows of one token, and of several in windows. NaN is in the null slot and where a sequence begins."""
    for rule in _RULES:
        yield from _checks(rule, platform, 3 if tiny else 1)


def _checks(rule: _Rule, platform: str, step: int) -> Iterator[Check]:
    """step: one of so many cases."""
    by_token = {} if platform == "cpu" else {platform: kernel_of(rule.name, platform).one_token}
    for case in rule.cases.CASES[::step]:
        arguments = rule.cases.arguments(case)
        given = arguments["rows"]
        slots, begins = np.asarray(given.slots), np.asarray(given.begins)
        rows = [_Row(slots[i], i, i + 1, begins[i]) for i in range(case.rows)]
        by_xla = partial(xla.one_token, together=case.most, rule=rule.rule)
        error = partial(_error, rule, arguments["states"], given.tokens, rows)
        for module, run in _of_platform(platform, by_token, by_xla):
            name = f"{rule.name} ({module}) one token, {case.name}"
            yield Check(name, run, tuple(arguments.values()), error, BAR_FLOAT32)
    for case in rule.cases.WINDOW_CASES[::step]:
        arguments = rule.cases.window_arguments(case)
        rows = [_Row(*row) for row in case.rows]
        by_xla = partial(xla.by_windows, rule=rule.rule)
        error = partial(_error, rule, arguments["states"], arguments["windows"], rows)
        for module, run in _of_platform(platform, {"tpu": rule.by_windows}, by_xla):
            name = f"{rule.name} ({module}) windows, {case.name}"
            yield Check(name, run, tuple(arguments.values()), error, BAR_FLOAT32)


def _of_platform(
    platform: str, kernels: Mapping[str, Callable[..., Any]], by_xla: Callable[..., Any]
) -> list[tuple[str, Callable[..., Any]]]:
    """What this platform can run. kernels: by platform."""
    return [*((name, run) for name, run in kernels.items() if name == platform), ("xla", by_xla)]


def _error(
    rule: _Rule, states: jax.Array, tokens: AnyTokens, rows: list[_Row], found: tuple
) -> float:
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
        after, wanted = rule.oracle(state, *(x[own] for x in flat))
        errors += [oracle.relative(new[row.slot], after), oracle.relative(out[own], wanted)]
    others = np.setdiff1d(np.arange(1, len(before)), [row.slot for row in rows])
    if new[others].tobytes() != before[others].tobytes():
        return float("inf")
    return max(errors)
