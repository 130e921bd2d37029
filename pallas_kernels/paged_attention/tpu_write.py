"""What the TPU kernel writes: the rows' new keys and values go into the pool. Letters as in `tpu.py`.

A row's new tokens fill a run of slots. A DMA moves whole tiles of lanes, so chunks of slots are fetched, merged and put
back, several at a time. Knows nothing of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic_tpu import repeat, wide
from pallas_kernels.paged_attention.tpu_lanes import alternating
from pallas_kernels.paged_attention.tpu_shape import CHUNK_BUFFERS, Shape, write_window
from pallas_kernels.paged_attention.tpu_work import Rows

AHEAD = CHUNK_BUFFERS // 2


class Buffers(NamedTuple):
    """VMEM and semaphores, of CHUNK_BUFFERS chunks each."""

    new: Sequence  # of each of `Write.new_refs`, a window of new slots
    old: Any
    new_sems: Any
    old_sems: Any


def chunk_buffers(
    shape: Shape, new: Sequence[jax.Array], pool: jax.Array, axis: int, size: int
) -> Buffers:
    """For chunks of `size` slots of an array of the pool."""

    def buffer(slots: int, size: int):
        of_chunk = (slots, size) if axis == 0 else (size, slots)
        return pltpu.VMEM((CHUNK_BUFFERS, *of_chunk), pool.dtype)

    of_slot = pool.shape[1] if axis else shape.width

    sems = pltpu.SemaphoreType.DMA((CHUNK_BUFFERS,))
    window = write_window(shape, size)
    return Buffers(
        [buffer(window, x.shape[axis - 1]) for x in new], buffer(size, of_slot), sems, sems
    )


@dataclass(frozen=True, kw_only=True)
class Write:
    """Writes data (slots on axis 0), or scales and zeros (slots on axis 1, a block at a time).

    A row owns the blocks that it writes, so no chunk is another's.
    """

    rows: Rows
    chunk_rows: jax.Array  # int32[..], of each chunk its row
    chunk_positions: jax.Array  # int32[..], and its first position
    total: jax.Array  # int32, chunks
    new_refs: Sequence  # see `tpu_layout.new_rows`
    pool_ref: Any
    buffers: Buffers
    axis: int

    @property
    def size(self) -> int:
        return self.buffers.old.shape[1 + self.axis]

    @property
    def window(self) -> int:
        return self.buffers.new[0].shape[1 + self.axis]

    def run(self) -> None:
        self.begin()
        repeat(0, self.total + AHEAD, self.turn)

    def begin(self) -> None:
        repeat(0, jnp.minimum(AHEAD, self.total), self.start)

    def turn(self, index) -> None:
        """Merges chunk `index`, starts the fetch of chunk `index` + AHEAD, and waits until chunk `index` - AHEAD is in
        the pool. So there are AHEAD turns more than chunks.
        """

        @pl.when((index >= AHEAD) & (index < self.total + AHEAD))
        def _():
            self.put(index - AHEAD).wait()

        @pl.when(index < self.total)
        def _():
            pl.when(index + AHEAD < self.total)(lambda: self.start(index + AHEAD))
            for copy in self.fetches(index):
                copy.wait()
            self.merge(index)
            self.put(index).start()

    def start(self, index) -> None:
        for copy in self.fetches(index):
            copy.start()

    def fetches(self, index) -> list:
        """The copies of new slots, and of the old ones."""
        buffers, stage = self.buffers, _stage(index)
        begin = pl.multiple_of(self._first_fetched(index), self.size)
        window = (slice(None),) * self.axis + (pl.ds(begin, self.window),)
        copies = [
            pltpu.make_async_copy(ref.at[window], buffer.at[stage], buffers.new_sems.at[stage])
            for ref, buffer in zip(self.new_refs, buffers.new, strict=True)
        ]
        old, sem = buffers.old.at[stage], buffers.old_sems.at[stage]
        return [*copies, pltpu.make_async_copy(self._place(index), old, sem)]

    def put(self, index):
        stage = _stage(index)
        old, sem = self.buffers.old.at[stage], self.buffers.old_sems.at[stage]
        return pltpu.make_async_copy(old, self._place(index), sem)

    def merge(self, index) -> None:
        stage, size, old_buffers = _stage(index), self.size, self.buffers.old
        first, end, before = self.rows.queries(self.chunk_rows[index])
        parts = [buffer[stage] for buffer in self.buffers.new]
        new = wide(parts[0]) if len(parts) == 1 else alternating(parts, self.rows.shape.head_dim)
        old = wide(old_buffers[stage])
        ahead = self._first_fetched(index) - (self.chunk_positions[index] - before)
        new = pltpu.roll(new, ahead & (self.window - 1), self.axis)
        new = new[:, :size] if self.axis else new[:size]
        token = lax.broadcasted_iota(jnp.int32, new.shape, self.axis)
        position = self.chunk_positions[index] + token
        is_new = (position >= first + before) & (position < end + before)
        old_buffers[stage] = jnp.where(is_new, new, old).astype(old_buffers.dtype)

    def _place(self, index):
        block_size, position = self.rows.shape.block_size, self.chunk_positions[index]
        number = position >> (block_size.bit_length() - 1)
        number = self.rows.block(self.chunk_rows[index], number)
        if self.axis:
            return self.pool_ref.at[number]
        block = self.pool_ref.at[(number, *self.rows.shape.own_lanes)]
        first = pl.multiple_of(position & (block_size - 1), self.size)
        return block.at[pl.ds(first, self.size)]

    def _first_fetched(self, index):
        """The first of the new tokens that are fetched."""
        first, _, before = self.rows.queries(self.chunk_rows[index])
        if self.window == self.size:
            return first & -self.size
        last = self.new_refs[0].shape[self.axis] - self.window
        return jnp.clip((self.chunk_positions[index] - before) & -self.size, 0, last)


def _stage(index):
    """The chunk's buffer."""
    return index & (CHUNK_BUFFERS - 1)


def write_beside(writes: list[Write], is_read_by_others: jax.Array) -> Callable:
    """Begins writes of one chunk for each unit of `Attend`, and returns what goes on with them when a unit begins.

    A unit's chunk is in the pool before its keys are fetched. is_read_by_others: bool; if so, all chunks are in the
    pool when this returns.
    """
    # Keys may be fetched of as many later units as there are other buffers.
    lead = AHEAD + writes[0].rows.shape.kv_buffers - 1

    def turn(index) -> None:
        for write in writes:
            write.turn(index)

    for write in writes:
        write.begin()
    repeat(0, jnp.where(is_read_by_others, writes[0].total + AHEAD, lead), turn)
    return lambda unit: pl.when(~is_read_by_others)(lambda: turn(unit + lead))
