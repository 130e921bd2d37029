"""Lists of what a kernel has to do, where rows have different numbers of parts: computed in XLA, read in kernels."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int


def expand(
    counts: Int[Array, " n"], size: int
) -> tuple[Int[Array, " size"], Int[Array, " size"], Int[Array, " 1"]]:
    """Index i, counts[i] times; its numbers from 0; and how many entries there are, int32 each.

    counts [2, 0, 3] → [0, 0, 2, 2, 2, 2, ..], [0, 1, 0, 1, 2, 3, ..], [5]. What follows them goes on counting.
    """
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    entry = jnp.arange(size, dtype=jnp.int32)
    index = jnp.searchsorted(ends, entry, side="right", method="compare_all").astype(jnp.int32)
    index = jnp.minimum(index, counts.shape[0] - 1)
    # Not `(ends - counts)[index]`: XLA's kernel for Hopper would spill registers.
    return index, entry - ends[index] + counts[index], ends[-1:]
