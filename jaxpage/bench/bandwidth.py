"""How fast this machine's memory is: the floor under a decode step, which reads every weight once.

Knows NumPy and threads. Must not know any engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np


def measure(threads: int, *, num_bytes: int = 1 << 30, repeats: int = 5) -> dict[str, float]:
    """The best of `repeats`, in bytes per second of all `threads` together.

    `copy` counts each byte twice, read and written; `read` only reads. Each thread has its own part
    of `num_bytes`, which should be far more than the caches hold.
    """
    part = num_bytes // threads // 8
    sources = [np.ones(part, np.int64) for _ in range(threads)]  # ones: zeros might be no memory
    targets = [np.ones(part, np.int64) for _ in range(threads)]
    total = 8 * part * threads
    with ThreadPoolExecutor(threads) as pool:

        def seconds(function: Callable[..., object], *arrays: list[np.ndarray]) -> float:
            start = time.perf_counter()
            list(pool.map(function, *arrays))
            return time.perf_counter() - start

        # NumPy lets other threads run in both, and both are as fast as memory lets them.
        copy = min(seconds(np.copyto, targets, sources) for _ in range(repeats))
        read = min(seconds(np.max, sources) for _ in range(repeats))
    return {"copy": 2 * total / copy, "read": total / read}
