"""Which queries are whose, and how far they see: the argument `query_starts` of paged attention."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SeeingAhead:
    """Queries that see some keys behind their own: those of one picture see each other (Gemma 3)."""

    starts: Int[Array, " R+1"]
    # The last key that each query sees: at least its own position, and within its row's kv_len.
    last_keys: Int[Array, " T"]


# Where each row's queries begin, R+1 of them. They are causal, unless it is said how far each sees.
Queries = Int[Array, " R+1"] | SeeingAhead


def parts(queries: Queries) -> tuple[jax.Array, jax.Array | None]:
    """int32[R+1] where rows begin, and int32[T] last keys, None if all are causal."""
    if isinstance(queries, SeeingAhead):
        return queries.starts, queries.last_keys
    return queries, None
