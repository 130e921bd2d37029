"""TileSizes of the quantized products' kernels by kind of device: measured, and stored in `tuned/`.

`python -m pallas_kernels.quant_matmul.tune` measures on the available Hopper GPU or TPU. The folder is empty until
then. What divides sums is never tuned: chunks, splits and the number of SMs that
these are made for.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tuning
from pallas_kernels.quant_matmul.cases import LAYERS, Case
from pallas_kernels.quant_matmul.quantized import FP8, QuantizedWeight
from pallas_kernels.tile_sizes import folder_of, kernel_of

COPIES = 4  # of a weight, used in turn: 136 MB and more, so the L2 of 50 MB has none at its turn
QKV, _, GATE_UP, DOWN = LAYERS["7b"]


def _works(tokens: tuple[int, ...], *layers: tuple[int, int]) -> list[Case]:
    """In int8, the engine's format, and in the format that differs most from it."""
    formats: tuple[dict[str, Any], ...] = (
        dict(format="int8", round_x=True),
        dict(format="int4", group_size=128),
    )
    return [
        Case(name="", num_tokens=num_tokens, num_in=num_in, num_out=num_out, **format)
        for num_tokens, (num_in, num_out), format in itertools.product(tokens, layers, formats)
    ]


DECODE, PREFILL = _works((8, 64), GATE_UP, DOWN), _works((2048,), GATE_UP, DOWN)
FEW_PROGRAMS = _works((256, 512), QKV, DOWN)
CANDIDATES = {
    "gpu": (
        (DECODE + PREFILL, {"smem_kib": (72, 100, 200), "most_stages": (4, 6, 8)}),
        (FEW_PROGRAMS, {"enough_programs": (50, 100, 132, 264)}),
    ),
    "tpu": (
        (DECODE + PREFILL, {"tile_out": (256, 512, 1024)}),
        (DECODE, {"least_tiles": (4, 8, 16)}),
        (PREFILL, {"tile_tokens": (512, 1024, 2048)}),
    ),
}


def tune(platform: str) -> tuple[Any, dict[str, float]]:
    """The fastest sizes on the available device, and the seconds of all candidates."""
    return tuning.fastest(
        kernel_of("quant_matmul", platform).TileSizes(),
        CANDIDATES[platform],
        partial(_seconds, platform),
    )


def _seconds(platform: str, sizes: Any, case: Case) -> float:
    options = dict(round_x=case.round_x, dtype=case.dtype, sizes=sizes)
    product = jax.jit(partial(kernel_of("quant_matmul", platform).quant_matmul, **options))
    x, weights = _arguments(case)
    turns = itertools.cycle(weights)
    return tuning.seconds_of(lambda: product(x, next(turns)))


def _arguments(case: Case) -> tuple[jax.Array, list[QuantizedWeight]]:
    x = jax.random.normal(jax.random.key(0), (case.num_tokens, case.num_in), jnp.bfloat16)
    return x, [random_weight(case, seed) for seed in range(COPIES)]


@partial(jax.jit, static_argnums=0)
def random_weight(case: Case, seed: int) -> QuantizedWeight:
    """Arbitrary bytes; the values do not affect the time."""
    width, groups = case.num_in, 0
    if case.format == "int4":
        assert case.group_size is not None
        groups = -(-case.num_in // case.group_size // 2) * 2
        width = groups // 2 * case.group_size
    data = jax.random.bits(jax.random.key(seed), (case.num_out, width), jnp.uint8)
    if case.format != "int4":
        data = lax.bitcast_convert_type(data, jnp.int8 if case.format == "int8" else FP8)
        by_group = () if case.group_size is None else (case.num_in // case.group_size,)
        return QuantizedWeight(data=data, scale=jnp.ones((*by_group, case.num_out)))
    zero = jnp.full((groups, case.num_out), 7, jnp.uint8)
    return QuantizedWeight(data=data, scale=jnp.ones(zero.shape), zero=zero)


if __name__ == "__main__":
    tuning.tune_here(tune, folder_of("quant_matmul"))
