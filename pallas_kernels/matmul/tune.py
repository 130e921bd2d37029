"""TileSizes of the kernel for few tokens by kind of device, and up to how many tokens it is faster than XLA's product:
measured, and stored in `tuned/`.

`python -m pallas_kernels.matmul.tune` measures on the available Hopper GPU. The folder is empty until then, and engines
use XLA's products.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.matmul import xla
from pallas_kernels.quant_matmul.cases import LAYERS
from pallas_kernels.tile_sizes import folder_of

COPIES = 8  # of a weight, used in turn: 67 MB and more, so the L2 of 50 MB has none at its turn
TOKENS = (2, 16, 64, 128)
Work = tuple[int, tuple[int, int]]  # tokens, and a layer's inputs and outputs
CANDIDATES: tuple[tuple[list[Work], dict[str, tuple[int, ...]]], ...] = (
    (
        list(itertools.product((2, 64), LAYERS["3b"][2:])),
        {"rows": (64, 128), "smem_kib": (72, 100, 200)},
    ),
    (
        list(itertools.product(TOKENS, LAYERS["3b"])),
        {"xla_from": (1, *(1 + most for most in TOKENS))},
    ),
)


def tune(platform: str) -> tuple[Any, dict[str, float]]:
    """The fastest sizes on the available device, and the seconds of all candidates."""
    if platform != "gpu":
        raise SystemExit("nothing to tune: there is a kernel for Hopper GPUs only")
    from pallas_kernels.matmul import gpu

    # The first stage is about the kernel: XLA takes over where there are more tokens than any that it measures.
    start = gpu.TileSizes(xla_from=1 + max(TOKENS))
    return tuning.fastest(start, CANDIDATES, _seconds)


def _seconds(sizes: Any, work: Work) -> float:
    num_tokens, layer = work
    if num_tokens >= sizes.xla_from:
        return _seconds_of(None, num_tokens, layer)
    return _seconds_of(replace(sizes, xla_from=1), num_tokens, layer)


@cache
def _seconds_of(sizes: Any | None, num_tokens: int, layer: tuple[int, int]) -> float:
    """Of the kernel with these sizes, or of XLA's product."""
    from pallas_kernels.matmul import gpu

    product = xla.matmul if sizes is None else partial(gpu.matmul, sizes=sizes)
    run = jax.jit(partial(product, dtype=jnp.bfloat16))
    x, *weights = _arguments(num_tokens, *layer)
    turns = itertools.cycle(weights)
    return tuning.seconds_of(lambda: run(x, next(turns)))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _arguments(num_tokens: int, num_in: int, num_out: int) -> list[jax.Array]:
    """x, then the weights."""
    keys = jax.random.split(jax.random.key(0), 1 + COPIES)
    shapes = [(num_tokens, num_in), *[(num_out, num_in)] * COPIES]
    return [
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    ]


if __name__ == "__main__":
    tuning.tune_here(tune, folder_of("matmul"))
