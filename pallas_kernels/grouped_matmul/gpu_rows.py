"""The tiles of rows of the grouped product's kernels for Hopper GPUs, which XLA computes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.lists import expand

ALIGNED = 8  # rows: tiles begin at multiples of it, as the swizzled tiles in shared memory do


class Tiles(NamedTuple):
    """The tiles of rows; those that are left over have no rows. Arrays, or in a kernel refs: int32[tiles] each."""

    group: Any
    begin: Any  # the first row, a multiple of ALIGNED
    first: Any  # the rows that belong to the group, from here
    end: Any  # to before here


def tiles_of(group_sizes: jax.Array, num_rows: int, tile: int) -> Tiles:
    num_groups = group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    firsts = ends - group_sizes
    begins = firsts // ALIGNED * ALIGNED
    counts = jnp.where(group_sizes > 0, -(-(ends - begins) // tile), 0)
    most_groups = min(num_groups, num_rows)
    most = (num_rows + most_groups * (ALIGNED - 1)) // tile + most_groups
    group, number, _ = expand(counts, most)
    begin = begins[group] + number * tile
    first, end = jnp.maximum(firsts[group], begin), jnp.minimum(ends[group], begin + tile)
    return Tiles(group, begin, first, end)
