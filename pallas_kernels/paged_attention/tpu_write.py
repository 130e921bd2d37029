"""The first phase of the TPU kernel: the rows' new keys and values go into the pool. Letters as in `tpu.py`.

A row's new tokens fill a run of slots. A DMA moves whole registers, so chunks of as many slots are fetched, merged and
put back, several at a time. Knows nothing of attention.
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

from pallas_kernels.paged_attention.tpu_shape import CHUNK_BUFFERS
from pallas_kernels.paged_attention.tpu_work import Rows


def chunk_buffers(array: jax.Array, axis: int, size: int) -> list:
    """For new slots: `size` of them that lie across the borders of registers; for old ones; and semaphores."""
    new, old = [2 * size, array.shape[2]], [size, array.shape[2]]
    if axis == 1:
        new, old = [array.shape[1], 2 * size], [array.shape[1], size]
    sems = pltpu.SemaphoreType.DMA((CHUNK_BUFFERS,))
    return [
        pltpu.VMEM((CHUNK_BUFFERS, *new), array.dtype),
        pltpu.VMEM((CHUNK_BUFFERS, *old), array.dtype),
        sems,
        sems,
    ]


@dataclass(frozen=True, kw_only=True)
class Write:
    """Of data (slots on axis 0) or of scales and zeros (slots on axis 1, a block at a time).

    A row owns the blocks that it writes, so no chunk is another's.
    """

    rows: Rows
    chunk_rows: jax.Array  # int32[..], of each chunk its row
    chunk_positions: jax.Array  # int32[..], and its first position
    new_ref: Any  # see `tpu_layout.new_rows`
    pool_ref: Any
    buffers: list  # see `chunk_buffers`
    axis: int

    @property
    def size(self) -> int:
        return self.buffers[1].shape[1 + self.axis]

    def run(self, total) -> None:
        """Turn i merges chunk i while later ones come and earlier ones go."""
        ahead = CHUNK_BUFFERS // 2

        def turn(index):
            pl.when(index >= ahead)(lambda: self.put(index - ahead).wait())
            pl.when(index + ahead < total)(lambda: self.start(index + ahead))
            self.fetch_new(index).wait()
            self.fetch_old(index).wait()
            self.merge(index)
            self.put(index).start()

        repeat(0, jnp.minimum(ahead, total), self.start)
        repeat(0, total, turn)
        repeat(jnp.maximum(total - ahead, 0), total, lambda index: self.put(index).wait())

    def start(self, index) -> None:
        self.fetch_new(index).start()
        self.fetch_old(index).start()

    def fetch_new(self, index):
        new_buffers, _, sems, _ = self.buffers
        size, slot = self.size, index % CHUNK_BUFFERS
        first = pl.multiple_of(self._first_token(index) // size * size, size)
        source = self.new_ref.at[(slice(None),) * self.axis + (pl.ds(first, 2 * size),)]
        return pltpu.make_async_copy(source, new_buffers.at[slot], sems.at[slot])

    def fetch_old(self, index):
        _, old_buffers, _, sems = self.buffers
        slot = index % CHUNK_BUFFERS
        return pltpu.make_async_copy(self._place(index), old_buffers.at[slot], sems.at[slot])

    def put(self, index):
        _, old_buffers, _, sems = self.buffers
        slot = index % CHUNK_BUFFERS
        return pltpu.make_async_copy(old_buffers.at[slot], self._place(index), sems.at[slot])

    def merge(self, index) -> None:
        new_buffers, old_buffers, _, _ = self.buffers
        slot, size = index % CHUNK_BUFFERS, self.size
        first, end, before = self.rows.queries(self.chunk_rows[index])
        new, old = wide(new_buffers[slot]), wide(old_buffers[slot])
        back = (2 * size - self._first_token(index) % size) % (2 * size)
        new = pltpu.roll(new, back, self.axis)
        new = new[:, :size] if self.axis else new[:size]
        token = lax.broadcasted_iota(jnp.int32, new.shape, self.axis)
        position = self.chunk_positions[index] + token
        is_new = (position >= first + before) & (position < end + before)
        old_buffers[slot] = jnp.where(is_new, new, old).astype(old_buffers.dtype)

    def _place(self, index):
        block_size, position = self.rows.shape.block_size, self.chunk_positions[index]
        block = self.pool_ref.at[self.rows.block(self.chunk_rows[index], position // block_size)]
        if self.axis:
            return block
        return block.at[pl.ds(pl.multiple_of(position % block_size, self.size), self.size)]

    def _first_token(self, index):
        """Where the chunk's first slot would come from, among the padded new tokens."""
        _, _, before = self.rows.queries(self.chunk_rows[index])
        return self.size + self.chunk_positions[index] - before


def wide(x: jax.Array) -> jax.Array:
    """In 4 bytes, which registers rotate."""
    return x.astype(jnp.int32 if x.dtype == jnp.uint8 else jnp.float32)


def repeat(first, end, act: Callable) -> None:
    """Calls act(i) for i in [first, end)."""
    lax.fori_loop(first, end, lambda index, _: act(index), None)
