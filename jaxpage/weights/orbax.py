"""Orbax checkpoints: how to recognize them, which arrays they have, and how to read some of these.

Knows Orbax and etils, which are imported when a checkpoint is in this format. Arrays are data: nothing is ever
unpickled. Must not know models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxpage.hub import bucket_path, is_url
from jaxpage.weights.safetensors import INDEX, SINGLE

_TREE = "_METADATA"  # in every Orbax folder with a tree of arrays
_STEP = "_CHECKPOINT_METADATA"  # in the folder of a step, which may have trees of several kinds
# Trainers' names of the model's tree, Tunix's first; MaxText's "items" also includes the optimizer.
_TREES = ("model_params", "params", "model", "items", "state", "default", "pytree")
_VALUE = ("value", "raw_value")  # some versions of Flax append these to the path of a variable


@dataclass(frozen=True)
class StoredArray:
    """An array of a checkpoint. `path` is its path in the tree."""

    name: str
    path: tuple[Any, ...]
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Restored:
    """How to restore an array: on devices, or in NumPy if there is no sharding."""

    sharding: Sharding | None
    dtype: np.dtype


@dataclass(frozen=True)
class Checkpoint:
    """A tree of arrays in Orbax's files. `folder` is a path of pathlib or of etils."""

    folder: Any
    tree: Any  # Orbax's description of every leaf
    arrays: dict[str, StoredArray]  # by dotted path

    def read(self, wanted: Mapping[str, Restored]) -> dict[str, Any]:
        """Some of the arrays, each complete over all devices. Raises ValueError for damaged files."""
        try:
            return self._restore(wanted)
        except Exception as error:  # of many types, from the code that reads and decodes the file
            for name, how in wanted.items():
                self._read_alone(name, how)
            raise ValueError(f"{self.folder} cannot be read: {_first_line(error)}") from error

    def _read_alone(self, name: str, how: Restored) -> None:
        """Finds out which array is damaged."""
        try:
            self._restore({name: how})
        except Exception as error:
            raise ValueError(
                f"{name} of shape {list(self.arrays[name].shape)} cannot be read from {self.folder}; the "
                f"checkpoint is damaged or incomplete: {_first_line(error)}"
            ) from error

    def _restore(self, wanted: Mapping[str, Restored]) -> dict[str, Any]:
        import orbax.checkpoint as ocp

        paths = {self.arrays[name].path: name for name in wanted}

        def arguments(path: tuple[Any, ...], _: Any) -> Any:
            how = wanted.get(paths.get(path, ""))
            if how is None:
                return ocp.RestoreArgs()
            if how.sharding is None:
                return ocp.RestoreArgs(restore_type=np.ndarray, dtype=how.dtype)
            return ocp.ArrayRestoreArgs(sharding=how.sharding, dtype=how.dtype)

        map_tree = jax.tree_util.tree_map_with_path
        restore = ocp.args.PyTreeRestore(
            item=map_tree(lambda path, leaf: leaf if path in paths else ..., self.tree),
            restore_args=map_tree(arguments, self.tree),
        )
        with ocp.PyTreeCheckpointer() as checkpointer:
            restored = checkpointer.restore(self.folder, args=restore)
        leaves = jax.tree_util.tree_flatten_with_path(restored)[0]
        return {paths[path]: leaf for path, leaf in leaves if path in paths}


def find_tree(folder: str | Path) -> Any | None:
    """The folder of the model's tree in `folder`; None if that is not an Orbax checkpoint, or has safetensors.

    `folder` is a tree, or a step with a tree of the model. Raises ValueError for Orbax folders without one, or in which
    it is ambiguous.
    """
    path: Any = Path(folder).absolute()  # Orbax requires this
    if is_url(str(folder)):
        path = bucket_path(str(folder))
    if any((path / name).exists() for name in (SINGLE, INDEX)):
        return None
    if (path / _TREE).exists():
        return path
    if not path.is_dir():
        return None
    children = sorted((child for child in path.iterdir() if child.is_dir()), key=lambda c: c.name)
    trees = [child for child in children if (child / _TREE).exists()]
    for name in _TREES:
        if path / name in trees:
            return path / name
    if len(trees) == 1:
        return trees[0]
    if trees:
        names = ", ".join(tree.name for tree in trees)
        raise ValueError(
            f"{folder} has several trees of arrays: {names}; name one of these folders"
        )
    steps = [child.name for child in children if (child / _STEP).exists()]
    if steps:
        raise ValueError(
            f"{folder} has the steps {', '.join(steps)} of an Orbax checkpoint; name one of them, "
            f"such as {path / steps[-1]}"
        )
    if (path / _STEP).exists() or (path / "manifest.ocdbt").exists():
        raise ValueError(
            f"{folder} is an Orbax checkpoint without {_TREE}: it is incomplete, or was not finished"
        )
    return None


def open_tree(folder: Any) -> Checkpoint:
    """The arrays of a folder from `find_tree`; only metadata is read. Raises ValueError."""
    import orbax.checkpoint as ocp
    from etils import epath

    folder = epath.Path(folder)
    handler = ocp.PyTreeCheckpointHandler()
    try:
        tree = handler.metadata(folder).tree
    except Exception as error:  # of many types
        raise ValueError(
            f"the description of the arrays in {folder} cannot be read; the checkpoint is damaged or "
            f"incomplete: {_first_line(error)}"
        ) from error
    finally:
        handler.close()
    arrays = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if getattr(leaf, "shape", None) is not None and getattr(leaf, "dtype", None) is not None:
            name = _name(path)
            arrays[name] = StoredArray(name, path, np.dtype(leaf.dtype), tuple(leaf.shape))
    return Checkpoint(folder, tree, arrays)


def write_tree(folder: Path, tree: Any) -> None:
    """Write a tree of jax or NumPy arrays to a folder that does not exist; completely or not at all."""
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree))


def _name(path: Iterable[Any]) -> str:
    """The dotted path of a leaf, without the parts that Flax may append."""
    keys = [
        str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path
    ]
    if keys[-1] in _VALUE:
        keys.pop()
    return ".".join(keys)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]
