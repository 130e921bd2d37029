"""What the device can do at best, through jax: move bytes, and multiply matrices. All other figures are shares of it.

Knows nothing of the engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import jax
import jax.numpy as jnp

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
    # As the copy engine does it, and as a kernel does it; the faster of the two is what can be had.
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

    @jax.jit
    def product(carry):
        left, right = carry
        return left @ right, right

    value, samples = rate(product, (left, right), 2 * length**3)
    yield measured(MATMUL, value / 1e12, "TFLOP/s", length=length, samples=samples)
