"""Lookups on TPUs (Mosaic) in a table that lies by column: XLA puts the V rows of [V, E] in lanes where this takes less
padding, as with gpt-oss's [201088, 2880].

XLA's own gather would first copy such a table into the order of rows, in each step. The kernel copies for each token
the slab of LANES rows that has its row to VMEM, several at once, and moves one lane of it to the lane of the token;
tokens that follow each other share a slab. Each tile of tokens is then transposed. All this moves words of bits, so no
other row matters, and nothing is rounded.

Letters: V rows of the table, E their elements, T tokens.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.mosaic_tpu import LANES, in_chunks

IN_FLIGHT = 8  # slabs in VMEM, all but one on their way
CHUNK = 256  # rows of words that are moved at once: 32 registers
VMEM_BYTES = 32 << 20  # of at least 64 MB


def unsupported_reason(table: jax.ShapeDtypeStruct | jax.Array) -> str | None:
    """Why the kernel cannot serve such a table; None if it can. Needs only shapes and dtypes."""
    (num_rows, width), dtype = table.shape, table.dtype
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"the table is {dtype}; the kernel reads bfloat16 or float32"
    if not lies_by_column(num_rows, width):
        return f"a table of {num_rows} x {width} lies by row, and XLA gathers rows from there"
    if width % (32 // dtype.itemsize):
        return f"rows of {width} elements are not whole registers of {32 // dtype.itemsize}"
    # Slabs, columns, and a tile of rows twice.
    needed = (IN_FLIGHT + 3) * LANES * width * dtype.itemsize
    if needed > VMEM_BYTES * 3 // 4:
        return f"{LANES} rows of {width} elements take {needed >> 20} MB of VMEM with their buffers"
    return None


def lies_by_column(num_rows: int, width: int) -> bool:
    """Whether XLA puts the rows of a table in lanes: if tiles of 8 x LANES then take less memory."""
    by_column = _up_to(LANES, num_rows) * _up_to(8, width)
    return by_column < _up_to(8, num_rows) * _up_to(LANES, width)


def _up_to(multiple: int, size: int) -> int:
    return -(-size // multiple) * multiple


def most_tokens(num_rows: int) -> int:
    """For how many tokens the kernel, which copies LANES rows for each, moves no more bytes than XLA, which reads and
    writes all.
    """
    return 2 * num_rows // LANES


def lookup(
    table: Float[Array, "V E"],
    ids: Int32[Array, " T"],
    *,
    interpret: pltpu.InterpretParams | bool = False,
) -> Float[Array, "T E"]:
    """`reference.lookup`. Raises NotImplementedError with the reason of `unsupported_reason`."""
    if reason := unsupported_reason(table):
        raise NotImplementedError(reason)
    (num_rows, width), num_tokens = table.shape, ids.shape[0]
    columns = table.T
    return pl.pallas_call(
        partial(_kernel, num_tokens=num_tokens, num_rows=num_rows),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(num_tokens, LANES),),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec((LANES, width), lambda tile, _: (tile, 0)),
            scratch_shapes=[
                pltpu.VMEM((width * table.dtype.itemsize // 4, LANES), jnp.int32),
                pltpu.VMEM((IN_FLIGHT, width, LANES), table.dtype),
                pltpu.SemaphoreType.DMA((IN_FLIGHT,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((num_tokens, width), table.dtype),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="embedding",
    )(ids, columns)


class _Slab(NamedTuple):
    """The last one that was asked for."""

    index: jax.Array  # of the table; -1: none
    slot: jax.Array  # of IN_FLIGHT

    def after(self, token: jax.Array) -> tuple[jax.Array, _Slab]:
        """Whether a token needs another one, and which it is then; a token without a row needs none."""
        index = lax.div(token, LANES)
        is_new = (token >= 0) & (index != self.index)
        following = _Slab(index, lax.rem(self.slot + 1, IN_FLIGHT))
        return is_new, jax.tree.map(partial(jnp.where, is_new), following, self)


def _kernel(ids, table, out, words, slabs, sems, *, num_tokens: int, num_rows: int):
    """A tile of LANES tokens. words: in the lane of each token its row, as int32."""
    first = pl.program_id(0) * LANES
    count = jnp.minimum(num_tokens - first, LANES)

    def token_at(index):
        token = ids[first + index]
        return jnp.where((token >= 0) & (token < num_rows), token, -1)

    def copy(slab: _Slab):
        # The last one may end in the padding of the table's tiles.
        lanes = pl.ds(pl.multiple_of(slab.index * LANES, LANES), LANES)
        return pltpu.make_async_copy(table.at[:, lanes], slabs.at[slab.slot], sems.at[slab.slot])

    def ask(index, slab: _Slab) -> _Slab:
        # Behind the last token nothing is new.
        is_new, slab = slab.after(token_at(jnp.minimum(index, count - 1)))

        @pl.when(is_new)
        def _():
            copy(slab).start()

        return slab

    def take(index, state):
        asked, slab, before = state
        asked = ask(index + IN_FLIGHT - 1, asked)
        token = token_at(index)
        is_new, slab = slab.after(token)

        @pl.when(is_new)
        def _():
            copy(slab).wait()

        @pl.when((token != before) & (token >= 0))
        def _():
            _spread(slabs.at[slab.slot], lax.rem(token, LANES), words, index)

        @pl.when((token != before) & (token < 0))
        def _():
            _spread(None, None, words, index)

        return asked, slab, token

    none = _Slab(jnp.int32(-1), jnp.int32(IN_FLIGHT - 1))
    asked = lax.fori_loop(0, IN_FLIGHT - 1, ask, none)
    lax.fori_loop(0, count, take, (asked, none, jnp.int32(-2)))
    out[...] = pltpu.bitcast(words[...], out.dtype).T


def _spread(slab, lane, words, first) -> None:
    """One lane of a slab, or zeros, to all lanes from `first` on: equal tokens that follow need no more."""

    def move(rows):
        old = words[rows]
        new = jnp.zeros_like(old)
        if slab is not None:
            packed = slab.shape[0] // words.shape[0]
            of_slab = pl.ds(rows.start * packed, rows.size * packed)
            new = pltpu.bitcast(slab[of_slab], words.dtype)
            new = jnp.take_along_axis(new, jnp.full(old.shape, lane), axis=1)
        is_behind = lax.broadcasted_iota(jnp.int32, old.shape, 1) >= first
        words[rows] = jnp.where(is_behind, new, old)

    in_chunks(words.shape[0], CHUNK, move)
