"""A step's rows and tokens as attention and the model see them on the device.

Letters: R rows, T packed tokens, M blocks per sequence, G KV-cache groups (see `kv_groups`).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """One packed step, unpacked on the device from a single int32 upload. T and R are the sizes of a bucket."""

    slots: jax.Array  # int32[R] request slot; padding: NULL_SLOT
    query_starts: jax.Array  # int32[R+1] first token of each row in the packed T
    # int32[R] tokens with KV after this step's writes; 0: a row without tokens
    kv_lens: jax.Array
    token_ids: jax.Array  # int32[T] padding: 0
    positions: jax.Array  # int32[T] padding: 0
    # int32[G, T] KV slot of each token; padding: a slot of the null block
    slot_mappings: jax.Array
    block_tables: jax.Array  # int32[G, R, M]
    is_token: jax.Array | None = None  # bool[T]; False: padding. None: not known
    # int32[T]: the last token of the sequence that each token attends to, if some see later ones. None: itself
    last_keys: jax.Array | None = None
