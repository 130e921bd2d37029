"""Whole blocks of the KV pool: copied, read for the host, written back. Chooses the implementation, and shards it.

Blocks in the TPU layout are moved by Mosaic kernels, as DMAs; all others by XLA. Must not know who owns the blocks, or
why they move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpage.kv_pool import KVPool, KVPoolSpec, Layer
from jaxpage.ops.implementations import Implementation, first_supported, require
from jaxpage.parallel.sharding import TENSOR
from pallas_kernels.block_copy import xla
from pallas_kernels.kv_write.quantized import QuantizedPool


def _accept_tpu(spec: KVPoolSpec) -> ModuleType:
    if spec.layout != "tpu":
        require(
            f'the TPU kernels move blocks in the layout "tpu", and this pool has {spec.layout!r}'
        )
    from pallas_kernels.block_copy import tpu

    return tpu


IMPLEMENTATIONS: tuple[Implementation[KVPoolSpec, ModuleType], ...] = (
    Implementation("tpu", "tpu", _accept_tpu),
    Implementation("xla", None, lambda spec: xla),
)


def _kernels(spec: KVPoolSpec) -> ModuleType:
    """The module that moves whole blocks of such a pool."""
    platform = spec.platform or jax.default_backend()
    return first_supported("moves of KV blocks", IMPLEMENTATIONS, spec, platform).chosen


def copy_blocks(
    pool: KVPool,
    sources: jax.Array,
    destinations: jax.Array,
    *,
    spec: KVPoolSpec,
    mesh: Mesh | None = None,
) -> KVPool:
    """The pool with block `destinations[i]` a copy of block `sources[i]`, int32[B] each; padding is (0, 0).

    All sources are read before any destination is written. On a mesh each device copies its own heads of every block,
    or all heads if the pool is not sharded.
    """
    kernels = _kernels(spec)
    if kernels is xla:
        # Most steps copy nothing, and XLA would copy the padding.
        return lax.cond(
            sources.any(), lambda pool: xla.copy_blocks(pool, sources, destinations), list, pool
        )
    of_pool = _specs(pool, spec)
    copy = _on_each(kernels.copy_blocks, mesh, (of_pool, P(), P()), of_pool)
    return copy(pool, sources, destinations)


def gather_blocks(
    pool: KVPool, block_ids: jax.Array, *, spec: KVPoolSpec, mesh: Mesh | None = None
) -> Layer:
    """The contents of blocks int32[B]: an array [B, L, ...] for L arrays in the pool, or a `QuantizedPool` of such."""
    kernels = _kernels(spec)
    if kernels is xla:
        return xla.gather_blocks(pool, block_ids)
    of_pool = _specs(pool, spec)
    gather = _on_each(kernels.gather_blocks, mesh, (of_pool, P()), _of_contents(of_pool))
    return gather(pool, block_ids)


def scatter_blocks(
    pool: KVPool,
    block_ids: jax.Array,
    contents: Layer,
    *,
    spec: KVPoolSpec,
    mesh: Mesh | None = None,
) -> KVPool:
    """The pool with these contents written to its blocks, the inverse of `gather_blocks`; padding is the null block."""
    kernels = _kernels(spec)
    if kernels is xla:
        return xla.scatter_blocks(pool, block_ids, contents)
    of_pool = _specs(pool, spec)
    specs = (of_pool, P(), _of_contents(of_pool))
    return _on_each(kernels.scatter_blocks, mesh, specs, of_pool)(pool, block_ids, contents)


def _on_each(move: Callable, mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable:
    """`move` on each device separately: XLA cannot partition a kernel, and devices need not communicate."""
    if mesh is None or mesh.size == 1:
        return move
    return jax.shard_map(move, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _specs(pool: KVPool, spec: KVPoolSpec) -> list:
    """Partition specs of a pool in the layout "tpu": heads are on the last axis of data, and on the rows of scales."""
    data, rows = (P(None, None, TENSOR), P(None, TENSOR)) if spec.sharded else (P(), P())

    def of(layer: Layer):
        if not isinstance(layer, QuantizedPool):
            return data
        return replace(layer, data=data, scale_zero=None if layer.scale_zero is None else rows)

    return [of(layer) for layer in pool]


def _of_contents(of_pool: list) -> Any:
    """[N, ...] of L layers → [B, L, ...]."""
    return jax.tree.map(lambda spec: P(None, *spec), of_pool[0])
