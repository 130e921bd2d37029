"""Named rows and states, for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.delta_rule.reference import Parts, Rows, Tokens


@dataclass(frozen=True, kw_only=True)
class Case:
    """`rows`: those that count, of `most`."""

    name: str
    rows: int
    most: int = 5
    num_slots: int = 8
    keys: int = 2
    values: int = 2
    key_dim: int = 128
    value_dim: int = 128


CASES = (
    Case(name="no-row", rows=0),
    Case(name="one-row", rows=1),
    Case(name="all-rows", rows=5),
    Case(name="one-value-a-key", rows=3, keys=4, values=1),
    Case(name="several-steps-a-row", rows=3, keys=16, values=2),
    Case(name="three-values-a-key", rows=4, keys=5, values=3),
    Case(name="narrow-keys", rows=4, key_dim=64),
    Case(name="wide-values", rows=2, value_dim=256),
    Case(name="more-rows-than-a-register", rows=11, most=13, num_slots=16),
)


def arguments(case: Case) -> dict[str, Any]:
    """The arguments of `one_token`. NaN in the null slot, and where a sequence begins."""
    rng = np.random.default_rng(len(case.name))

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    heads = (case.keys, case.values)
    states = normal(case.num_slots, *heads, case.key_dim, case.value_dim)
    slots = rng.permutation(np.arange(1, case.num_slots))[: case.most].astype(np.int32)
    slots[case.rows :] = 0
    begins = rng.random(case.most) < 0.4
    states[0] = np.nan
    states[slots[begins]] = np.nan
    keys = normal(2, case.most, case.keys, case.key_dim)
    q, k = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    v = normal(case.most, *heads, case.value_dim)
    given = (q, k, v, *_gates(rng, case.most, *heads))
    return {
        "states": jnp.asarray(states),
        "rows": Rows(jnp.asarray(slots), jnp.asarray(begins), Tokens(*map(jnp.asarray, given))),
        "number": jnp.int32(case.rows),
    }


def _gates(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    log_decay, beta = np.log(rng.random((2, *shape)).astype(np.float32))
    return log_decay, np.exp(beta)


@dataclass(frozen=True, kw_only=True)
class WindowCase:
    """`rows`: (slot, first token, end, whether a sequence begins), in order; those of one token are not for windows.
    `drafts`: how many of a row's last tokens, all in one window, are drafts.
    """

    name: str
    rows: tuple[tuple[int, int, int, bool], ...]
    drafts: tuple[int, ...] = ()
    num_windows: int = 2
    size: int = 64
    keys: int = 2
    values: int = 2
    key_dim: int = 128
    value_dim: int = 128


WINDOW_CASES = (
    WindowCase(name="no-row", rows=()),
    WindowCase(name="one-row-in-all-windows", rows=((3, 0, 128, True),)),
    WindowCase(
        name="rows-that-share-windows",
        rows=((2, 0, 50, True), (1, 50, 52, False), (4, 60, 127, True)),
    ),
    WindowCase(name="a-window-between", rows=((1, 0, 9, False), (5, 70, 128, True)), keys=1),
    WindowCase(name="more-keys-than-a-step-has", rows=((1, 5, 100, False),), keys=6, values=3),
    WindowCase(name="one-value-a-key", rows=((1, 5, 100, False),), keys=8, values=1),
    WindowCase(name="wide-values", rows=((2, 30, 90, True),), value_dim=256, values=1),
    WindowCase(
        name="drafts",
        rows=((2, 0, 8, False), (1, 8, 11, True), (4, 16, 17, False), (5, 64, 73, False)),
        drafts=(3, 2, 0, 4),
    ),
    WindowCase(
        name="small-windows", rows=((2, 3, 30, True), (3, 30, 47, False)), size=16, num_windows=3
    ),
)

OWN_WINDOWS = WindowCase(
    name="a-window-each",
    rows=((2, 0, 4, False), (1, 16, 19, True), (4, 32, 48, False), (5, 48, 49, True)),
    drafts=(3, 2, 15, 0),
    num_windows=6,
    size=16,
)


def window_arguments(case: WindowCase) -> dict[str, Any]:
    """The arguments of `by_windows`. NaN in the null slot, and where a sequence begins."""
    rng = np.random.default_rng(len(case.name))
    shape, heads = (case.num_windows, case.size), (case.keys, case.values)
    states = rng.standard_normal((7, *heads, case.key_dim, case.value_dim)).astype(np.float32)
    counts, found = np.zeros(case.num_windows * case.size, bool), []
    states[0] = np.nan
    drafts = case.drafts or (0,) * len(case.rows)
    for (slot, first, end, begins), num_drafts in zip(case.rows, drafts, strict=True):
        if begins:
            states[slot] = np.nan
        counts[first:end] = True
        for window in range(first // case.size, (end - 1) // case.size + 1):
            start = window * case.size
            own = max(first - start, 0), min(end - start, case.size)
            kept_end = min(end - num_drafts - start, case.size)
            found.append((window, *own, kept_end, slot, own[0] + start == first, begins))
    number = len(found)
    found += [(0, 0, 0, 0, 0, False, False)] * 2
    keys = rng.standard_normal((2, *shape, case.keys, case.key_dim)).astype(np.float32)
    q, k = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    v = rng.standard_normal((*shape, *heads, case.value_dim)).astype(np.float32)
    given = [q, k, v, *_gates(rng, *shape, *heads)]
    for x in given:
        x.reshape(-1, *x.shape[2:])[~counts] = 0
    *numbers, is_first, begins = (np.array(x) for x in zip(*found, strict=True))
    parts = Parts(
        *(jnp.asarray(x, jnp.int32) for x in numbers),
        is_first=jnp.asarray(is_first, jnp.bool_),
        begins=jnp.asarray(begins, jnp.bool_),
    )
    return {
        "states": jnp.asarray(states),
        "windows": Tokens(*map(jnp.asarray, given)),
        "parts": parts,
        "number": jnp.int32(number),
    }
