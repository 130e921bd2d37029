"""The peak rates of the device and of this machine's memory, to which other figures are compared."""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.bench import device_time
from jaxpage.bench.results import Context, Result, measured

BANDWIDTH, MATMUL = "copy bandwidth", "matrix product rate"


def measure(context: Context) -> Iterator[Result]:
    """Bytes per second of copying, read and written; operations per second of a bfloat16 product of random matrices."""
    size, length = (1 << 16, 128) if context.tiny else (1 << 30, 8192)
    options = {"at_least": 0.0 if context.tiny else 0.05, "samples": 3 if context.tiny else 9}

    def rate(launch, carry, work: float) -> tuple[float, list[float]]:
        taken, _ = device_time.seconds(launch, carry, **options)
        return work / statistics.median(taken), [work / seconds for seconds in taken]

    source = jax.random.bits(jax.random.key(0), (size // 4,), jnp.uint32)
    # With the copy engine and with a kernel; the faster of the two is the peak.
    copies = {
        "copy": rate(jax.jit(jnp.copy), source, 2 * size),
        "kernel": rate(jax.jit(lambda x: x + jnp.uint32(1)), source, 2 * size),
    }
    best = max(copies, key=lambda name: copies[name][0])
    yield measured(BANDWIDTH, copies[best][0] / 1e9, "GB/s", bytes=size, by=best, samples=copies)
    del source

    left = jax.random.normal(jax.random.key(1), (length, length), jnp.bfloat16)
    right = jax.random.normal(jax.random.key(2), (length, length), jnp.bfloat16)
    right *= length**-0.5  # so that products of products stay about as large
    product = jax.jit(lambda carry: (carry[0] @ carry[1], carry[1]))
    value, samples = rate(product, (left, right), 2 * length**3)
    yield measured(MATMUL, value / 1e12, "TFLOP/s", length=length, samples=samples)


def memory_bandwidth(
    threads: int, *, num_bytes: int = 1 << 30, repeats: int = 5
) -> dict[str, float]:
    """The host's memory bandwidth: the best of `repeats`, in bytes per second of all `threads` together.

    `copy` counts each byte twice, read and written; `read` only reads. Each thread has its own part of `num_bytes`,
    which should far exceed the caches.
    """
    part = num_bytes // threads // 8
    # Not zeros, for which no memory might be allocated.
    sources = [np.ones(part, np.int64) for _ in range(threads)]
    targets = [np.ones(part, np.int64) for _ in range(threads)]
    total = 8 * part * threads
    options: Any = {"number": 1, "repeat": repeats, "timer": time.perf_counter}
    with ThreadPoolExecutor(threads) as pool:

        def least(function: Callable[..., object], *arrays: list[np.ndarray]) -> float:
            return min(timeit.repeat(lambda: [*pool.map(function, *arrays)], **options))

        # NumPy releases the GIL in both, and both are limited by memory.
        copy, read = least(np.copyto, targets, sources), least(np.max, sources)
    return {"copy": 2 * total / copy, "read": total / read}
