"""The contents of host blocks, and how they move between the KV pool on the device, host memory and disk.

Knows arrays and the order of moves. Must not know who owns the blocks (the scheduler does), or why they move.

Contents that leave the device are gathered by a program launched before the step that overwrites them. Dispatch is
asynchronous: the host waits for the contents only when they are used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from jaxpage.kv_pool import KVPool, KVPoolSpec
from jaxpage.ops.blocks import gather_blocks, scatter_blocks
from jaxpage.parallel.sharding import sharding
from jaxpage.runner.calls import BLOCKS_PER_CALL

# One block as an array [L, block_size, ...] over the L arrays of the pool; two such arrays for a quantised pool. With
# a draft model, those of its pool follow.
Content = list[jax.Array] | list[np.ndarray]


class ContentStore(Protocol):
    def save(self, block_hash: bytes, content: list[np.ndarray]) -> None: ...

    def load(self, block_hash: bytes) -> list[np.ndarray] | None: ...


class HostMemory:
    """The contents of up to `num_blocks` host blocks, numbered from 1.

    With `shardings` of its arrays on devices, contents are kept in host memory pinned for these devices, which avoids
    an extra copy. Without (on a CPU) a content stays where the program that read it put it.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        shardings: list[Sharding] | None = None,
        store: ContentStore | None = None,
    ):
        self.num_blocks = num_blocks
        self.store = store
        self._contents: dict[int, Content] = {}
        self._there = shardings
        self._here = shardings and [x.with_memory_kind("pinned_host") for x in shardings]

    def put(self, host_id: int, content: Content) -> None:
        """Keep a content from the device, which may still be in flight, or from disk."""
        if self._here is not None:
            content = jax.device_put(content, self._here)
        self._contents[host_id] = content

    def get(self, host_id: int) -> list[np.ndarray]:
        """The content, once it has arrived."""
        return [np.asarray(array) for array in self._contents[host_id]]

    def save(self, block_hash: bytes, content: list[np.ndarray]) -> None:
        """Write a content to disk, if there is a store."""
        if self.store is not None:
            self.store.save(block_hash, content)

    def contents(self, host_ids: Sequence[int]) -> list[Content]:
        """The arguments of `write_blocks`: contents on their way to the device, padded to BLOCKS_PER_CALL of them."""
        found = [self._contents[host_id] for host_id in host_ids]
        if self._there is not None:
            found = jax.device_put(found, [self._there] * len(found))
        return found + found[:1] * (BLOCKS_PER_CALL - len(found))


def read_blocks(
    spec: KVPoolSpec, mesh: Mesh | None, pool: KVPool, block_ids: jax.Array
) -> list[list[jax.Array]]:
    """The contents of blocks int32[B], one after another."""
    contents = gather_blocks(pool, block_ids, spec=spec, mesh=mesh)
    stacks = jax.tree.leaves(contents)  # each [B, L, ...]
    return [[stack[i] for stack in stacks] for i in range(block_ids.shape[0])]


def write_blocks(
    spec: KVPoolSpec,
    mesh: Mesh | None,
    pool: KVPool,
    block_ids: jax.Array,
    contents: list[list[jax.Array]],
) -> KVPool:
    """The pool with these contents in blocks int32[B]; the inverse of `read_blocks`."""
    stacks = [jnp.stack(parts) for parts in zip(*contents, strict=True)]  # [B, L, ...]
    structure = jax.tree.structure(pool[0])
    contents_of_pool = jax.tree.unflatten(structure, stacks)
    return scatter_blocks(pool, block_ids, contents_of_pool, spec=spec, mesh=mesh)


def read_pools(
    specs: Sequence[KVPoolSpec], mesh: Mesh | None, arrays: KVPool, block_ids: jax.Array
) -> list[list[jax.Array]]:
    """`read_blocks` of several pools, whose arrays follow each other: the contents of a block do, too."""
    found = [read_blocks(spec, mesh, pool, block_ids) for spec, pool in _pools(specs, arrays)]
    return [list(itertools.chain(*parts)) for parts in zip(*found, strict=True)]


def write_pools(
    specs: Sequence[KVPoolSpec],
    mesh: Mesh | None,
    arrays: KVPool,
    block_ids: jax.Array,
    contents: list[list[jax.Array]],
) -> KVPool:
    """The inverse of `read_pools`."""
    written, end = [], 0
    for spec, pool in _pools(specs, arrays):
        start, end = end, end + len(jax.tree.leaves(pool[0]))
        own = [content[start:end] for content in contents]
        written += write_blocks(spec, mesh, pool, block_ids, own)
    return written


def _pools(specs: Sequence[KVPoolSpec], arrays: KVPool) -> Iterator[tuple[KVPoolSpec, KVPool]]:
    rest = iter(arrays)
    return ((spec, list(itertools.islice(rest, spec.num_arrays))) for spec in specs)


def content_shapes(spec: KVPoolSpec) -> list[jax.ShapeDtypeStruct]:
    """Shapes of the content of one block."""
    ids = jax.ShapeDtypeStruct((1,), np.int32)
    return jax.eval_shape(partial(read_blocks, spec, None), spec.abstract(), ids)[0]


def content_shardings(spec: KVPoolSpec, mesh: Mesh | None) -> list[Sharding]:
    """Shardings of the content of one block: over heads, if the pool is."""
    axes = [spec.axes_of(leaf) for leaf in jax.tree.leaves(spec.abstract()[0])]
    return [sharding(mesh, each) for each in axes]
