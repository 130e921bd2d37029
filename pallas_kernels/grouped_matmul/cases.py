"""Named argument sets for the grouped product: edge cases, and sizes of real models, for tests and bench."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Case:
    """`group_sizes` of `num_rows` rows; the remaining rows are padding."""

    name: str
    group_sizes: tuple[int, ...]
    num_rows: int
    num_inputs: int = 128
    num_outputs: int = 256
    dtype: str = "bfloat16"


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
    Case(name="float32", group_sizes=(9, 20, 1), num_rows=32, dtype="float32"),
    Case(name="int8", group_sizes=(9, 0, 70, 1), num_rows=90, num_inputs=1024, dtype="int8"),
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
    shape = (len(case.group_sizes), case.num_outputs, case.num_inputs)
    group_sizes = jnp.asarray(case.group_sizes, jnp.int32)
    rest = slice(sum(case.group_sizes), case.num_rows if poison else 0)
    if case.dtype == "int8":
        shapes = (case.num_rows, case.num_inputs), shape
        x, weights = (jnp.asarray(rng.integers(-127, 128, n), jnp.int8) for n in shapes)
        shapes = (case.num_rows, 1), shape[:2]
        row_scale, scale = (np.exp(rng.standard_normal(n), dtype=np.float32) for n in shapes)
        row_scale[rest] = np.nan
        scales = {"row_scale": jnp.asarray(row_scale), "scale": jnp.asarray(scale)}
        return {"x": x, "weights": weights, "group_sizes": group_sizes} | scales
    x = rng.standard_normal((case.num_rows, case.num_inputs))
    x[rest] = np.nan
    return {
        "x": jnp.asarray(x, case.dtype),
        "weights": jnp.asarray(rng.standard_normal(shape), case.dtype),
        "group_sizes": group_sizes,
    }
