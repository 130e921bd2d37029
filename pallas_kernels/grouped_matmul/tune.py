"""TileSizes of the grouped product's kernels by kind of device: measured, and stored in `tuned/`.

`python -m pallas_kernels.grouped_matmul.tune` measures on the available Hopper GPU or TPU. The folder is empty until
then. What divides sums is never tuned: the inputs of a stage.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tuning
from pallas_kernels.grouped_matmul.cases import MODELS, Model
from pallas_kernels.tile_sizes import folder_of, kernel_of

Work = tuple[Model, int]  # and the number of rows


def _works(*rows_per_group: int) -> list[Work]:
    """Weights of 0.4 and 0.9 GB, larger than any cache."""
    return [(model, rows * model.num_groups) for model in MODELS for rows in rows_per_group]


FEW, MANY = _works(4, 16), _works(256, 512)
CANDIDATES = {
    "gpu": (
        (FEW, {"few_stages": (2, 3, 4, 6, 8), "few_columns": (128, 256)}),
        (MANY, {"many_stages": (2, 3, 4, 6)}),
        (_works(64, 128), {"few_rows": (32, 64, 128)}),
    ),
    "tpu": (
        (FEW, {"least_tile": (32, 64, 128), "outputs": (512, 1024, 2048)}),
        (MANY, {"most_tile": (128, 256, 512)}),
    ),
}


def tune(platform: str) -> tuple[Any, dict[str, float]]:
    """The fastest sizes on the available device, and the seconds of all candidates."""
    return tuning.fastest(
        kernel_of("grouped_matmul", platform).TileSizes(),
        CANDIDATES[platform],
        partial(_seconds, platform),
    )


def _seconds(platform: str, sizes: Any, work: Work) -> float:
    multiply = jax.jit(partial(kernel_of("grouped_matmul", platform).grouped_matmul, sizes=sizes))
    arguments = _arguments(*work)
    return tuning.seconds_of(lambda: multiply(*arguments))


def _arguments(model: Model, num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows assigned to groups at random."""
    shape = model.num_groups, model.num_outputs, model.num_inputs
    rng = np.random.default_rng(0)
    group_sizes = rng.multinomial(num_rows, [1 / model.num_groups] * model.num_groups)
    keys = jax.random.split(jax.random.key(0))
    return (
        jax.random.normal(keys[0], (num_rows, model.num_inputs), jnp.bfloat16),
        jax.random.normal(keys[1], shape, jnp.bfloat16),
        jnp.asarray(group_sizes, jnp.int32),
    )


if __name__ == "__main__":
    tuning.tune_here(tune, folder_of("grouped_matmul"))
