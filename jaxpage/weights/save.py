"""Writes parameters to disk: as safetensors with Hugging Face's names, or as an Orbax checkpoint of the NNX state.

Both are folders that `LLM` loads, with config.json and the tokenizer beside the weights, and are written completely or
not at all. Knows the names of a family's tensors; must not know where arrays come from.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import CausalLM
from jaxpage.models.registry import weight_map
from jaxpage.models.sources import Rearranged, Source, Stacked
from jaxpage.weights.orbax import write_tree
from jaxpage.weights.safetensors import INDEX, SINGLE
from jaxpage.weights.spec import variables

FORMATS = ("safetensors", "orbax")
_FILE_BYTES = 5 * 10**9  # per safetensors file, as in transformers
# Files of a model besides its weights.
_OTHER_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "additional_chat_templates/*.jinja")

Arrays = Mapping[str, Any]  # by parameter path, of jax or NumPy
Tensor = list["Part"]  # concatenated along the first axis
Value = TypeVar("Value")


def save(model: CausalLM, folder: str | Path, *, files: str | Path, format: str) -> Path:
    """Write a model's parameters, in their dtypes, to a folder that does not exist. Returns the folder.

    files: a folder with the matching config.json and tokenizer files. format: "safetensors" or "orbax". Raises
    ValueError if `folder` exists, if its disk has too little space, if the model has no values yet, or if its
    projections are joined or quantized, as in an engine; OSError if a file cannot be written.
    """
    arrays = {path: variable.get_value() for path, variable in variables(model).items()}
    for path, array in arrays.items():
        if isinstance(array, jax.ShapeDtypeStruct):
            raise ValueError(f"{path} {list(array.shape)} has no value; load the model first")
        if path.endswith(
            (
                ".qkv_proj.weight",
                ".gate_up_proj.weight",
                ".in_proj_qkvz.weight",
                ".in_proj.weight",
                ".scale",
                "_proj_scale",
            )
        ):
            raise ValueError(
                f"{path} {list(array.shape)} is what an engine made of other parameters; save a model of "
                "your own, from jaxpage.weights.load.load"
            )
    return write(arrays, model.config, folder, files=files, format=format)


def write(
    arrays: Arrays, config: ModelConfig, folder: str | Path, *, files: str | Path, format: str
) -> Path:
    """The same for parameters by path."""
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
    _check_space(folder, sum(array.nbytes for array in arrays.values()))
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


def _check_space(folder: Path, num_bytes: int) -> None:
    """Raise ValueError if there is no room for so many bytes in a new folder. Orbax would print tracebacks of its
    threads.
    """
    there = next(parent for parent in folder.parents if parent.exists())
    disk = shutil.disk_usage(there)
    if disk.total and num_bytes > disk.free:  # some file systems say 0 of everything
        raise ValueError(
            f"the weights take {num_bytes / 1e9:.3g} GB, but the disk of {there} has {disk.free / 1e9:.3g} GB free; "
            "free some, or name a folder on another disk"
        )


def nested(flat: Mapping[str, Value]) -> dict[str, Any]:
    """A tree of dicts from values by dotted path, such as the pure dict of an NNX state."""
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
                _copy(file, source, target)
    for module in _modules(source):
        for name in ("config.json", SINGLE):
            if (module / name).is_file():
                _copy(module / name, source, target)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    parts = [config, config.get("text_config") or {}]
    found = [part.pop("quantization_config", None) for part in parts]
    if any(found):  # the values are dequantized
        text = json.dumps(config, indent=2) + "\n"
        (target / "config.json").write_text(text, encoding="utf-8")


def _copy(file: Path, source: Path, target: Path) -> None:
    copy = target / file.relative_to(source)
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, copy)


def _modules(folder: Path) -> list[Path]:
    """The subfolders that the modules.json of sentence-transformers names, such as 1_Pooling; none without one."""
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        paths = [folder / str(module["path"]) for module in modules if module.get("path")]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder}/modules.json cannot be read: {error!r}") from None
    # What is elsewhere is not part of the checkpoint.
    return [path for path in paths if ".." not in path.parts and folder in path.parents]


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
    """Hugging Face's tensors: each is one parameter, several that the family stores as one, or a part of one."""
    places = weight_map(config)
    tensors: dict[str, Tensor] = {}
    rows: dict[str, list[tuple[Source, Any]]] = {}
    for path, array in arrays.items():
        place = places.get(path, Source(path))
        if isinstance(place, Stacked) and place.turns:
            # transformers, and so `weights.stored`, turns what has another shape than the parameter.
            turns = array.shape[1] != array.shape[2]
            place = Rearranged(path, alternates=False, turns=turns)
            tensors[path] = [Part(array, rearranged=place)]
        elif isinstance(place, Stacked) and place.whole is not None:
            tensors[place.whole] = [Part(array)]
        elif isinstance(place, Stacked):
            tensors |= _parts_of_experts(array, place)
        elif isinstance(place, Rearranged):
            tensors[place.tensor] = [Part(array, rearranged=place)]
        else:
            tensors[place.tensor] = []  # a placeholder, to keep it beside its layer's tensors
            rows.setdefault(place.tensor, []).append((place, array))
    for name, parts in rows.items():
        parts.sort(key=lambda part: part[0].start)
        tensors[name] = [
            Part(array, _rows_of(array, group, place.groups), place.turns)
            for group in range(parts[0][0].groups)
            for place, array in parts
        ]
    return tensors


def _rows_of(array: Any, group: int, groups: int) -> tuple[slice]:
    """The index of the rows of one of `groups` equal groups."""
    size = array.shape[0] // groups
    return (slice(group * size, (group + 1) * size),)


def _parts_of_experts(array: Any, place: Stacked) -> dict[str, Tensor]:
    """Each tensor has some rows of one expert."""
    tensors: dict[str, Tensor] = {}
    for expert, names in enumerate(place.parts):
        size = array.shape[1] // len(names)
        for i, name in enumerate(names):
            tensors[name] = [Part(array, (expert, slice(i * size, (i + 1) * size)))]
    return tensors


@dataclass(frozen=True, eq=False)
class Part:
    """`array[index]`, or the whole array, stored as `rearranged` says. turns: the tensor that it is a part of is
    stored [I, O].
    """

    array: Any
    index: tuple[int | slice, ...] = ()
    turns: bool = False
    rearranged: Rearranged | None = None

    @property
    def num_bytes(self) -> int:
        return np.broadcast_to(np.empty((), self.array.dtype), self.array.shape)[self.index].nbytes

    def read(self, host: dict[int, np.ndarray]) -> np.ndarray:
        """In host memory. `host` caches the last array: the experts of one are written one after the other."""
        if id(self.array) not in host:
            host.clear()
            host[id(self.array)] = np.asarray(self.array)
        whole = host[id(self.array)]
        return whole[self.index] if self.rearranged is None else _as_stored(whole, self.rearranged)


def _as_stored(array: np.ndarray, place: Rearranged) -> np.ndarray:
    """[X, O, ...] in the stored order of a `models.sources.Rearranged`."""
    if place.alternates:
        gate, up = np.split(array, 2, axis=1)
        array = np.stack([gate, up], axis=2).reshape(array.shape)
    return array.swapaxes(1, 2) if place.turns else array


def _files(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    file: dict[str, Tensor] = {}
    size = 0
    for name, parts in tensors.items():
        num_bytes = sum(part.num_bytes for part in parts)
        if file and size + num_bytes > _FILE_BYTES:
            yield file
            file, size = {}, 0
        file[name] = parts
        size += num_bytes
    yield file


def _joined(parts: Tensor, host: dict[int, np.ndarray]) -> np.ndarray:
    whole = np.concatenate([part.read(host) for part in parts])
    return whole.T if parts[0].turns else whole


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    host: dict[int, np.ndarray] = {}
    # The library ignores strides and writes memory in its order.
    values = {name: np.ascontiguousarray(_joined(parts, host)) for name, parts in tensors.items()}
    try:
        save_file(values, path, metadata={"format": "pt"})
    except SafetensorError as error:  # whatever the system said, such as that the disk is full
        raise OSError(f"{path.name} cannot be written: {error}") from None
    path.chmod(0o644)
