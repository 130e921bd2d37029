"""The live parameters of a trainer's module, as an engine reads them.

Names and shapes are checked once, when an engine is built. After that a `Binding` determines which variables the engine
reads at each launch: the trainer's own where their arrays are already placed as the engine needs them, so that nothing
is copied and no array is held; otherwise copies, which `refresh` updates.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding

from jaxpage.array_form import in_words, is_elsewhere
from jaxpage.engine_spec import EngineSpec
from jaxpage.models.lora import slot_axis
from jaxpage.rl.view import TrainerView
from jaxpage.weights.layouts import Found, find_layout
from jaxpage.weights.spec import FLOATS, ParamSpec, listed, specs, variables

Leaves = dict[str, Any]  # arrays, or variables that hold one, by dotted path


class Binding:
    """Binds one engine to one module. Not thread-safe: once the engine runs, only its thread may call it."""

    def __init__(self, module: nnx.Module):
        """Raises ValueError for a module without parameters."""
        self._module = module
        found = nnx.to_flat_state(nnx.state(module, nnx.Param))
        self._paths: dict[str, tuple[Any, ...]] = {
            ".".join(map(str, path)): path for path, _ in found
        }
        # The live variables: a trainer that replaces an array replaces it here.
        self._sources: dict[str, nnx.Variable] = dict(
            zip(self._paths, (variable for _, variable in found), strict=True)
        )
        if not self._sources:
            raise ValueError(f"{type(module).__name__} has no parameters to sample with")
        # The form in which the engine's programs take each of their arrays.
        values = {name: each.get_raw_value() for name, each in self._sources.items()}
        self._forms = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in values.items()}
        self._swapped: dict[str, nnx.Variable] = {}  # override `_sources`, see `swap`
        self._names: list[str] = []  # what the engine reads, in its order; "" for its own arrays
        self._places: list[Sharding] = []
        self._copies: dict[str, tuple[weakref.ref[Any], nnx.Variable]] = {}
        self.variables: list[nnx.Variable] = []  # the same as variables
        self._structure: tuple[Any, Any] | None = None  # of the engine's model
        self.trainer = ""  # whose layout it is: "NNX", "Tunix" or "MaxText"

    @property
    def dtype(self) -> str:
        """The most common dtype of the parameters."""
        names = [str(form.dtype) for form in self._forms.values()]
        return max(set(names), key=names.count)

    def prepare(self, spec: EngineSpec) -> EngineSpec:
        """`spec` with a model that reads this module's arrays. Raises ValueError, naming both sides, if none fits."""
        model = spec.model
        if spec.draft_model is not None:
            raise ValueError(
                "a sampler reads the parameters of one module, and speculative_config names a draft model too: take "
                'the method "ngram"'
            )
        if spec.config.numerics == "strict" and spec.num_devices > 1:
            raise ValueError(
                f'a sampler with numerics="strict" uses one device, not {spec.num_devices}: its trainer\'s logprobs '
                "are computed on one"
            )
        described = {
            path: each
            for path, each in specs(model).items()
            if slot_axis(variables(model)[path]) is None
        }
        arrays = self._forms
        found = find_layout(model.config, described, {n: x.shape for n, x in arrays.items()})
        _check(found, described, arrays, spec)
        self.trainer = found.trainer
        names = {path: place.array for path, place in found.places.items()}
        converts = any(arrays[names[path]].dtype != each.dtype for path, each in described.items())
        if found.trainer != "NNX" or converts:
            if spec.config.enable_lora:
                raise ValueError(
                    f"enable_lora is for modules of jaxpage in the engine's dtype, {spec.config.dtype}; this module "
                    f"has {found.trainer}'s layout in {self.dtype}"
                )
            view = TrainerView(model, found.places, arrays)
            spec = dataclasses.replace(spec, model=view)
            names = {f"stored.{index}": name for index, name in enumerate(view.names)}
        self._follow(spec, names)
        return spec

    def _follow(self, spec: EngineSpec, names: Mapping[str, str]) -> None:
        described = specs(spec.model)
        graphdef, state = nnx.split(spec.model)
        self._structure = graphdef, jax.tree.structure(state)
        for path, variable in nnx.to_flat_state(nnx.state(spec.model)):
            path = ".".join(map(str, path))
            place = described[path].sharding(spec.mesh)
            self._names.append(names.get(path, ""))
            self._places.append(place)
            if path not in names:  # the engine's own parameters: adapters
                empty = variable.get_raw_value()
                variable.set_raw_value(jnp.zeros(empty.shape, empty.dtype, device=place))
            self.variables.append(variable)

    def model_of(self, params: Any = None) -> Any:
        """The engine's model with the parameters of a tree that has the module's names; None: the current parameters.

        The tree's arrays, which may be tracers, are used directly. Raises ValueError if it lacks a parameter.
        """
        leaves = [variable.get_raw_value() for variable in self.variables]
        if params is not None:
            given = _flat(nnx.state(params) if isinstance(params, nnx.Module) else params)
            lacking = sorted({name for name in self._names if name} - set(given))
            if lacking:
                raise ValueError(f"params lack {listed(lacking)} of the bound module")
            leaves = [
                _array(given[name]) if name else leaf
                for name, leaf in zip(self._names, leaves, strict=True)
            ]
        assert self._structure is not None, "no engine was built"
        graphdef, treedef = self._structure
        return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))

    def refresh(self) -> int:
        """Check where all arrays are, and copy those that are not where the engine needs them. Returns bytes copied.

        One `jax.device_put` per array; the copy that it replaces is freed first. Host arrays are copied each time.
        Raises RuntimeError, before anything changes, for an array that was donated or deleted, or whose dtype or shape
        is not that for which the engine was built.
        """
        return self._read(self._swapped)

    def check_usable(self) -> None:
        """Raise RuntimeError if the engine cannot read an array where and as it is, or would read an old variable."""
        for name, variable in self._sources.items():
            if name not in self._swapped and self._variable_of(name) is not variable:
                raise RuntimeError(
                    f"the bound module has another nnx.Param as {name} than when the sampler last read it: call "
                    "update(), which reads it again, before sampling"
                )
        for name, place, variable in zip(self._names, self._places, self.variables, strict=True):
            leaf = variable.get_raw_value()
            if name and leaf is not None:  # None: `update` is copying it
                _check_form(name, leaf, self._forms[name])
                _check_place(name, leaf, place)

    def swap(self, params: Any) -> int:
        """Read these arrays instead of the module's, until the next swap; all of its parameters or some.

        `params`: a module, an `nnx.State`, or a tree of arrays with the module's names. Arrays that are the module's
        own are read from the module. Returns and raises like `refresh`; ValueError, before anything changes, for a name
        or shape that the module does not have.
        """
        given = _flat(nnx.state(params) if isinstance(params, nnx.Module) else params)
        leaves = {name: _array(leaf) for name, leaf in given.items() if _is_param(leaf)}
        unknown = sorted(set(leaves) - set(self._sources))
        if unknown or not leaves:
            what = listed(unknown) if unknown else "no arrays"
            raise ValueError(
                f"params have {what}; the module that this sampler is bound to has "
                f"{listed(sorted(self._sources))}"
            )
        for name, leaf in leaves.items():
            form = self._forms[name]
            if leaf.shape != form.shape or leaf.dtype != form.dtype:
                raise ValueError(
                    f"params have {name} as {in_words(leaf)}, the module has it as {in_words(form)}"
                )
        swapped = dict(self._swapped)
        for name, leaf in leaves.items():
            if leaf is self._variable_of(name).get_raw_value():
                swapped.pop(name, None)
            else:
                swapped[name] = nnx.Param(leaf)
        return self._read(swapped)

    def forget_swapped(self) -> int:
        """Read the module's arrays again. Returns and raises like `refresh`."""
        return self._read({})

    def _read(self, swapped: dict[str, nnx.Variable]) -> int:
        """`refresh`, with these arrays in place of the module's from now on."""
        own = {name: self._variable_of(name) for name in self._sources}
        sources = {name: swapped.get(name, variable) for name, variable in own.items()}
        for name, source in sources.items():
            _check_form(name, source.get_raw_value(), self._forms[name])
        # Nothing is refused from here on.
        read, num_bytes = list(self.variables), 0
        for index, (name, place) in enumerate(zip(self._names, self._places, strict=True)):
            if not name:
                continue
            leaf = sources[name].get_raw_value()
            if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(place, leaf.ndim):
                read[index] = sources[name]
                self._copies.pop(name, None)
                continue
            read[index], num_copied = self._copied(name, leaf, place)
            num_bytes += num_copied
            if name in swapped:  # the original array is no longer needed
                swapped[name] = read[index]
        self._sources, self._swapped, self.variables = own, swapped, read
        return num_bytes

    def _variable_of(self, name: str) -> nnx.Variable:
        """The module's variable of that name now, in place of which it may have got another one."""
        node: Any = self._module
        try:
            for key in self._paths[name]:
                is_attribute = isinstance(key, str) and not isinstance(node, Mapping)
                node = getattr(node, key) if is_attribute else node[key]
        except (AttributeError, LookupError):
            node = None
        if not isinstance(node, nnx.Param):
            raise RuntimeError(
                f"the bound module has no nnx.Param {name} any more, but {type(node).__name__}: put one there before "
                "sampling again"
            )
        return node

    def _copied(self, name: str, leaf: Any, place: Sharding) -> tuple[nnx.Variable, int]:
        """A copy in its place, and the bytes copied: 0 if it has been copied before."""
        seen = self._copies.pop(name, None)
        is_host = not isinstance(leaf, jax.Array)
        if seen is not None and seen[0]() is leaf and not is_host:
            self._copies[name] = seen
            return seen[1], 0
        copy = nnx.Param(None) if seen is None else seen[1]
        copy.set_raw_value(None)
        # A host array may be refilled in place, and `device_put` may share its memory.
        copy.set_raw_value(jax.device_put(np.array(leaf) if is_host else leaf, place))
        self._copies[name] = weakref.ref(leaf), copy
        return copy, leaf.nbytes


def _check(
    found: Found,
    described: Mapping[str, ParamSpec],
    arrays: Mapping[str, jax.ShapeDtypeStruct],
    spec: EngineSpec,
) -> None:
    """Raise ValueError unless every parameter has its array."""
    where = f"the module, in {found.trainer}'s layout,"
    for path, place in found.places.items():
        ours = described[path]
        wanted = f"{path} {list(ours.shape)} of {spec.config.model}/config.json"
        array = arrays.get(place.array)
        if array is None:
            raise ValueError(f"{where} lacks {place.array}, needed for {wanted}")
        shape = place.shape(spec.model.config, ours.shape, array.shape)
        if array.shape != shape:
            raise ValueError(
                f"{where} has {place.array} {list(array.shape)}, needed for {wanted}; its shape should be {list(shape)}"
            )
        if array.dtype not in FLOATS:
            raise ValueError(
                f"{where} has {place.array} in {array.dtype}; parameters must be in bfloat16, float16 or float32"
            )
    if found.others:
        raise ValueError(
            f"{where} has {listed(sorted(found.others))}, for which {spec.config.model}/config.json has no parameter"
        )


def _check_form(name: str, leaf: Any, form: jax.ShapeDtypeStruct) -> None:
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise RuntimeError(
            f"parameter {name} of the bound module was donated or deleted: put the new array into the module, or call "
            "update(params), before sampling again"
        )
    if leaf.shape != form.shape or leaf.dtype != form.dtype:
        raise RuntimeError(
            f"parameter {name} of the bound module is now {in_words(leaf)}, but programs were compiled for "
            f"{in_words(form)}: put such an array into the module, or call update(params) with one, before sampling "
            "again"
        )


def _check_place(name: str, leaf: Any, place: Sharding) -> None:
    if is_elsewhere(leaf, place):
        raise RuntimeError(
            f"parameter {name} of the bound module is now on {leaf.sharding}, but programs were compiled for {place}: "
            "call update(), which copies it there, before sampling again"
        )


def _flat(tree: Any) -> Leaves:
    """Arrays or variables by dotted path."""
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_variable)[0]
    return {_name(path): leaf for path, leaf in leaves}


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _name(path: tuple[Any, ...]) -> str:
    keys = [
        str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path
    ]
    if keys and keys[-1] in ("value", "raw_value"):
        keys.pop()
    return ".".join(keys)


def _is_param(leaf: Any) -> bool:
    """False for state other than parameters, such as that of random number generators."""
    return isinstance(leaf, nnx.Param) or not isinstance(leaf, nnx.Variable)


def _array(leaf: Any) -> Any:
    value = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
    return value if isinstance(value, jax.Array) else np.asarray(value)
