"""Named argument sets for the grouped product: edge cases, and sizes of real models, for tests and bench."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quant_matmul.quantized import quantize, round_rows


@dataclass(frozen=True, kw_only=True)
class Case:
    """`group_sizes` of `num_rows` rows; the remaining rows are padding."""

    name: str
    group_sizes: tuple[int, ...]
    num_rows: int
    num_inputs: int = 128
    num_outputs: int = 256
    # Of x, and of weights without a format. "int8": x is rounded for int8 weights.
    dtype: str = "bfloat16"
    format: str | None = None  # of quantized weights
    group_size: int | None = None  # None: int8 and fp8 have a scale per output
    symmetric: bool = False  # int4 without zeros


_some = partial(Case, group_sizes=(9, 0, 70, 1), num_rows=90, num_inputs=256)
SMALL = (
    Case(name="one-group", group_sizes=(40,), num_rows=40),
    Case(name="even", group_sizes=(16,) * 8, num_rows=128),
    Case(name="odd", group_sizes=(1, 37, 0, 90, 3, 0, 0, 5), num_rows=136),
    Case(name="all-in-the-last", group_sizes=(0, 0, 0, 70), num_rows=70),
    Case(name="all-in-the-first", group_sizes=(200, 0, 0, 0), num_rows=200),
    Case(name="padding", group_sizes=(3, 0, 4), num_rows=64),
    Case(name="nothing", group_sizes=(0, 0), num_rows=16),
    Case(name="a-row-each", group_sizes=(1,) * 20, num_rows=24),
    Case(name="edges-of-tiles", group_sizes=(127, 1, 128, 129, 31, 33), num_rows=449),
    Case(name="wide", group_sizes=(9, 20), num_rows=32, num_inputs=640, num_outputs=768),
    Case(name="by-input", group_sizes=(9, 20), num_rows=32, num_inputs=200, num_outputs=384),
    Case(name="float32", group_sizes=(9, 20, 1), num_rows=32, dtype="float32"),
    _some(name="int8", num_inputs=1024, dtype="int8", format="int8"),
    _some(name="int8-by-input", num_inputs=200, dtype="int8", format="int8"),
    _some(name="int4", format="int4", group_size=128, num_inputs=512),
    _some(name="int4-symmetric", format="int4", group_size=128, symmetric=True),
    _some(name="int4-groups-of-64", format="int4", group_size=64),
    _some(name="int4-groups-of-32", format="int4", group_size=32, num_outputs=384),
    _some(name="int8-groups", format="int8", group_size=128, num_inputs=384),
    _some(name="fp8", format="fp8_e4m3"),
    _some(name="fp8-groups", format="fp8_e4m3", group_size=128),
    _some(name="fp8-groups-odd", format="fp8_e4m3", group_size=128, num_inputs=384),
)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The up projection of a layer of experts."""

    name: str
    num_groups: int
    num_inputs: int
    num_outputs: int
    experts_per_token: int


MODELS = (
    Model(
        name="qwen3-30b-a3b", num_groups=128, num_inputs=2048, num_outputs=768, experts_per_token=8
    ),
    Model(
        name="mixtral-8x7b", num_groups=8, num_inputs=4096, num_outputs=14336, experts_per_token=2
    ),
)
TOKENS = (64, 2048)  # of a decode step, and of one with prompts


def arguments(case: Case, *, seed: int = 0, poison: bool = True) -> dict:
    """With `poison`, rows without a group are NaN, or the scales of those in int8."""
    rng = np.random.default_rng(seed)
    num_groups, group_sizes = len(case.group_sizes), jnp.asarray(case.group_sizes, jnp.int32)
    x = rng.standard_normal((case.num_rows, case.num_inputs))
    weights = rng.standard_normal((num_groups, case.num_outputs, case.num_inputs))
    rest = slice(sum(case.group_sizes), case.num_rows if poison else 0)
    given = {"group_sizes": group_sizes}
    if case.dtype == "int8":
        integers, row_scale = jax.jit(round_rows)(x)
        given |= {"x": integers, "row_scale": row_scale.at[rest].set(np.nan)}
    else:
        x[rest] = np.nan
        given |= {"x": jnp.asarray(x, case.dtype)}
    if case.format is None:
        return given | {"weights": jnp.asarray(weights, case.dtype)}
    weights *= np.exp(rng.standard_normal((num_groups, case.num_outputs, 1)))
    options = {"format": case.format, "group_size": case.group_size}
    of_each = jax.jit(jax.vmap(partial(quantize, **options)))
    quantized = of_each(jnp.asarray(weights, jnp.float32))
    return given | {"weights": replace(quantized, zero=None) if case.symmetric else quantized}
