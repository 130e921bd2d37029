"""Copies of whole blocks in plain XLA; `reference.py` defines each function.

Copies and scatters update a donated pool in place (the compiled step's alias bytes equal the pool's bytes; tested for
every bucket).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from pallas_kernels.lists import distinct


def copy_blocks(
    layers: Sequence[Any], sources: Int[Array, " C"], destinations: Int[Array, " C"]
) -> list[Any]:

    def copy(layer, sources):
        return jax.tree.map(lambda x: put_blocks(x, destinations, x[sources]), layer)

    copied = []
    for layer in layers:
        # Layer by layer: XLA's compiler for GPUs would read the blocks of all layers at once, 235 MB of temporaries for
        # 64 copies in 28 layers of 128 KB per block; here it is 8 MB.
        layer, sources = lax.optimization_barrier((copy(layer, sources), sources))
        copied.append(layer)
    return copied


def gather_blocks(layers: Sequence[Any], block_ids: Int[Array, " C"]) -> Any:
    return jax.tree.map(lambda *arrays: jnp.stack([x[block_ids] for x in arrays], axis=1), *layers)


def scatter_blocks(layers: Sequence[Any], block_ids: Int[Array, " C"], contents: Any) -> list[Any]:
    return [
        jax.tree.map(
            lambda array, content, index=index: put_blocks(array, block_ids, content[:, index]),
            layer,
            contents,
        )
        for index, layer in enumerate(layers)
    ]


# A separate jit, so that it is traced once; XLA inlines it.
@jax.jit
def put_blocks(
    array: Shaped[Array, "N ..."], block_ids: Int[Array, " C"], contents: Shaped[Array, "C ..."]
) -> Shaped[Array, "N ..."]:
    """An array of the pool with these contents in its blocks, of which only the null block may be named twice.

    At once, but on TPUs one by one: for a scatter of bytes XLA would change the tiling of the whole pool, and copy it
    there and back (1.05 GB for a pool of that size on a v6e; 0.2 MB here).
    """

    def one_by_one(array, block_ids, contents):
        def put(i, array):
            return lax.dynamic_update_index_in_dim(array, contents[i], block_ids[i], 0)

        return lax.fori_loop(0, block_ids.shape[0], put, array)

    def at_once(array, block_ids, contents):
        ids = distinct(block_ids, block_ids == 0, array.shape[0])
        return array.at[ids].set(contents, mode="drop", unique_indices=True)

    return lax.platform_dependent(array, block_ids, contents, tpu=one_by_one, default=at_once)
