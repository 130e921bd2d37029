"""The declaration of every parameter, by path; shardings, dummy weights and the loader follow from it.

Knows how NNX modules hold parameters; must not know files or families.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding

from jaxpage.models.layers import Initialiser
from jaxpage.parallel.sharding import sharding

FLOATS = (
    np.float64,
    np.float32,
    np.float16,
    ml_dtypes.bfloat16,
)  # dtypes of checkpoints
_NAMES_SHOWN = 5


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: `path` is its attribute path, and its name in Hugging Face checkpoints."""

    path: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str, ...]
    units: tuple[int, ...]
    init: Initialiser

    @property
    def num_weights(self) -> int:
        """Scales and zeros of quantised weights are none; a byte of int4 holds two."""
        if self.path.endswith(("scale", "zero")):
            return 0
        return math.prod(self.shape) * (2 if self.dtype == jnp.uint8 else 1)

    def sharding(self, mesh: Mesh | None) -> Sharding:
        return sharding(mesh, self.axes, self.units)


def variables(model: nnx.Module) -> dict[str, nnx.Param]:
    """The model's parameters by path, live: `set_value` on one changes the model."""
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {".".join(map(str, path)): variable for path, variable in state}


def specs(model: nnx.Module) -> dict[str, ParamSpec]:
    """The declaration of every parameter, for an abstract model or one with arrays."""
    return {path: _spec(path, variable) for path, variable in variables(model).items()}


def _spec(path: str, variable: nnx.Param) -> ParamSpec:
    value, metadata = variable.get_value(), variable.get_metadata()
    return ParamSpec(
        path=path,
        shape=tuple(value.shape),
        dtype=jnp.dtype(value.dtype),
        axes=metadata["axes"],
        units=metadata["units"],
        init=metadata["init"],
    )


def listed(names: list[str]) -> str:
    """The first few names, for error messages."""
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
