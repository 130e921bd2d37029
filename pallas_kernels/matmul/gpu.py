"""Products of few tokens with bfloat16 weights for Hopper GPUs (sm_90a) in Mosaic GPU. Knows no engine, and makes no
choices.

With few tokens a product takes as long as reading its weight: every SM must always have copies in flight.

**Tile.** A program is one warpgroup, which computes the transposed result: `rows` outputs, wgmma's rows, and a tile of
tokens, of 8 or more, not 64. Beyond the last token TMA reads zeros. More than 8 tokens are padded to a multiple of 8:
Mosaic GPU lowers no copy from an array whose last tile of 8 rows is partial.

**Splits.** Layers with few outputs have fewer programs than the chip has SMs: their inputs are split, and XLA adds the
parts in order, then the bias, and casts. The number of parts, and so the order of all sums, depends only on the
weight's shape: a token's result does not depend on the number of tokens.

**Stages.** Step i multiplies a chunk: CHUNK inputs of each output and of each token, which lie in stage i % S of S
stages of shared memory.

**Protocol.** The warpgroup starts all copies itself: those for step i at the end of step i - S, the first S before the
loop.

    buffer            producer         consumer       barrier                        waits for
    stages [i % S]    TMA for step i   wgmma, step i  ready[i % S], an arrival of    both copies to arrive
                                                      each array (2)
    the same, free    wgmma of step i  TMA for i + S  wgmma_wait, then commit_smem,  wgmma to be done, in all warps
                                                      end of step i

Letters: T tokens, E inputs, F outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float

from pallas_kernels.hopper import unsupported_jax
from pallas_kernels.matmul.reference import with_bias
from pallas_kernels.wgmma import Ref, load, num_splits, piece, tiled

CHUNK = 64  # inputs per stage: a line of 128 bytes
MOST_TOKENS = 128  # of a tile: columns of float32 sums that fit in registers
SPLIT_ROWS = 128  # outputs of a tile, as far as splits are concerned, whatever `rows` is


@dataclass(frozen=True, kw_only=True)
class TileSizes:
    """What may depend on the kind of device (`tune.py`); no result of the kernel depends on it.

    rows: outputs of a program, 64 or 128. smem_kib: KiB of shared memory for a program's stages; with 100, two programs
    share an SM. xla_from: engines use XLA's product for so many tokens or more. That is for all, until a device has
    been measured.
    """

    rows: int = 128
    smem_kib: int = 100
    xla_from: int = 1


DEFAULT = TileSizes()


def unsupported_reason(x_dtype: jnp.dtype, weight: jax.ShapeDtypeStruct | jax.Array) -> str | None:
    """Why the kernel does not support this dtype of x and this weight [F, E], in one line; None if it does."""
    if reason := unsupported_jax():
        return reason
    for what, dtype in (("x", x_dtype), ("the weight", weight.dtype)):
        if dtype != jnp.bfloat16:
            return f"{what} is {jnp.dtype(dtype)}; the kernel reads bfloat16"
    num_out, num_in = weight.shape
    if num_out % SPLIT_ROWS:
        return f"{num_out} outputs are no multiple of {SPLIT_ROWS}"
    if num_in % CHUNK:
        return f"{num_in} inputs are no multiple of {CHUNK}"
    return None


def matmul(
    x: BFloat16[Array, "T E"],
    weight: BFloat16[Array, "F E"],
    *,
    bias: Float[Array, " F"] | None = None,
    dtype: DTypeLike = jnp.float32,
    sizes: TileSizes = DEFAULT,
    interpret: Any = None,
) -> Float[Array, "T F"]:
    """Same contract as `reference.matmul`. Raises NotImplementedError with the reason.

    `interpret`: `plgpu.InterpretGPUParams` (jax >= 0.11.2), or None to compile.
    """
    if reason := unsupported_reason(x.dtype, weight):
        raise NotImplementedError(reason)
    num_tokens = x.shape[0]
    tile = next(n for n in (8, 16, 32, 64, MOST_TOKENS) if n >= min(num_tokens, MOST_TOKENS))
    # The interpreter refuses to read beyond the last token.
    whole = 8 if interpret is None else tile
    if interpret is not None or num_tokens > whole:
        x = jnp.pad(x, ((0, -num_tokens % whole), (0, 0)))
    parts = _parts(x, weight, bias, jnp.dtype(dtype), tile, sizes, interpret)[:, :num_tokens]
    out = parts[0]
    if parts.shape[0] == 1:
        return out
    for part in parts[1:]:
        out = out + part
    return with_bias(out, bias, dtype)


class _Memory(NamedTuple):
    """A program's shared memory and barriers: their types, or in the kernel refs."""

    x: Any  # bfloat16[S, tile, CHUNK]
    weight: Any  # bfloat16[S, rows, CHUNK]
    ready: Any  # a barrier per stage


def _parts(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    dtype: jnp.dtype,
    tile: int,
    sizes: TileSizes,
    interpret: Any,
) -> jax.Array:
    """x [T, E] -> [1, T', F], the result; or if inputs are split float32[parts, T', F], to be added in order.

    T' is T, rounded up to a multiple of `tile`.
    """
    num_out, num_in = weight.shape
    num_tiles = pl.cdiv(x.shape[0], tile)
    num_chunks, splits = num_in // CHUNK, num_splits(num_out // SPLIT_ROWS, num_in // CHUNK)
    stage_bytes = (sizes.rows + tile) * CHUNK * 2
    num_stages = max(1, min(-(-num_chunks // splits), sizes.smem_kib * 1024 // stage_bytes))

    def body(x_ref: Ref, weight_ref: Ref, bias_ref: Ref | None, out_ref: Ref, memory: _Memory):
        split, rows = lax.axis_index("split"), piece(lax.axis_index("rows"), sizes.rows)
        tokens = piece(lax.axis_index("tile"), tile)
        first = lax.div(split * num_chunks, jnp.int32(splits))
        num_steps = lax.div((split + 1) * num_chunks, jnp.int32(splits)) - first

        def fetch(i, stage):
            inputs, ready = piece(first + i, CHUNK), memory.ready.at[stage]
            plgpu.copy_gmem_to_smem(weight_ref.at[rows, inputs], memory.weight.at[stage], ready)
            plgpu.copy_gmem_to_smem(x_ref.at[tokens, inputs], memory.x.at[stage], ready)

        def multiply(sums: Ref):
            def step(i, _):
                stage = lax.rem(i, jnp.int32(num_stages))
                plgpu.barrier_wait(memory.ready.at[stage])
                plgpu.wgmma(sums, memory.weight.at[stage], memory.x.at[stage].transpose((1, 0)))
                plgpu.wgmma_wait(0)
                plgpu.commit_smem()  # all warps' products are done
                pl.when(i + num_stages < num_steps)(partial(fetch, i + num_stages, stage))

            lax.fori_loop(0, num_steps, step, None)
            return sums[...]

        for stage in range(num_stages):
            pl.when(stage < num_steps)(partial(fetch, stage, stage))
        out = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((sizes.rows, tile), jnp.float32))
        if bias_ref is not None:
            by_row = plgpu.Layout.WGMMA.reduce(1)
            values = load(bias_ref.at[rows], layout=by_row, optimized=False).astype(jnp.float32)
            out = out + lax.broadcast_in_dim(values, out.shape, [0])
        # In the transposed layout a thread's pairs of values are along outputs, as in memory.
        out = plgpu.layout_cast(out.astype(out_ref.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        out_ref.at[split, tokens, rows].transpose((1, 0))[...] = out

    stages = partial(tiled, dtype=jnp.bfloat16, swizzle=2 * CHUNK)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(
            (splits, num_tiles * tile, num_out), dtype if splits == 1 else jnp.float32
        ),
        grid=(splits, num_out // sizes.rows, num_tiles),
        grid_names=("split", "rows", "tile"),
        scratch_types=(
            _Memory(
                x=stages(num_stages, tile, CHUNK),
                weight=stages(num_stages, sizes.rows, CHUNK),
                ready=plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
            ),
        ),
        interpret=interpret,
        kernel_name="matmul",
    )
    with jax.named_scope("matmul"):  # for whoever reads the compiled program
        return kernel(x, weight, bias if splits == 1 else None)
