"""An Orbax checkpoint into a model: each device gets its own shards, a part of the checkpoint at a time.

Everything that can be wrong with names and shapes is found in descriptions, before the first array is read; the model
changes when all arrays are there. Knows parameter specs, layouts and stored arrays; must not know files.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding
from tqdm import tqdm

from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import CausalLM
from jaxpage.parallel.sharding import sharding
from jaxpage.weights.layouts import Place, Shape, find_layout, take
from jaxpage.weights.orbax import Checkpoint, Restored, StoredArray, open_tree
from jaxpage.weights.spec import FLOATS, ParamSpec, listed, specs, variables

Model = TypeVar("Model", bound=CausalLM)

# Bytes of arrays that are read together: this much, or a part of all. Reading and what it becomes are held at once.
_LEAST_READ, _PARTS = 64 * 2**20, 16
_AXES = {"E": "embed", "F": "mlp", "V": "vocab", "H": "heads", "K": "kv_heads", "D": "head_dim"}


@dataclass(frozen=True)
class Wanted:
    """A parameter as it shall be: on devices, or in NumPy if there is no sharding."""

    shape: Shape
    dtype: np.dtype
    sharding: Sharding | None


def restore(model: Model, tree: Any, *, mesh: Mesh | None = None, use_tqdm: bool = True) -> Model:
    """`model`, abstract or filled, with the weights of the Orbax tree in a folder; see `weights.load.load`."""
    checkpoint = open_tree(tree)
    described = specs(model)
    places = find_places(model.config, described, checkpoint)
    wanted = {
        path: Wanted(spec.shape, np.dtype(spec.dtype), spec.sharding(mesh))
        for path, spec in described.items()
    }
    arrays = dict(read_parameters(checkpoint, places, wanted, mesh=mesh, use_tqdm=use_tqdm))
    targets = variables(model)
    for path, array in arrays.items():
        targets[path].set_value(array)
    return model


def find_places(
    config: ModelConfig, described: Mapping[str, ParamSpec], checkpoint: Checkpoint
) -> dict[str, Place]:
    """Where every parameter stands. Raises ValueError for what is missing, left over, misshaped or quantised."""
    stored = checkpoint.arrays
    shapes = {name: array.shape for name, array in stored.items()}
    found = find_layout(config, described, shapes)
    missing = sorted({p.array for p in found.places.values()} - set(stored))
    problems = []
    if missing:
        problems.append(f"it lacks {listed(missing)}")
    if found.others:
        others = [f"{name} {list(shapes[name])}" for name in sorted(found.others)]
        problems.append(f"it has {listed(others)}, which the model does not know")
    if problems:
        raise ValueError(
            f"the checkpoint in {found.trainer}'s layout does not fit the model: {'; '.join(problems)}. Check that "
            "config.json belongs to the weights"
        )
    for path, place in found.places.items():
        array = stored[place.array]
        if array.dtype not in FLOATS:
            raise ValueError(
                f"{array.name} is stored as {array.dtype}: quantised checkpoints are not supported; "
                "use one in bfloat16, float16 or float32"
            )
        shape = place.shape(config, described[path].shape, array.shape)
        if array.shape != shape:
            raise ValueError(
                f"{array.name} has shape {list(array.shape)} in the checkpoint; {path} of the model, "
                f"{list(described[path].shape)}, wants {list(shape)} there: check that config.json belongs "
                "to the weights"
            )
    return found.places


def read_parameters(
    checkpoint: Checkpoint,
    places: Mapping[str, Place],
    wanted: Mapping[str, Wanted],
    *,
    mesh: Mesh | None = None,
    use_tqdm: bool = False,
) -> Iterator[tuple[str, Any]]:
    """Parameters by path, those of large arrays first: what is held besides them is least at the end."""
    paths: dict[str, list[str]] = {}
    for path, place in places.items():
        paths.setdefault(place.array, []).append(path)
    arrays = [checkpoint.arrays[name] for name in paths]
    total = sum(array.num_bytes for array in arrays)
    with loading_bar(total, use_tqdm) as progress:
        for batch in _batches(arrays, max(_LEAST_READ, total // _PARTS)):
            first = {array.name: paths[array.name][0] for array in batch}
            how = {
                array.name: _restored(array, places[path], wanted[path], mesh)
                for array, path in zip(batch, first.values(), strict=True)
            }
            read = checkpoint.read(how)
            for array in batch:
                stored = read.pop(array.name)
                for path in paths[array.name]:
                    # Wait: what is computed later would keep what it is computed from.
                    yield path, jax.block_until_ready(_take(places[path], stored, wanted[path]))
                del stored
                progress.update(array.num_bytes)
            _return_freed_memory()


def loading_bar(total: int, use_tqdm: bool) -> tqdm:
    """A bar of bytes, on the first of several hosts."""
    disable = not use_tqdm or jax.process_index() != 0
    return tqdm(total=total, unit="B", unit_scale=True, desc="Loading weights", disable=disable)


def _return_freed_memory() -> None:
    """To the system: glibc keeps freed pieces of 32 MiB and less, a third of the weights by the end."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # where malloc is another one
        ctypes.CDLL(None).malloc_trim(0)


def _batches(arrays: list[StoredArray], most: int) -> Iterator[list[StoredArray]]:
    """Arrays of `most` bytes together, or a single one that has more; large ones first."""
    batch: list[StoredArray] = []
    for array in sorted(arrays, key=lambda array: (-array.num_bytes, array.name)):
        if batch and sum(a.num_bytes for a in batch) + array.num_bytes > most:
            yield batch
            batch = []
        batch.append(array)
    if batch:
        yield batch


def _restored(array: StoredArray, place: Place, wanted: Wanted, mesh: Mesh | None) -> Restored:
    """How an array is read: as the parameter if it is one, else cut along the same axes as the parameter."""
    if wanted.sharding is None:
        return Restored(None, array.dtype)
    if place.form is None:
        return Restored(wanted.sharding, wanted.dtype)
    if mesh is None:
        return Restored(wanted.sharding, array.dtype)
    axes = tuple(_AXES.get(axis, "layers") for axis in place.form.stored)
    return Restored(sharding(mesh, axes, array.shape), array.dtype)


def _take(place: Place, stored: Any, wanted: Wanted) -> Any:
    if wanted.sharding is None:
        return np.ascontiguousarray(take(place, stored, wanted.shape, wanted.dtype))
    if place.form is None:
        return stored
    compiled = _compiled(replace(place, array="", layer=0), wanted)
    return compiled(stored, jnp.int32(place.layer))


@functools.lru_cache(maxsize=256)
def _compiled(place: Place, wanted: Wanted) -> jax.stages.Wrapped:
    """Layers repeat their shapes, so a model needs about ten of these."""
    return jax.jit(
        lambda stored, layer: take(place, stored, wanted.shape, wanted.dtype, layer),
        out_shardings=wanted.sharding,
    )
