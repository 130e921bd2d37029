"""The bytes of host blocks, and how they travel: between the KV pool on the device, host memory and the disk.

Knows arrays and the order of moves. Must not know whose blocks they are (the scheduler's), nor why they move.

What leaves the device is gathered by a program launched before the step that overwrites it, and arrives behind that
step: `land` waits for it when the step is collected, `get` when it is wanted earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from jaxpage.plan import NULL_BLOCK

MOVE_BLOCKS = 16  # blocks that one program moves; padding moves the null block

Other = TypeVar("Other")
Content = list[np.ndarray]  # of one block: one array for each array of the pool


class ContentStore(Protocol):
    def save(self, block_hash: bytes, content: Content) -> None: ...

    def load(self, block_hash: bytes) -> Content | None: ...


class HostMemory:
    """`num_blocks` host blocks beside host block 0, which is not used; as many arrays as the pool has."""

    def __init__(self, num_blocks: int, pool: Any, store: ContentStore | None = None):
        """`pool`: the abstract KV pool; `[N, ...]` there is `[num_blocks + 1, ...]` here."""
        # Zeros cost no memory before they are written to.
        self._arrays = [
            np.zeros((num_blocks + 1, *leaf.shape[1:]), leaf.dtype)
            for leaf in jax.tree.leaves(pool)
        ]
        self.num_blocks = num_blocks
        self._pending: dict[int, tuple[list[jax.Array], int]] = {}  # host block: row of arrays
        self.store = store

    def put(self, host_id: int, content: Content) -> None:
        self._pending.pop(host_id, None)
        for array, part in zip(self._arrays, content, strict=True):
            array[host_id] = part

    def expect(self, host_ids: Sequence[int], arrays: list[jax.Array]) -> None:
        """Row i of `arrays` [MOVE_BLOCKS, ...], perhaps not computed yet, is the content of host_ids[i]."""
        for array in arrays:
            array.copy_to_host_async()
        for row, host_id in enumerate(host_ids):
            self._pending[host_id] = (arrays, row)

    def get(self, host_id: int) -> Content:
        """Views of the content; waits for the device if it is still under way."""
        pending = self._pending.get(host_id)
        if pending is not None:
            arrays, row = pending
            self.put(host_id, [np.asarray(array)[row] for array in arrays])
        return [array[host_id] for array in self._arrays]

    def land(self) -> None:
        """Wait for all that is under way."""
        for host_id in list(self._pending):
            self.get(host_id)

    def forget_pending(self) -> None:
        """What is under way will not arrive: the step failed."""
        self._pending.clear()

    def stacked(self, host_ids: Sequence[int]) -> list[np.ndarray]:
        """The contents of up to MOVE_BLOCKS host blocks, each array [MOVE_BLOCKS, ...]."""
        contents = [self.get(host_id) for host_id in host_ids]
        stacks = []
        for index, array in enumerate(self._arrays):
            stack = np.zeros((MOVE_BLOCKS, *array.shape[1:]), array.dtype)
            for row, content in enumerate(contents):
                stack[row] = content[index]
            stacks.append(stack)
        return stacks


def read_blocks(pool: Any, block_ids: jax.Array) -> list[jax.Array]:
    """The contents [C, ...] of blocks int32[C], one array for each of the pool's."""
    return [leaf[block_ids] for leaf in jax.tree.leaves(pool)]


def write_blocks(pool: Any, block_ids: jax.Array, contents: list[jax.Array]) -> Any:
    """The pool with those contents in blocks int32[C]; the inverse of `read_blocks`."""
    leaves, treedef = jax.tree.flatten(pool)
    written = [
        leaf.at[block_ids].set(content, mode="drop")
        for leaf, content in zip(leaves, contents, strict=True)
    ]
    return jax.tree.unflatten(treedef, written)


def portions(pairs: Sequence[tuple[int, Other]]) -> Iterator[tuple[list[int], list[Other]]]:
    """The first and the second of at most MOVE_BLOCKS pairs at a time."""
    for start in range(0, len(pairs), MOVE_BLOCKS):
        some = pairs[start : start + MOVE_BLOCKS]
        yield [first for first, _ in some], [second for _, second in some]


def padded(block_ids: Sequence[int]) -> np.ndarray:
    """int32[MOVE_BLOCKS], the null block behind the given ones."""
    ids = np.full(MOVE_BLOCKS, NULL_BLOCK, np.int32)
    ids[: len(block_ids)] = block_ids
    return ids
