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


class Groups(NamedTuple):
    """The rows that belong to each group, and its tiles: int32[groups] each."""

    first: jax.Array
    end: jax.Array  # the row after its last one
    begin: jax.Array  # where its tiles begin, a multiple of ALIGNED
    num_tiles: jax.Array


def groups_of(group_sizes: jax.Array, tile: int) -> Groups:
    end = jnp.cumsum(group_sizes, dtype=jnp.int32)
    first = end - group_sizes
    begin = first // ALIGNED * ALIGNED
    num_tiles = jnp.where(group_sizes > 0, -(-(end - begin) // tile), 0)
    return Groups(first, end, begin, num_tiles)


def tiles_of(group_sizes: jax.Array, num_rows: int, tile: int) -> Tiles:
    groups, num_groups = groups_of(group_sizes, tile), group_sizes.shape[0]
    most_groups = min(num_groups, num_rows)
    most = (num_rows + most_groups * (ALIGNED - 1)) // tile + most_groups
    group, number, _ = expand(groups.num_tiles, most)
    begin = groups.begin[group] + number * tile
    first = jnp.maximum(groups.first[group], begin)
    end = jnp.minimum(groups.end[group], begin + tile)
    return Tiles(group, begin, first, end)
