"""Named masks and biases, the awkward ones, for tests."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """`num_named`: of each row, how many tokens it names; rows repeat them. `width`: N."""

    name: str
    num_rows: int = 8
    vocab_size: int = 8448  # two registers of words, and of the third two tiles of tokens
    num_named: tuple[int, ...] = (3, 0, 64, 65, 1)
    width: int = 128


CASES = (
    Case(name="mixed"),
    Case(name="one-row", num_rows=1),
    Case(name="two-rows", num_rows=2),
    Case(name="two-blocks-of-rows", num_rows=16),
    Case(name="nothing-named", num_named=(0,)),
    Case(name="all-named", num_rows=2, num_named=(128,)),
    Case(name="few-tokens", vocab_size=256),
    Case(name="whole-registers-of-words", vocab_size=4096, num_named=(5,)),
    Case(name="ragged-vocabulary", vocab_size=45, num_named=(7,)),
)


def arguments(case: Case) -> dict[str, jax.Array]:
    """The arguments of the function. Some tokens are named twice, some between two that are not in the vocabulary; some
    logits and values are -inf.
    """
    rng = np.random.default_rng(case.vocab_size + case.num_rows)
    rows, size = case.num_rows, case.vocab_size
    logits = rng.normal(size=(rows, size)).astype(np.float32)
    logits[:, ::13] = -np.inf
    mask = rng.integers(0, 1 << 32, size=(rows, -(-size // 32)), dtype=np.uint32)
    mask[0] = 0xFFFFFFFF
    ids = np.full((rows, case.width), size)
    for row in range(rows):
        num = case.num_named[row % len(case.num_named)]
        ids[row, :num] = rng.integers(0, size, num)
        ids[row, 1:num:5] = ids[row, 0]
        ids[row, 2:num:7] = 2**31 - 1
    # Sums of multiples of 1/8 do not depend on their order.
    values = np.round(rng.normal(size=ids.shape) * 8) / 8
    values[:, ::4] = -np.inf
    logits = np.round(logits * 8) / 8
    return {
        "logits": jnp.asarray(logits, jnp.float32),
        "mask": jnp.asarray(mask),
        "ids": jnp.asarray(ids, jnp.int32),
        "values": jnp.asarray(values, jnp.float32),
    }
