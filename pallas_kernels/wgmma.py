"""Shared by the kernels for Hopper GPUs: shared memory in wgmma's layout, loads into registers, matmuls.

Separate from `hopper.py`, because importing Mosaic GPU takes half a second, which only its users should pay. README.md
says what Mosaic GPU's operations are in CUDA.

The interpreter of jax 0.11.2 supports neither wgmma with the left operand in registers nor accumulators with an initial
value. Only `as_operand` and `added_product` differ for interpreted kernels: the operand goes through shared memory, and
the product is added to the accumulator. Kernels bind both to their interpreter before they enter a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# To memory or a barrier. A kernel's references are tracers, and jax exports no type for them that has `at`.
Ref = Any


def tiled(*shape: int, dtype, swizzle: int):
    """Shared memory in wgmma's layout: swizzled tiles of 8 rows, each `swizzle` bytes long."""
    tiles = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiles, plgpu.SwizzleTransform(swizzle)))


def swizzle_of(row_bytes: int) -> int:
    """The widest swizzle, in bytes, that divides rows of so many bytes."""
    return next(swizzle for swizzle in (128, 64, 32) if row_bytes % swizzle == 0)


# Inputs are split until there are so many programs: the number of an H200's SMs. Sums are divided there, so it is the
# same on every device and never tuned.
WANTED_PROGRAMS = 132
MOST_SPLITS = 8


def num_splits(num_tiles: int, num_chunks: int) -> int:
    """Into how many parts the inputs of a product are split, of `num_tiles` tiles of outputs; each has at least four
    chunks.
    """
    return max(1, min(WANTED_PROGRAMS // num_tiles, MOST_SPLITS, num_chunks // 4))


def piece(index, size: int):
    """The slice from index * size, of length `size`; tells the compiler that it begins at a multiple of it."""
    return pl.ds(pl.multiple_of(index * size, size), size)


def filled(shape: tuple[int, ...], value: float, layout, dtype=jnp.float32):
    """An array in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def load(ref, *, layout, optimized: bool = True):
    """Loads shared memory, or with `optimized=False` any memory, into registers."""
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue] (jax 0.10)


def store(ref, value) -> None:
    """Registers into any memory, by threads whose values lie apart: jax 0.12 refuses that unless it is told."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = value


def meet(barrier) -> None:
    """Arrive, and wait for the others."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def product(a, b, dtype=jnp.float32, *, started: Callable[[], None] | None = None):
    """a @ b, summed in `dtype`; b in shared memory, a there or in registers.

    `started` is called while the product is computed.
    """

    def multiply(ref):
        plgpu.wgmma(ref, a, b)
        if started is not None:
            started()
        return ref[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), dtype))


def added_product(acc, a, b, *, interpret: Any):
    """acc + a @ b, summed in acc's dtype; b in shared memory, a from `as_operand`."""
    if interpret is not None:
        return acc + product(a, b, acc.dtype)

    def multiply(ref):
        plgpu.wgmma(ref, a, b)

    return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(acc))


def as_operand(a, smem):
    """`a` as the left operand of wgmma: in registers, or for the interpreter in `smem`, otherwise None.

    smem: as many rows as `a`, and as many columns or more.
    """
    if smem is None:
        return a
    if smem.shape[1] > a.shape[1]:
        smem = smem.at[:, pl.ds(0, a.shape[1])]
    smem[...] = a
    plgpu.commit_smem()
    return smem
