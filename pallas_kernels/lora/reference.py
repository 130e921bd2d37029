"""The definition of low-rank adapters per token: plain jnp, simple, slow. All implementations are compared with it.

Letters: T tokens, E inputs, S adapter slots, r rank, P projections with the same input x and concatenated outputs, F
outputs of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

HIGHEST = jax.lax.Precision.HIGHEST


def lora(
    y: Float32[Array, "T F"],
    x: Float[Array, "T E"],
    a: Float[Array, "S*P*r E"],
    b: Sequence[Float[Array, "_ S*r"]],
    slots: Int[Array, " T"],
    *,
    num_slots: int,
) -> Float32[Array, "T F"]:
    """y + B A x with the adapter of each token's slot. y has the outputs of all projections concatenated.

    Slots are 1 .. S; for slot 0 the result is y. Rows of `a` are ordered by slot, then by projection; columns of `b` by
    slot. x is rounded to the dtype of `a`, and so is A x. Contents of unused slots have no effect, even NaN; weights of
    used ones must be finite. A row's result depends only on the row and its slot.
    """
    slot, is_adapted = jnp.maximum(slots - 1, 0), (slots > 0)[:, None]
    own_a = a.reshape(num_slots, len(b), -1, a.shape[1])[slot].astype(jnp.float32)
    inner = jnp.einsum(
        "te,tpre->tpr", x.astype(a.dtype).astype(jnp.float32), own_a, precision=HIGHEST
    )
    inner = inner.astype(a.dtype).astype(jnp.float32)
    outer = []
    for part, weight in enumerate(b):
        own_b = weight.reshape(weight.shape[0], num_slots, -1)[:, slot].astype(jnp.float32)
        out = jnp.einsum("tr,ftr->tf", inner[:, part], own_b, precision=HIGHEST)
        outer.append(jnp.where(is_adapted, out, 0.0))
    return y + jnp.concatenate(outer, axis=1)
