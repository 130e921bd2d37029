"""What the TPU kernel writes: the rows' new keys and values go into the pool. Letters as in `tpu.py`.

A row's new tokens fill a run of slots. A DMA moves whole tiles of lanes, so chunks of slots are fetched, merged and put
back, several at a time. Knows nothing of attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu_shape import CHUNK_BUFFERS, Shape, write_window
from pallas_kernels.paged_attention.tpu_work import Rows

AHEAD = CHUNK_BUFFERS // 2


def chunk_buffers(shape: Shape, array: jax.Array, axis: int, size: int) -> list:
    """For new slots, for `size` old ones, and semaphores."""

    def buffer(slots: int):
        of_chunk = (slots, array.shape[2]) if axis == 0 else (array.shape[1], slots)
        return pltpu.VMEM((CHUNK_BUFFERS, *of_chunk), array.dtype)

    sems = pltpu.SemaphoreType.DMA((CHUNK_BUFFERS,))
    return [buffer(write_window(shape, size)), buffer(size), sems, sems]


@dataclass(frozen=True, kw_only=True)
class Write:
    """Of data (slots on axis 0) or of scales and zeros (slots on axis 1, a block at a time).

    A row owns the blocks that it writes, so no chunk is another's.
    """

    rows: Rows
    chunk_rows: jax.Array  # int32[..], of each chunk its row
    chunk_positions: jax.Array  # int32[..], and its first position
    total: jax.Array  # int32, chunks
    new_ref: Any  # see `tpu_layout.new_rows`
    pool_ref: Any
    buffers: list  # see `chunk_buffers`
    axis: int

    @property
    def size(self) -> int:
        return self.buffers[1].shape[1 + self.axis]

    @property
    def window(self) -> int:
        return self.buffers[0].shape[1 + self.axis]

    def run(self) -> None:
        self.begin()
        repeat(0, self.total + AHEAD, self.turn)

    def begin(self) -> None:
        repeat(0, jnp.minimum(AHEAD, self.total), self.start)

    def turn(self, index) -> None:
        """Merges chunk `index` while later ones come and earlier ones go. Turns go on until all are in the pool:
        chunk `index` - AHEAD is when this one ends.
        """

        @pl.when((index >= AHEAD) & (index < self.total + AHEAD))
        def _():
            self.put(index - AHEAD).wait()

        @pl.when(index < self.total)
        def _():
            pl.when(index + AHEAD < self.total)(lambda: self.start(index + AHEAD))
            self.fetch_new(index).wait()
            self.fetch_old(index).wait()
            self.merge(index)
            self.put(index).start()

    def start(self, index) -> None:
        self.fetch_new(index).start()
        self.fetch_old(index).start()

    def fetch_new(self, index):
        new_buffers, _, sems, _ = self.buffers
        slot = _slot(index)
        begin = pl.multiple_of(self._first_fetched(index), self.size)
        source = self.new_ref.at[(slice(None),) * self.axis + (pl.ds(begin, self.window),)]
        return pltpu.make_async_copy(source, new_buffers.at[slot], sems.at[slot])

    def fetch_old(self, index):
        _, old_buffers, _, sems = self.buffers
        slot = _slot(index)
        return pltpu.make_async_copy(self._place(index), old_buffers.at[slot], sems.at[slot])

    def put(self, index):
        _, old_buffers, _, sems = self.buffers
        slot = _slot(index)
        return pltpu.make_async_copy(old_buffers.at[slot], self._place(index), sems.at[slot])

    def merge(self, index) -> None:
        new_buffers, old_buffers, _, _ = self.buffers
        slot, size = _slot(index), self.size
        first, end, before = self.rows.queries(self.chunk_rows[index])
        new, old = wide(new_buffers[slot]), wide(old_buffers[slot])
        ahead = self._first_fetched(index) - (self.chunk_positions[index] - before)
        new = pltpu.roll(new, ahead & (self.window - 1), self.axis)
        new = new[:, :size] if self.axis else new[:size]
        token = lax.broadcasted_iota(jnp.int32, new.shape, self.axis)
        position = self.chunk_positions[index] + token
        is_new = (position >= first + before) & (position < end + before)
        old_buffers[slot] = jnp.where(is_new, new, old).astype(old_buffers.dtype)

    def _place(self, index):
        block_size, position = self.rows.shape.block_size, self.chunk_positions[index]
        number = position >> (block_size.bit_length() - 1)
        block = self.pool_ref.at[self.rows.block(self.chunk_rows[index], number)]
        if self.axis:
            return block
        first = pl.multiple_of(position & (block_size - 1), self.size)
        return block.at[pl.ds(first, self.size)]

    def _first_fetched(self, index):
        """The first of the new tokens that are fetched."""
        first, _, before = self.rows.queries(self.chunk_rows[index])
        if self.window == self.size:
            return first & -self.size
        last = self.new_ref.shape[self.axis] - self.window
        return jnp.clip((self.chunk_positions[index] - before) & -self.size, 0, last)


def _slot(index):
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


def wide(x: jax.Array) -> jax.Array:
    """In 4 bytes, which registers rotate."""
    return x.astype(jnp.int32 if x.dtype == jnp.uint8 else jnp.float32)


def repeat(first, end, act: Callable) -> None:
    """Calls act(i) for i in [first, end)."""
    lax.fori_loop(first, end, lambda index, _: act(index), None)
