"""A launch as data: names of programs, and the host buffers that are uploaded for each.

The same calls on another runner with the same weights produce the same device state, bit for bit. This lets other hosts
take part, and recorded runs be replayed. Nothing reaches the device in any other way.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Programs, besides those of steps (`buckets`).
ADMIT = "admit"
SET_MASKS = "set masks"
SET_TOKENS = "set tokens"
COPY_STATES = "copy states"  # recurrent states between slots; only with states in the prefix cache
LOAD_ADAPTER = "load adapter"  # into an adapter slot of the model; only with adapters
SCORE = "score"  # a piece of the hidden states of the last `forward`, by its number
VOCABULARY = "vocabulary"
STATE_CHANGES = (
    ADMIT,
    SET_MASKS,
    SET_TOKENS,
    COPY_STATES,
)  # they take and return the request state alone
READ, WRITE = "read blocks", "write blocks"  # of the pool; only with host memory

# Calls without a compiled program of the same name.
STORE_HOST, STORE_DEVICE, LOAD = "store host blocks", "store device blocks", "load blocks"
SWAP_OUT, SWAP_IN = "swap out", "swap in"
CAPTURE = "capture"  # tokens of the last `forward` or `decode`: number of the piece, rows in it
RESET = "reset"  # reallocate pool and request state

# Most entries of a call; shorter buffers are padded.
MASKS_PER_CALL = 8
TOKENS_PER_CALL = 64
STATES_PER_CALL = 8
VOCABULARY_ROWS = 8
BLOCKS_PER_CALL = 16  # between device and host; padding moves the null block


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a program."""

    program: str
    buffers: tuple[np.ndarray, ...] = ()
