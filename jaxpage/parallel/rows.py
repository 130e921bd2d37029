"""Divides the rows of a batch among the devices of a mesh. Knows no sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxpage.parallel.sharding import TENSOR

_WHOLE, _BY_ROW, _BY_COLUMN = PartitionSpec(), PartitionSpec(TENSOR), PartitionSpec(None, TENSOR)


def pad_rows(array: jax.Array, mesh: Mesh) -> jax.Array:
    """[R, ...] padded with zeros to a multiple of the number of devices."""
    missing = -array.shape[0] % mesh.size
    return jnp.pad(array, ((0, missing), *[(0, 0)] * (array.ndim - 1)))


def deal_rows(
    function: Callable[..., Any], mesh: Mesh, *, shares_columns: bool
) -> Callable[..., Any]:
    """`function(logits, state, slots, positions, features)`, on each device for its share of the rows.

    All devices get all results. R is a multiple of their number: logits [R, V], slots and positions [R].
    `shares_columns`: each device has V/n columns of all logits, and sends the others their rows, R V / n numbers;
    otherwise it has all columns of its own rows.
    """

    def of_own_rows(logits, state, slots, positions, features):
        if shares_columns:  # [R, V/n] -> [R/n, V]
            parts = logits.reshape(mesh.size, -1, logits.shape[1])
            parts = lax.all_to_all(parts, TENSOR, split_axis=0, concat_axis=0, tiled=True)
            logits = jnp.concatenate([*parts], axis=1)
        num_own = logits.shape[0]
        first = lax.axis_index(TENSOR) * num_own
        # These are replicated: if they were sharded, XLA would shard what they are computed from, and exchange that.
        slots, positions = (lax.dynamic_slice_in_dim(x, first, num_own) for x in (slots, positions))
        own = function(logits, state, slots, positions, features)
        return jax.tree.map(lambda x: lax.all_gather(x, TENSOR, tiled=True), own)

    logits_spec = _BY_COLUMN if shares_columns else _BY_ROW
    return jax.shard_map(
        of_own_rows,
        mesh=mesh,
        in_specs=(logits_spec, _WHOLE, _WHOLE, _WHOLE, _WHOLE),
        out_specs=_WHOLE,
        check_vma=False,
    )
