"""The definition of low-rank adapters by token: plain jnp, obvious, slow. Everything else is compared with it.

Letters: T tokens, E inputs, S adapter slots, r rank, P projections that read the same x and have their outputs side by
side, F outputs of all of them.
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
    """y + B A x of each token's slot. y has each projection's outputs behind those of the one before.

    Slots are 1 .. S; of a token of slot 0 it is y. Rows of `a` lie slot by slot, in each projection by projection;
    columns of `b` slot by slot. x is rounded to the dtype of `a`, and so is A x. What slots of no token hold has no
    effect, whatever it is; weights of others are finite. A row's result depends on the row and its slot alone.
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
