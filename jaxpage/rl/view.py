"""A model of ours whose parameters are a trainer's arrays, in the trainer's shapes. Their conversion to our layout is
part of the compiled step, so nothing is copied and nothing has to be synchronised.

Knows where a trainer keeps each parameter and in which form (`weights.layouts`). Must not know live modules or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from flax import nnx

from jaxpage.models.decoder import CausalLM
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.layers import Constant, param
from jaxpage.weights.layouts import Place, take
from jaxpage.weights.spec import ParamSpec, specs

# Logical axes for the letters in `layouts`; h and k are heads and head dim in one axis.
_AXES = {
    "E": "embed",
    "F": "mlp",
    "V": "vocab",
    "H": "heads",
    "K": "kv_heads",
    "D": "head_dim",
    "L": "layers",
    "S": "layers",
}


class _Recipe:
    """How our model is built from stored arrays. Compared by identity, so that it is static for Flax."""

    def __init__(self, model: CausalLM, places: Mapping[str, Place]):
        self.graphdef, state = nnx.split(model)
        self.abstract, self.treedef = jax.tree.flatten(state)
        described = specs(model)
        paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
        self.steps = [(path, places[path], described[path]) for path in paths]

    def names(self, path: str) -> set[str]:
        """Of the arrays that the part of our model at a dotted path is made of."""
        return {place.array for own, place, _ in self.steps if _is_within(own, path)}

    def part(self, path: str, stored: Mapping[str, jax.Array]) -> Any:
        """That part; "" for all of it."""
        leaves = [
            take(place, stored[place.array], spec.shape, spec.dtype)
            if _is_within(own, path)
            else abstract
            for (own, place, spec), abstract in zip(self.steps, self.abstract, strict=True)
        ]
        module: Any = nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))
        for name in path.split(".") if path else ():
            module = module[int(name)] if name.isdigit() else getattr(module, name)
        return module


def _is_within(own: str, path: str) -> bool:
    return not path or f"{own}.".startswith(f"{path}.")


class TrainerView(nnx.Module):
    """Has the methods of a `CausalLM`, with parameters in another layout."""

    def __init__(
        self,
        model: CausalLM,
        places: Mapping[str, Place],
        arrays: Mapping[str, jax.ShapeDtypeStruct],
    ):
        """`places`: where each parameter of `model`, which is abstract, is stored; `arrays`: by name, the shapes."""
        self.config = model.config
        described = specs(model)
        forms = {place.array: (place, described[path]) for path, place in places.items()}
        self.names = tuple(sorted(forms))
        self.stored = nnx.List([_declare(*forms[name], arrays[name]) for name in self.names])
        self.recipe = _Recipe(model, places)

    def hidden_states(self, inputs: ForwardInput) -> jax.Array:
        """See `CausalLM`."""
        return self.ours().hidden_states(inputs)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """See `CausalLM`."""
        return self.ours().logits(hidden)

    def __call__(self, token_ids: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """See `CausalLM`."""
        return self.ours()(token_ids, positions)

    def ours(self) -> CausalLM:
        """A model of ours with these parameters, converted to our layout."""
        make, arrays = self.part("")
        return make(arrays)

    def part(self, path: str) -> tuple[Callable[[Any], Any], dict[str, jax.Array]]:
        """See `CausalLM`. `make` converts the trainer's arrays to our layout, wherever it is called."""
        wanted = self.recipe.names(path)
        values = zip(self.names, self.stored, strict=True)
        arrays = {name: each.get_raw_value() for name, each in values if name in wanted}
        return partial(self.recipe.part, path), arrays


def _declare(place: Place, spec: ParamSpec, array: jax.ShapeDtypeStruct) -> nnx.Param:
    if place.form is None:
        axes, units = spec.axes, spec.units
    else:
        axes = tuple(_AXES.get(letter, "rows") for letter in place.form.stored)
        units = array.shape
    return param(array.shape, axes=axes, units=units, init=Constant(0.0), dtype=array.dtype)
