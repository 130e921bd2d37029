"""The definition of lookups in a table: plain jnp.

Letters: V rows of the table, E their elements, T tokens.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def lookup(table: Float[Array, "V E"], ids: Int32[Array, " T"]) -> Float[Array, "T E"]:
    """The row of each id, bit by bit; of an id that is negative or not below V zeros, since a table may be a part of
    one that devices share.
    """
    inside = (ids >= 0) & (ids < table.shape[0])
    return jnp.where(inside[:, None], table[jnp.where(inside, ids, 0)], 0)
