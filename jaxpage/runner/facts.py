"""What compiled programs depend on besides the model and its options: versions, the device, the code itself.

Knows where this is written. Must not know models or programs.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import jax

from jaxpage.runner.programs import num_cores

_COMPILERS = {"cpu": "jaxlib", "gpu": "jax-cuda13-plugin", "tpu": "libtpu"}
_JAX_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
    "jax_default_prng_impl",
    "jax_debug_nans",
)


def machine_facts(device: jax.Device, flags: str) -> dict[str, str]:
    """By name, each as text. `device` may be one of a topology that is not here, `flags` are the compiler's."""
    compiler = _COMPILERS[device.platform]
    facts = {
        "code": code_hash(),
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "flax": metadata.version("flax"),
        "compiler": f"{compiler} {version_of(compiler)}",
        "device": f"{device.platform} {device.device_kind}",
        "flags": flags,
        "jax options": ", ".join(f"{name}={getattr(jax.config, name)}" for name in _JAX_OPTIONS),
    }
    if device.platform == "cpu":  # XLA:CPU writes for this processor, and a part for each core
        facts |= {"cores": str(num_cores()), "processor": _processor()}
    return facts


def version_of(package: str) -> str:
    """Of an installed package; "none" if it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


@cache
def code_hash() -> str:
    """Of jaxpage and its kernels, see `hash_of`."""
    folders = []
    for name in ("jaxpage", "pallas_kernels"):
        spec = find_spec(name)
        assert spec is not None and spec.submodule_search_locations
        folders.append(Path(next(iter(spec.submodule_search_locations))))
    return hash_of(folders)


def hash_of(folders: Iterable[Path]) -> str:
    """Of source and of sizes measured for kernels: whatever of it changed may have changed a program. 16 hex digits."""
    state = hashlib.sha256()
    for folder in folders:
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("tuned/*.json")]):
            state.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return state.hexdigest()[:16]


@cache
def _processor() -> str:
    """Its name, and a hash of the instructions it knows (Linux on x86 and Arm say them)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    words = sorted(
        {
            w
            for line in lines
            if line.lower().startswith(("flags", "features"))
            for w in line.split()
        }
    )
    name = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""
    )
    known = hashlib.sha256(" ".join(words).encode()).hexdigest()[:8]
    return f"{name or platform.processor() or platform.machine()} {known}"
