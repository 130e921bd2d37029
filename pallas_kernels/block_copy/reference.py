"""The definition of copies of whole blocks: plain jnp, simple, slow. All implementations are compared with it.

Letters: L layers, C copies, N blocks. A layer is an array [N, ...] or a tree of such arrays (`QuantizedPool`); all
layers have the same structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def copy_blocks(
    layers: Sequence[Any], sources: Int[Array, " C"], destinations: Int[Array, " C"]
) -> list[Any]:
    """The layers with block `destinations[i]` a copy of block `sources[i]`.

    All sources are read before any destination is written. Destinations are distinct, except padding: 0, the null
    block, whose contents are undefined afterwards.
    """

    def copy(old: jax.Array) -> jax.Array:
        new = old
        for source, destination in zip(sources, destinations, strict=True):
            new = new.at[destination].set(old[source])
        return new

    return jax.tree.map(copy, list(layers))


def gather_blocks(layers: Sequence[Any], block_ids: Int[Array, " C"]) -> Any:
    """The contents of blocks: a tree like a layer, with arrays [C, L, ...]."""
    return jax.tree.map(
        lambda *arrays: jnp.stack([jnp.stack([x[block] for x in arrays]) for block in block_ids]),
        *layers,
    )


def scatter_blocks(layers: Sequence[Any], block_ids: Int[Array, " C"], contents: Any) -> list[Any]:
    """The layers with these contents in their blocks, the inverse of `gather_blocks`.

    Blocks are distinct, except padding: 0, the null block, whose contents are undefined afterwards.
    """

    def put(index: int, array: jax.Array, content: jax.Array) -> jax.Array:
        for i, block in enumerate(block_ids):
            array = array.at[block].set(content[i, index])
        return array

    return [
        jax.tree.map(
            lambda array, content, index=index: put(index, array, content), layer, contents
        )
        for index, layer in enumerate(layers)
    ]
