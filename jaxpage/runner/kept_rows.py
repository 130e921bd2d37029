"""Values that the device keeps for each request slot: how they are stored, and how rows of a step replace them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpage.plan import NULL_SLOT
from pallas_kernels.lists import distinct


def put_rows(kept: jax.Array, slots: jax.Array, new: jax.Array, *, on_gpu: bool) -> jax.Array:
    """`kept` [Q, ...] with the rows `new` [R, ...] in their slots, int32[R]."""
    if not on_gpu:
        return kept.at[slots].set(new)
    # Most rows may be padding, and on a GPU their writes to the null slot would wait for each other. Other platforms do
    # not mind.
    slots = distinct(slots, slots == NULL_SLOT, kept.shape[0])
    return kept.at[slots].set(new, mode="drop", unique_indices=True)


def words_of(dtype: DTypeLike) -> np.dtype:
    """The unsigned integer type as wide as a float. Rows of it can be scattered efficiently on every platform, while
    XLA:CPU converts a whole array of 16-bit floats to scatter into it."""
    return np.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
