"""Parameters to disk: as safetensors with Hugging Face's names, or as an Orbax checkpoint of the NNX state.

Either is a folder that `LLM` loads, with config.json and the tokenizer beside the weights, and appears whole or not at
all. Knows the names of a family's tensors; must not know how arrays were made.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import CausalLM
from jaxpage.models.registry import weight_map
from jaxpage.weights.orbax import write_tree
from jaxpage.weights.safetensors import INDEX, SINGLE
from jaxpage.weights.spec import variables

FORMATS = ("safetensors", "orbax")
_FILE_BYTES = 5 * 10**9  # of a safetensors file, as transformers has it
# What belongs to a model besides its weights.
_OTHER_FILES = ("*.json", "*.txt", "*.model", "*.jinja")

Arrays = Mapping[str, Any]  # by parameter path, of jax or NumPy
Tensor = list[Any]  # arrays, one after the other along the first axis
Value = TypeVar("Value")


def save(model: CausalLM, folder: str | Path, *, files: str | Path, format: str) -> Path:
    """Write a model's parameters, in their dtypes, to a folder that does not exist. Returns it.

    files: a folder with the config.json, and the tokenizer's files, that belong to them. format: "safetensors" or
    "orbax". Raises ValueError if `folder` exists, if the model has no values yet, or if its projections are joined or
    rounded, as those of an engine are.
    """
    arrays = {path: variable.get_value() for path, variable in variables(model).items()}
    for path, array in arrays.items():
        if isinstance(array, jax.ShapeDtypeStruct):
            raise ValueError(f"{path} {list(array.shape)} has no value; load the model first")
        if path.endswith((".qkv_proj.weight", ".gate_up_proj.weight", ".scale")):
            raise ValueError(
                f"{path} {list(array.shape)} is what an engine made of other parameters; save a model of "
                "your own, from jaxpage.weights.load.load"
            )
    return write(arrays, model.config, folder, files=files, format=format)


def write(
    arrays: Arrays, config: ModelConfig, folder: str | Path, *, files: str | Path, format: str
) -> Path:
    """The same of parameters by path."""
    writers: dict[str, Callable[[Path], None]] = {
        "safetensors": lambda draft: _write_safetensors(draft, arrays, config),
        "orbax": lambda draft: write_tree(draft, nested(arrays)),
    }
    if format not in writers:
        raise ValueError(f"format must be one of {', '.join(writers)}, got {format!r}")
    folder = Path(folder).absolute()
    if folder.exists():
        raise ValueError(f"{folder} exists already; name another folder or remove it")
    if not (Path(files) / "config.json").is_file():
        raise ValueError(f"{files} has no config.json, which belongs to the weights")
    folder.parent.mkdir(parents=True, exist_ok=True)
    around = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        draft = around / folder.name
        writers[format](draft)
        _copy_files(Path(files), draft)
        os.rename(draft, folder)
    finally:
        shutil.rmtree(around, ignore_errors=True)
    return folder


def nested(flat: Mapping[str, Value]) -> dict[str, Any]:
    """What stands under dotted paths as a tree of dicts, such as the pure dict of an NNX state."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, last = path.split(".")
        inner = tree
        for name in folders:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return tree


def _copy_files(source: Path, target: Path) -> None:
    for pattern in _OTHER_FILES:
        for file in source.glob(pattern):
            if file.name not in (INDEX, "commit_success.txt"):  # the latter is Orbax's
                shutil.copyfile(file, target / file.name)


def _write_safetensors(folder: Path, arrays: Arrays, config: ModelConfig) -> None:
    """In files of 5 GB, each of which is in memory while it is written."""
    folder.mkdir()
    files = list(_files(_tensors(arrays, config)))
    if len(files) == 1:
        _write_file(folder / SINGLE, files[0])
        return
    placement = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        _write_file(folder / name, tensors)
        placement |= dict.fromkeys(tensors, name)
    total = sum(array.nbytes for array in arrays.values())
    index = {"metadata": {"total_size": total}, "weight_map": placement}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _tensors(arrays: Arrays, config: ModelConfig) -> dict[str, Tensor]:
    """Hugging Face's tensors: each is a parameter, or several that the family stores as one."""
    places = weight_map(config)
    rows: dict[str, list[tuple[int, Any]]] = {}
    for path, array in arrays.items():
        place = places.get(path)
        name, start = (path, 0) if place is None else (place.tensor, place.start)
        rows.setdefault(name, []).append((start, array))
    return {name: [x for _, x in sorted(parts, key=lambda p: p[0])] for name, parts in rows.items()}


def _files(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    file: dict[str, Tensor] = {}
    size = 0
    for name, parts in tensors.items():
        num_bytes = sum(part.nbytes for part in parts)
        if file and size + num_bytes > _FILE_BYTES:
            yield file
            file, size = {}, 0
        file[name] = parts
        size += num_bytes
    yield file


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    # The library writes an array's memory in its order, whatever the strides say.
    values = {
        name: np.ascontiguousarray(np.concatenate([np.asarray(part) for part in parts]))
        for name, parts in tensors.items()
    }
    save_file(values, path, metadata={"format": "pt"})
    path.chmod(0o644)
