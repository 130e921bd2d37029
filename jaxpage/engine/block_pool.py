"""Reference counts of KV blocks, and the prefix cache that finds blocks by their content.

Knows block ids, reference counts, hashes and the order of eviction. Must not know sequences, tokens in flight or the
device. It hands out numbers; others decide what they mean.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jaxpage.kv_groups import Windows
from jaxpage.plan import NULL_BLOCK


class BlockPool:
    """Reference counts, free queue and prefix cache of `num_blocks` blocks of `block_size` tokens.

    A block is either in use (reference count above 0) or in the free queue; the null block is neither. A registered
    block keeps its hash in the free queue and can be reused by its content until it is allocated again. Allocation
    takes the head of the queue: first blocks without a hash, then the least recently freed.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        windows: Windows = (None,),
    ):
        """`windows` of the KV-cache groups that share this pool.

        Raises ValueError if `num_blocks` is below 2 (one is the null block) or `block_size` below 1.
        """
        if num_blocks < 2 or block_size < 1:
            raise ValueError(
                f"{num_blocks=} {block_size=}: a pool needs a block besides the null block, and "
                f"a token in each"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.windows = windows
        self.refs = [0] * num_blocks  # read by the scheduler's inner loop; changed only here
        self.num_references = 0  # sum over all blocks
        self._free = OrderedDict.fromkeys(range(1, num_blocks))
        # Of a registered block: its hash, the hash of the block before it (None for a first block), and its hits.
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.parents: list[bytes | None] = [None] * num_blocks
        self.hits = [0] * num_blocks
        # (block, hash, parent) of evicted blocks. None: not recorded; otherwise the reader empties it.
        self.evicted: list[tuple[int, bytes, bytes | None]] | None = None
        # The oldest block of each content, and later duplicates in order. Duplicates stay: block tables are never
        # rewritten to merge them. One dict per content would cost six times as much in garbage collection.
        self._by_hash: dict[bytes, int] = {}
        self._duplicates: dict[bytes, dict[int, None]] = {}
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks held by sequences."""
        return self.num_usable - len(self._free)

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """Share of the usable blocks held by sequences, 0 to 1."""
        return self.num_used / self.num_usable

    def eviction_order(self) -> list[int]:
        """The free blocks in the order in which they will be allocated."""
        return list(self._free)

    def registered(self) -> list[tuple[int, bytes]]:
        """(block id, hash) of all blocks that can be found."""
        return [(i, block_hash) for i, block_hash in enumerate(self.hashes) if block_hash]

    def is_shared(self, block_id: int) -> bool:
        return self.refs[block_id] > 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks of undefined content with one reference each, evicted from the prefix cache if need be.

        Raises ValueError, before anything changes, if fewer are free.
        """
        free = self._free
        if count > len(free):
            raise ValueError(f"{count} blocks wanted, {len(free)} of {self.num_usable} are free")
        ids = []
        for _ in range(count):
            block_id, _ = free.popitem(last=False)
            block_hash = self.hashes[block_id]
            if block_hash is not None:
                self.unregister(block_id)
                self.num_evictions += 1
                if self.evicted is not None:
                    self.evicted.append((block_id, block_hash, self.parents[block_id]))
            self.refs[block_id] = 1
            ids.append(block_id)
        self.num_references += count
        return ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block that `lookup` found; free blocks leave the queue."""
        for block_id in block_ids:
            if self.refs[block_id] == 0:
                del self._free[block_id]
            self.refs[block_id] += 1
            self.num_references += 1
            self.hits[block_id] += 1

    def fork(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block of a sequence's table."""
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            assert self.refs[block_id] > 0, f"block {block_id} is not in use"
            self.refs[block_id] += 1
            self.num_references += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block of a sequence's table.

        The last block is freed first, so it is evicted first, and prefixes that others may share survive longest.
        """
        for block_id in reversed(block_ids):
            if block_id == NULL_BLOCK:
                continue
            self.refs[block_id] -= 1
            self.num_references -= 1
            assert self.refs[block_id] >= 0, f"block {block_id} was freed twice"
            if self.refs[block_id] == 0:
                self._free[block_id] = None
                if self.hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def register(self, block_id: int, block_hash: bytes, parent: bytes | None = None) -> None:
        """Add a full block in use to the prefix cache. No effect if prefix caching is off."""
        assert self.refs[block_id] > 0 and self.hashes[block_id] is None, f"{block_id=}"
        if self.enable_prefix_caching:
            self.hashes[block_id] = block_hash
            self.parents[block_id] = parent
            self.hits[block_id] = 0
            if self._by_hash.setdefault(block_hash, block_id) != block_id:
                self._duplicates.setdefault(block_hash, {})[block_id] = None

    def unregister(self, block_id: int) -> None:
        """Remove a block from the prefix cache; its references stay."""
        block_hash = self.hashes[block_id]
        assert block_hash is not None, f"block {block_id} has no hash"
        self.hashes[block_id] = None
        later = self._duplicates.get(block_hash, {})
        if self._by_hash[block_hash] != block_id:
            del later[block_id]
        elif later:
            self._by_hash[block_hash] = next(iter(later))
            del later[self._by_hash[block_hash]]
        else:
            del self._by_hash[block_hash]
        if not later:
            self._duplicates.pop(block_hash, None)

    def lookup(self, block_hash: bytes) -> int | None:
        """A cached block with that content. Changes nothing: call `touch` if you use it."""
        return self._by_hash.get(block_hash)

    def forget_all(self) -> None:
        """Empty the prefix cache, because block contents can no longer be trusted. References stay."""
        self.hashes = [None] * self.num_blocks
        self._by_hash.clear()
        self._duplicates.clear()

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns False and does nothing while a block is in use (as in vLLM)."""
        if len(self._free) != self.num_usable:
            return False
        self.forget_all()
        return True
