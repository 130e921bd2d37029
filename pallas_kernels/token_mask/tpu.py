"""Masks and biases of logits on TPUs (Mosaic): logits come to VMEM once, a few rows at a time, and go back once.

XLA unpacks bits into another layout and scatters in a third, which takes eight passes over the logits. Here the word of
each lane comes to it by a gather within a register, and a token that a row names is a change of one lane of one
register.

Letters: R rows, V tokens, N tokens that a row names.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float32, Int32, UInt32

from pallas_kernels.mosaic_tpu import LANES
from pallas_kernels.token_mask.xla import num_used

ROWS = 8  # of a tile
VMEM_BYTES = 60 << 20  # of 64 MB and more
CHUNK = 32 * LANES  # tokens whose words fill a register


def unsupported_reason(logits: jax.ShapeDtypeStruct | jax.Array) -> str | None:
    """Why the kernel cannot serve such logits; None if it can."""
    num_rows, vocab_size = logits.shape
    if vocab_size % LANES:
        return f"the vocabulary, {vocab_size} tokens, must be a multiple of {LANES}"
    if num_rows == 1:
        return "of a single row Mosaic does not gather within a register"
    if num_rows > ROWS and num_rows % ROWS:
        return f"more than {ROWS} rows must be a multiple of it, not {num_rows}"
    # A tile on its way in, one on its way out, and one of each at work; beside them words and what rows name.
    needed = 4 * ROWS * vocab_size * 4
    if needed > VMEM_BYTES * 3 // 4:
        return (
            f"{ROWS} rows of {vocab_size} tokens take {needed >> 20} MB of VMEM with their buffers"
        )
    return None


def mask_and_add(
    logits: Float32[Array, "R V"],
    mask: UInt32[Array, "R W"],
    ids: Int32[Array, "R N"],
    values: Float32[Array, "R N"],
    *,
    interpret: pltpu.InterpretParams | bool = False,
) -> Float32[Array, "R V"]:
    """`reference.mask_and_add`. Raises NotImplementedError with the reason of `unsupported_reason`."""
    if reason := unsupported_reason(logits):
        raise NotImplementedError(reason)
    num_rows, vocab_size = logits.shape
    rows = min(ROWS, num_rows)
    words = lax.bitcast_convert_type(mask, jnp.int32)
    words = jnp.pad(words, ((0, 0), (0, -words.shape[1] % LANES)))

    def kernel(num_named, ids_ref, values_ref, words_ref, logits_ref, out_ref):
        _mask(words_ref, logits_ref, out_ref)
        first = pl.program_id(0) * rows
        for row in range(rows):
            _add(row, num_named[first + row], ids_ref, values_ref, out_ref)

    def tile(width, space=pltpu.VMEM):
        return pl.BlockSpec((rows, width), lambda index, _: (index, 0), memory_space=space)

    named = tile(ids.shape[1], pltpu.SMEM)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(num_rows // rows,),
            in_specs=[named, named, tile(words.shape[1]), tile(vocab_size)],
            out_specs=tile(vocab_size),
        ),
        out_shape=jax.ShapeDtypeStruct(logits.shape, logits.dtype),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="mask_and_add",
    )(num_used(ids, vocab_size), ids, values, words, logits)


def _mask(words_ref, logits_ref, out_ref):
    """Tokens of a tile of rows whose bit is 0 become -inf."""
    rows, vocab_size = logits_ref.shape
    lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)

    def mask(words, tile, start):
        """LANES tokens from `start`; their words are four of a register's, from 4 * tile."""
        own = jnp.take_along_axis(words, 4 * tile + lane // 32, axis=1)
        at = pl.ds(start, LANES)
        out_ref[:, at] = jnp.where((own >> (lane % 32)) & 1 == 1, logits_ref[:, at], -jnp.inf)

    def chunk(index, num_tiles):
        words = words_ref[:, pl.ds(pl.multiple_of(index * LANES, LANES), LANES)]

        def mask_tile(tile, _):
            mask(words, tile, pl.multiple_of(index * CHUNK + tile * LANES, LANES))

        lax.fori_loop(0, num_tiles, mask_tile, None, unroll=True)

    whole, rest = vocab_size // CHUNK, vocab_size % CHUNK // LANES
    lax.fori_loop(0, whole, lambda index, _: chunk(index, CHUNK // LANES), None)
    if rest:
        chunk(whole, rest)


def _add(row, num_named, ids_ref, values_ref, out_ref):
    """What a row of a tile adds to tokens, one after the other."""
    lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)

    def add(index, _):
        token = ids_ref[row, index]

        @pl.when(token < out_ref.shape[1])
        def _():
            at = pl.ds(pl.multiple_of(token // LANES * LANES, LANES), LANES)
            before = out_ref[row : row + 1, at]
            after = before + values_ref[row, index]
            out_ref[row : row + 1, at] = jnp.where(lane == token % LANES, after, before)

    lax.fori_loop(0, num_named, add, None)
