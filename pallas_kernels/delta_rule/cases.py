"""Named rows and states, for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.delta_rule.reference import Rows


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
    decay, beta = rng.random((2, case.most, *heads)).astype(np.float32)
    v = normal(case.most, *heads, case.value_dim)
    given = (slots, begins, q, k, v, decay, beta)
    return {
        "states": jnp.asarray(states),
        "rows": Rows(*map(jnp.asarray, given)),
        "number": jnp.int32(case.rows),
    }
