"""TileSizes of the kernel for few tokens by kind of device, and up to how many tokens it is faster than XLA's product:
measured, and stored in `tuned/`.

`python -m pallas_kernels.matmul.tune` measures on the available Hopper GPU. The folder is empty until then, and engines
use XLA's products.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tuning
from pallas_kernels.matmul import xla
from pallas_kernels.quant_matmul.cases import LAYERS
from pallas_kernels.tile_sizes import folder_of

COPIES = 8  # of a weight, used in turn: 67 MB and more, so the L2 of 50 MB has none at its turn
LOOPS = 10  # over all copies, in a launch
# The loop is one CUDA graph, as decode steps are: the host does not launch each product.
OPTIONS = {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,WHILE"}
TOKENS = (2, 16, 64, 128)
Work = tuple[int, tuple[int, int]]  # tokens, and a layer's inputs and outputs
SIZES: tuple[list[Work], dict[str, tuple[int, ...]]] = (
    list(itertools.product((2, 64), LAYERS["3b"][2:])),
    {"rows": (64, 128), "smem_kib": (72, 100, 200)},
)
XLA_FROM: tuple[list[Work], dict[str, tuple[int, ...]]] = (
    list(itertools.product(TOKENS, LAYERS["3b"])),
    {"xla_from": (1, *(1 + most for most in TOKENS))},
)


def tune(platform: str) -> tuple[Any, dict[str, float]]:
    """The fastest sizes on the available device, and the seconds of all candidates. What is not clearly faster than
    XLA's product is left to XLA.
    """
    if platform != "gpu":
        raise SystemExit("nothing to tune: there is a kernel for Hopper GPUs only")
    from pallas_kernels.matmul.gpu import TileSizes

    sizes, of_sizes = tuning.fastest(TileSizes(xla_from=1 + max(TOKENS)), [SIZES], _seconds)
    sizes, of_both = tuning.fastest(replace(sizes, xla_from=1), [XLA_FROM], _seconds)
    return sizes, of_sizes | of_both


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
    arguments = _arguments(num_tokens, *layer)
    options = OPTIONS if jax.default_backend() == "gpu" else {}
    loops = jax.jit(partial(_loops, product), compiler_options=options)
    return tuning.seconds_of(lambda: loops(*arguments)) / (LOOPS * COPIES)


def _loops(
    product: Callable[..., jax.Array], xs: list[jax.Array], weights: list[jax.Array]
) -> list[jax.Array]:
    """Each x times its own weight, LOOPS times."""

    def loop(_: int, xs: list[jax.Array]) -> list[jax.Array]:
        outs = [product(x, weight, dtype=x.dtype) for x, weight in zip(xs, weights, strict=True)]
        # The same numbers, but XLA cannot know: it would compute a product once, before the loop.
        return [x + 0 * out.max(axis=1, keepdims=True) for x, out in zip(xs, outs, strict=True)]

    return lax.fori_loop(0, LOOPS, loop, xs)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _arguments(
    num_tokens: int, num_in: int, num_out: int
) -> tuple[list[jax.Array], list[jax.Array]]:
    """COPIES of x, and of the weight."""

    def normal(key: jax.Array, num_rows: int) -> list[jax.Array]:
        keys, shape = jax.random.split(key, COPIES), (num_rows, num_in)
        return [jax.random.normal(each, shape, jnp.bfloat16) for each in keys]

    key_x, key_weight = jax.random.split(jax.random.key(0))
    return normal(key_x, num_tokens), normal(key_weight, num_out)


if __name__ == "__main__":
    tuning.tune_here(tune, folder_of("matmul"))
