"""Named heads and angles, for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """`heads`: of queries, of keys and of values. `half`: pairs of a head that are turned."""

    name: str
    num_tokens: int = 40
    heads: tuple[int, int, int] = (4, 2, 2)
    head_dim: int = 128
    half: int = 64
    interleaved: bool = False
    dtype: str = "bfloat16"


CASES = (
    Case(name="one-token", num_tokens=1),
    Case(name="several-blocks", num_tokens=600, heads=(2, 1, 1)),
    Case(name="half-a-head", half=32),
    Case(name="neighbours", interleaved=True),
    Case(name="neighbours-of-half-a-head", interleaved=True, half=32),
    Case(name="two-heads-a-register", head_dim=64, half=32),
    Case(name="four-heads-in-three-registers", head_dim=96, half=48, heads=(8, 4, 4)),
    Case(name="a-head-in-two-registers", head_dim=256, half=128),
    Case(name="float32", dtype="float32"),
)


def arguments(case: Case) -> dict[str, Any]:
    """The arguments of `split_and_rotate`."""
    rng = np.random.default_rng(case.num_tokens)
    width = sum(case.heads) * case.head_dim
    joined = jnp.asarray(rng.standard_normal((case.num_tokens, width)), case.dtype)
    angles = rng.uniform(0, 1000, (case.num_tokens, 1, case.half))
    return {
        "joined": joined,
        "cos": jnp.asarray(np.cos(angles), case.dtype),
        "sin": jnp.asarray(np.sin(angles), case.dtype),
    }
