"""The tile sizes of a kernel for a kind of device, in files.

An operation has the sizes of a kernel in a frozen dataclass of positive integers, `TileSizes`, with defaults for
devices without measurements, and a folder `tuned/` with a file for each kind of device measured: `nvidia_h200.json`,
`tpu_v6_lite.json`. How a kernel divides its sums is never a size: a row's result must not depend on the other rows, or
on the device within a platform. (`matmul` also has there from how many tokens on engines use XLA instead.)
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Protocol, TypeVar

import jax


class Sizes(Protocol):
    """A frozen dataclass: an operation's `TileSizes`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


S = TypeVar("S", bound=Sizes)


def kernel_of(operation: str, platform: str) -> ModuleType:
    """The module of an operation's kernel for "gpu" or "tpu"."""
    return importlib.import_module(f"pallas_kernels.{operation}.{platform}")


def folder_of(operation: str) -> Path:
    return Path(__file__).parent / operation / "tuned"


def tuned_sizes(operation: str, platform: str, device_kind: str, folder: Path | None = None) -> Any:
    """`TileSizes` of an operation's kernel for "gpu" or "tpu"; `folder`: instead of the operation's own.

    Raises ValueError for an invalid file.
    """
    kind = kernel_of(operation, platform).TileSizes
    return read(kind, device_kind, folder_of(operation) if folder is None else folder)


def path_of(device_kind: str, folder: Path) -> Path:
    """device_kind as in jax: "NVIDIA H200", "TPU v6 lite"."""
    return folder / f"{'_'.join(device_kind.lower().split())}.json"


def read(kind: type[S], device_kind: str, folder: Path) -> S:
    """The sizes measured for a kind of device; without a measurement the defaults of `kind`, a class of sizes.

    Raises ValueError unless the file has exactly the fields of `kind`, with positive integers.
    """
    path = path_of(device_kind, folder)
    if not path.exists():
        return kind()
    sizes = json.loads(path.read_text(encoding="utf-8"))["sizes"]
    names = [field.name for field in dataclasses.fields(kind)]
    if set(sizes) != set(names) or not all(type(x) is int and x > 0 for x in sizes.values()):
        raise ValueError(
            f"{path}: sizes are {sizes}; wanted are positive numbers for {names}. Measure again, or remove the file"
        )
    return kind(**sizes)


def write(
    device_kind: str,
    sizes: Sizes,
    seconds: Mapping[str, float],
    folder: Path,
    source: str = "measured",
) -> Path:
    """Write sizes for `read`, with their origin. seconds: of each candidate, from `fastest`."""
    path = path_of(device_kind, folder)
    path.parent.mkdir(exist_ok=True)
    content = {
        "device_kind": device_kind,
        "jax": jax.__version__,
        "source": source,
        "date": datetime.date.today().isoformat(),
        "sizes": dataclasses.asdict(sizes),
        "seconds": dict(seconds),
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path
