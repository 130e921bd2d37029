"""Operations on rows of logits, in the form that each platform computes fastest."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

_LARGE = 64 << 20  # bytes, which an H200 reads in 14 us


@jax.jit
def argmax(x: jax.Array) -> jax.Array:
    """int32[R]: the first of the largest of x, float32[R, N]; with NaN in the row, any index. N at most 2**24."""
    return lax.platform_dependent(
        x,
        # In one pass, which also computes x.
        tpu=lambda x: lax.argmax(x, 1, jnp.int32),
        default=lambda x: first_of(x, x.max(-1)),
    )


@jax.jit
def first_of(x: jax.Array, best: jax.Array) -> jax.Array:
    """int32[R]: the first index of best[r], the largest of x, float32[R, N]; with NaN in the row, the last index.

    A float reduction, because XLA does not vectorise `jnp.argmax` on a CPU (28 ms for 32 rows of 150,000; a maximum and
    this take 5). float32 counts exactly up to 2**24.
    """
    width = x.shape[1]
    from_end = width - lax.broadcasted_iota(jnp.float32, x.shape, 1)
    index = jnp.where(x == best[:, None], from_end, 0.0).max(-1).astype(jnp.int32)
    return jnp.minimum(width - index, width - 1)


def where_any(
    condition: jax.Array, value: Callable[[], jax.Array], otherwise: jax.Array, *, of: jax.Array
) -> jax.Array:
    """`where(condition, value(), otherwise)`, where value() is computed only if a row needs it. `of`: what it reads.

    On a GPU a branch waits for the host, which takes longer than reading a small array, so there the value of one is
    always computed.
    """

    def always():
        return jnp.where(condition, value(), otherwise)

    def if_needed():
        return lax.cond(condition.any(), always, lambda: otherwise)

    is_small = of.size * of.dtype.itemsize < _LARGE
    return lax.platform_dependent(cuda=always if is_small else if_needed, default=if_needed)
