"""A step's rows and tokens as attention and the model see them on the device.

Letters: R rows, T packed tokens, M blocks per sequence, G KV-cache groups (see `kv_groups`).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """One packed step, unpacked on the device from a single int32 upload. T tokens and R rows are a bucket."""

    slots: jax.Array  # int32[R] request slot; padding: NULL_SLOT
    query_starts: jax.Array  # int32[R+1] first token of each row in the packed T
    # int32[R] tokens of KV after this step's writes; 0 marks a row without tokens
    kv_lens: jax.Array
    token_ids: jax.Array  # int32[T] padding: 0
    positions: jax.Array  # int32[T] padding: 0
    # int32[G, T] where the tokens' KV goes; padding: a slot of the null block
    slot_mappings: jax.Array
    block_tables: jax.Array  # int32[G, R, M]
    is_token: jax.Array | None = None  # bool[T]; the others are padding. None: not said
    # int32[T]: the last token of its sequence that each sees, of models in which some see ahead. None: itself
    last_keys: jax.Array | None = None
