"""A launch as data: the names of programs and the host buffers that go up with each.

The same calls on another runner with the same weights leave the same device state, bit for bit: so that other hosts can
take part, and a recorded run can be repeated. Nothing reaches the device in any other way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Programs, besides those of steps (`buckets`).
ADMIT = "admit"
SET_MASKS = "set masks"
SET_TOKENS = "set tokens"
LOAD_ADAPTER = "load adapter"  # into a slot of the model's; only with adapters
SCORE = "score"  # a piece of the hidden states of the last `forward`, by its number
VOCABULARY = "vocabulary"
READ, WRITE = "read blocks", "write blocks"  # of the pool; only with host memory

# Calls that are no program of their own.
STORE_HOST, STORE_DEVICE, LOAD = "store host blocks", "store device blocks", "load blocks"
SWAP_OUT, SWAP_IN = "swap out", "swap in"
CAPTURE = "capture"  # some tokens of the last `forward` or `decode`: which piece, and its rows
RESET = "reset"  # pool and request state begin anew

# At most; buffers of fewer are padded.
MASKS_PER_CALL = 8
TOKENS_PER_CALL = 64
VOCABULARY_ROWS = 8
BLOCKS_PER_CALL = 16  # of those that move between device and host; padding moves the null block


@dataclass(frozen=True, eq=False)
class Call:
    """One launch."""

    program: str
    buffers: tuple[np.ndarray, ...] = ()
