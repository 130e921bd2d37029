"""Whole blocks of the KV pool: copied, read for the host, written back. Chooses the implementation, and shards it.

How the pool is laid out says who moves its blocks, as for attention: three axes are a TPU's, which Mosaic kernels move
by DMA; else XLA does. Must not know whose blocks they are, nor why they move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpage.kv_pool import KVPool, Layer
from jaxpage.parallel.sharding import TENSOR
from pallas_kernels.block_copy import xla
from pallas_kernels.kv_write.quantized import QuantizedPool


@cache
def _tpu():
    from pallas_kernels.block_copy import tpu

    return tpu


def copy_blocks(
    pool: KVPool,
    sources: jax.Array,
    destinations: jax.Array,
    *,
    mesh: Mesh | None = None,
    by_head: bool = False,
) -> KVPool:
    """The pool with block `destinations[i]` a copy of block `sources[i]`, int32[C] each; padding is (0, 0).

    All sources are read before any destination is written. `by_head`: each device of the mesh has its own heads of
    every block, and copies those; else each has all.
    """
    if _in_lanes(pool):
        of_pool = _specs(pool, by_head)
        copy = _on_each(_tpu().copy_blocks, mesh, (of_pool, P(), P()), of_pool)
        return copy(pool, sources, destinations)
    # Most steps copy nothing, and XLA would copy the padding.
    return lax.cond(
        sources.any(), lambda pool: xla.copy_blocks(pool, sources, destinations), list, pool
    )


def gather_blocks(
    pool: KVPool, block_ids: jax.Array, *, mesh: Mesh | None = None, by_head: bool = False
) -> Any:
    """The contents of blocks int32[C]: one array [C, L, ...], or a `QuantizedPool` of them, for the L of the pool."""
    if not _in_lanes(pool):
        return xla.gather_blocks(pool, block_ids)
    of_pool = _specs(pool, by_head)
    gather = _on_each(_tpu().gather_blocks, mesh, (of_pool, P()), _of_contents(of_pool))
    return gather(pool, block_ids)


def scatter_blocks(
    pool: KVPool,
    block_ids: jax.Array,
    contents: Any,
    *,
    mesh: Mesh | None = None,
    by_head: bool = False,
) -> KVPool:
    """The pool with those contents in its blocks, the inverse of `gather_blocks`; padding is the null block, 0."""
    if not _in_lanes(pool):
        return xla.scatter_blocks(pool, block_ids, contents)
    of_pool = _specs(pool, by_head)
    specs = (of_pool, P(), _of_contents(of_pool))
    return _on_each(_tpu().scatter_blocks, mesh, specs, of_pool)(pool, block_ids, contents)


def _in_lanes(pool: KVPool) -> bool:
    return len(pool[0].shape) == 3


def _on_each(move: Callable, mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable:
    """`move` on each device by itself: XLA cannot divide a kernel, and no device needs anything of another."""
    if mesh is None or mesh.size == 1:
        return move
    return jax.shard_map(move, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _specs(pool: KVPool, by_head: bool) -> list:
    """Of a pool in lanes: heads are among the lanes of a slot, and the rows of scales and zeros."""

    lanes, rows = (P(None, None, TENSOR), P(None, TENSOR)) if by_head else (P(), P())

    def of(layer: Layer):
        if not isinstance(layer, QuantizedPool):
            return lanes
        return replace(layer, data=lanes, scale_zero=None if layer.scale_zero is None else rows)

    return [of(layer) for layer in pool]


def _of_contents(of_pool: list) -> Any:
    """[N, ...] of L layers → [C, L, ...]."""
    return jax.tree.map(lambda spec: P(None, *spec), of_pool[0])
