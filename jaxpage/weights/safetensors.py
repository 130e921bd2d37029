"""Reads safetensors files slice by slice: a single file, or a sharded checkpoint with an index.

The header is read here instead of by the `safetensors` package, whose NumPy reader has bfloat16 only in recent
versions, and whose error for a truncated file is of little help. Format: 8 bytes little-endian header length, a JSON
header `{name: {dtype, shape, data_offsets}}`, the data. Nothing is ever unpickled. Must not know models or devices.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk; only `read` touches the data."""

    name: str
    file: Path
    dtype_name: str  # as in the header
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    @property
    def is_supported(self) -> bool:
        return self.dtype_name in _DTYPES

    @property
    def dtype(self) -> np.dtype:
        """Raises ValueError if it is not supported: a tensor that nobody reads may have any."""
        if not self.is_supported:
            raise ValueError(
                f"{self.name} in {self.file} has dtype {self.dtype_name}, which is not supported; use a checkpoint "
                f"with others: {', '.join(_DTYPES)}"
            )
        return _DTYPES[self.dtype_name]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A copy of `tensor[index]`; no other part of the tensor is kept in memory."""
        if not self.num_bytes:
            return np.zeros(self.shape, self.dtype)[index]
        mapped = np.memmap(self.file, self.dtype, mode="r", offset=self.offset, shape=self.shape)
        return np.array(mapped[index])  # a copy: a mapped array is invalid without the file


def open_checkpoint(folder: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint, by name; only headers are read.

    Like transformers, takes `model.safetensors`, else the files in `model.safetensors.index.json`. Raises ValueError if
    there is no such checkpoint, a file is missing or damaged, or the index and the files disagree.
    """
    folder = Path(folder)
    if (folder / SINGLE).is_file():
        return read_header(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise ValueError(_nothing_to_load(folder))
    placement = _read_index(folder / INDEX)
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(placement.values())):
        if Path(name).name != name:
            raise ValueError(f"{INDEX} names {name!r}, which is not a file in {folder}")
        if not (folder / name).is_file():
            raise ValueError(f"{INDEX} lists {name}, which is not in {folder}; download it again")
        tensors |= read_header(folder / name)
    absent = sorted(
        t for t, file in placement.items() if t not in tensors or tensors[t].file.name != file
    )
    if absent:
        raise ValueError(
            f"{INDEX} says that {placement[absent[0]]} holds {absent[0]}, but it does not "
            f"({len(absent)} such tensors); the checkpoint is inconsistent, download it again"
        )
    return tensors


def _read_index(file: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    try:
        placement = json.loads(file.read_text())["weight_map"]
        if not all(isinstance(name, str) for name in placement.values()):
            raise TypeError("file names must be strings")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is not a safetensors index: {error!r}") from None
    return placement


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises ValueError if the header or the size of the file is wrong."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_len = int.from_bytes(prefix, "little")
        start = 8 + header_len
        if len(prefix) < 8 or start > size:
            raise ValueError(
                f"{file} has {size} bytes, too few for its header; it is truncated or not a "
                "safetensors file"
            )
        raw = stream.read(header_len)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = {name: _entry(name, entry, file, start) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} has a damaged safetensors header: {error}") from None
    for name, entry in header.items():
        end = start + entry["data_offsets"][1]
        if end > size:
            raise ValueError(
                f"{file} is truncated: {name} ends at byte {end}, the file has {size}; download it again"
            )
    return tensors


def _entry(name: str, entry: dict, file: Path, start: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    if not all(type(number) is int for number in (begin, end, *entry["shape"])):
        raise ValueError(f"shape and offsets of {name} are not integers")
    if not isinstance(entry["dtype"], str):
        raise ValueError(f"the dtype of {name} is no string")
    tensor = StoredTensor(name, file, entry["dtype"], tuple(entry["shape"]), start + begin)
    if begin < 0 or end < begin or min(tensor.shape, default=0) < 0:
        raise ValueError(f"{name} has shape {tensor.shape} and offsets {begin} to {end}")
    # How many bits the values of other dtypes have is not known.
    if tensor.is_supported and end - begin != tensor.num_bytes:
        raise ValueError(
            f"{name} of shape {tensor.shape} and dtype {entry['dtype']} needs "
            f"{tensor.num_bytes} bytes, its offsets are {begin} to {end}"
        )
    return tensor


def _nothing_to_load(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder}"
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        names = ", ".join(pickles[:3])
        return (
            f"{folder} has no safetensors, only {names}: pickle files can run code and are never "
            "loaded; convert them with transformers: model.save_pretrained(folder)"
        )
    return f"{folder} has neither {SINGLE} nor {INDEX}, and is no Orbax checkpoint"
