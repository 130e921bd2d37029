"""Lists that XLA computes: what a kernel has to do where rows have different numbers of parts; places of a scatter."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


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


def distinct(
    indices: Int[Array, " n"], is_left_out: Bool[Array, " n"], size: int
) -> Int[Array, " n"]:
    """Indices of an axis of `size` for a scatter that drops what is outside: different ones there for what is left out.

    So all are distinct, and with `unique_indices=True` XLA's code for GPUs just stores the values. Otherwise it writes
    values of one or two bytes atomically: it exchanges the 4 bytes around each, until no other value came between.
    """
    outside = size + jnp.arange(indices.shape[0], dtype=indices.dtype)
    return jnp.where(is_left_out, outside, indices)
