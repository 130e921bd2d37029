"""Named argument sets for products of few tokens: edge cases."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """x [num_tokens, num_in] times a weight [num_out, num_in], in bfloat16."""

    name: str
    num_tokens: int = 8
    num_in: int = 512
    num_out: int = 256
    bias: bool = False


SMALL = (
    Case(name="in-one-part", num_in=448),
    Case(name="one-token", num_tokens=1),
    Case(name="bias-in-the-kernel", num_tokens=3, num_in=192, num_out=384, bias=True),
    Case(name="bias-after-the-parts", num_tokens=5, bias=True),
    Case(name="odd-tokens", num_tokens=67, num_in=640, num_out=384),
    Case(name="two-tiles", num_tokens=131, num_in=192, num_out=128),
    # 17 chunks in 4 parts.
    Case(name="parts-of-unequal-lengths", num_in=1088, num_out=128),
)


def arguments(case: Case, *, seed: int = 0) -> dict[str, jax.Array | None]:
    """x, weight and bias; rows have very different magnitudes."""
    rng = np.random.default_rng(seed)

    def rows(*shape: int) -> jax.Array:
        values = rng.standard_normal(shape) * np.exp(rng.standard_normal((shape[0], 1)))
        return jnp.asarray(values, jnp.bfloat16)

    bias = jnp.asarray(rng.standard_normal(case.num_out), jnp.bfloat16) if case.bias else None
    x, weight = rows(case.num_tokens, case.num_in), rows(case.num_out, case.num_in)
    return dict(x=x, weight=weight, bias=bias)
