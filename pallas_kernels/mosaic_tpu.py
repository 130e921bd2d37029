"""Shared by the TPU kernels: lanes of registers, products on the MXU, loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

LANES = 128


def generation() -> int | None:
    """Of the TPU that is compiled for: 5, 6, 7, ...; None where the interpreter is used instead of one."""
    return pltpu.get_tpu_info().generation if pltpu.is_tpu_device() else None


def dot_transposed(
    x: jax.Array, w: jax.Array, dtype: DTypeLike = jnp.float32, precision: Any = None
) -> jax.Array:
    """x [T, E] times w [F, E] transposed."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision, dtype)


def in_chunks(length: int, size: int, act: Callable[[Any], None]) -> None:
    """Calls act(slice) for each `size` elements of `length`, in order, then for the rest. Slices begin at registers."""

    def whole(index, _):
        act(pl.ds(pl.multiple_of(index * size, LANES), size))

    if length >= size:
        lax.fori_loop(0, length // size, whole, None)
    if rest := length % size:
        act(pl.ds(length - rest, rest))


def wide(x: jax.Array) -> jax.Array:
    """In 4 bytes, which registers rotate."""
    return x.astype(jnp.int32 if x.dtype == jnp.uint8 else jnp.float32)


def repeat(first, end, act: Callable) -> None:
    """Calls act(i) for i in [first, end)."""
    lax.fori_loop(first, end, lambda index, _: act(index), None)
