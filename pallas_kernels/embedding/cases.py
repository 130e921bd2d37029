"""Named tables and ids, the awkward ones, for tests."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """`ids`: those of the first tokens; further ones are random, a quarter of them the same as the one before.

    `padding`: of the tokens, how many at the end have id 0.
    """

    name: str
    num_rows: int = 1280
    width: int = 144
    num_tokens: int = 64
    ids: tuple[int, ...] = ()
    padding: int = 0
    dtype: str = "bfloat16"


CASES = (
    Case(name="one-token", num_tokens=1),
    Case(name="three-tokens", num_tokens=3),
    Case(name="sixty-four-tokens"),
    Case(name="several-tiles-of-tokens", num_tokens=300),
    Case(name="repeated", num_tokens=12, ids=(5, 5, 5, 6, 133, 5, 5, 260, 261, 261, 132, 132)),
    Case(name="at-edges", num_tokens=8, ids=(0, 127, 128, 255, 256, 1151, 1152, 1279)),
    Case(name="outside", num_tokens=9, ids=(-1, -1, 1280, 7, 2**31 - 1, 7, -(2**31), 1279, 4096)),
    Case(name="all-outside", num_tokens=2, ids=(-3, 1280)),
    Case(name="padding", num_tokens=150, padding=100),
    Case(name="ragged-table", num_rows=1020, num_tokens=40, ids=(1019, 1020, 896, 895, 1023, 896)),
    Case(name="less-than-a-tile-of-rows", num_rows=120, num_tokens=5, ids=(0, 119, 120)),
    Case(name="several-chunks-of-registers", width=1104, num_tokens=5),
    Case(name="float32", dtype="float32", width=136, num_tokens=20),
)


def arguments(case: Case) -> dict[str, jax.Array]:
    """The arguments of the function. Rows that no token names are NaN; others have both zeros, the least number,
    and any other bits.
    """
    rng = np.random.default_rng(case.num_rows + case.num_tokens)
    ids = rng.integers(0, case.num_rows, case.num_tokens)
    for at in range(1, case.num_tokens, 4):
        ids[at] = ids[at - 1]
    ids[: len(case.ids)] = case.ids
    ids[case.num_tokens - case.padding :] = 0
    words = {2: np.uint16, 4: np.uint32}[jnp.dtype(case.dtype).itemsize]
    most = np.iinfo(words).max
    bits = rng.integers(0, most, (case.num_rows, case.width), words, endpoint=True)
    bits[:, ::8], bits[:, 1::8], bits[:, 2::8] = 0, most // 2 + 1, 1
    bits[np.setdiff1d(np.arange(case.num_rows), ids)] = most
    table = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.dtype(case.dtype))
    return {"table": table, "ids": jnp.asarray(ids, jnp.int32)}
