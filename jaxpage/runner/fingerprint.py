"""What compiled programs depend on besides the model and its options: versions, the device, the code itself.

Two machines with equal fingerprints can run each other's executables. Knows where to find each part. Must not know
models or programs.
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
    # Options that jax passes to the compiler:
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_memory_fitting_level",
    "jax_compiler_enable_remat_pass",
)


def machine_fingerprint(device: jax.Device, flags: str) -> dict[str, str]:
    """Name -> text of each part. `device` may belong to a compile-only topology; `flags` are those of the compiler."""
    compiler = _COMPILERS[device.platform]
    parts = {
        "code": code_hash(),
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "flax": metadata.version("flax"),
        "compiler": f"{compiler} {version_of(compiler)}",
        "device": f"{device.platform} {device.device_kind}",
        "flags": flags,
        "jax options": ", ".join(f"{name}={jax.config.values[name]}" for name in _JAX_OPTIONS),
    }
    if (
        device.platform == "cpu"
    ):  # XLA:CPU compiles for this processor, and splits loops by its cores
        parts |= {"cores": str(num_cores()), "processor": _processor()}
    return parts


def version_of(package: str) -> str:
    """The version of an installed package; "none" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


@cache
def code_hash() -> str:
    """Hash of the source of jaxpage and its kernels, see `hash_of`."""
    folders = []
    for name in ("jaxpage", "pallas_kernels"):
        spec = find_spec(name)
        assert spec is not None and spec.submodule_search_locations
        folders.append(Path(next(iter(spec.submodule_search_locations))))
    return hash_of(folders)


def hash_of(folders: Iterable[Path]) -> str:
    """16 hex digits over all source files and tuned kernel sizes, any of which may affect a program."""
    state = hashlib.sha256()
    for folder in folders:
        for path in sorted([*folder.rglob("*.py"), *folder.rglob("tuned/*.json")]):
            state.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return state.hexdigest()[:16]


@cache
def _processor() -> str:
    """Name of the processor, and a hash of its instruction sets (available on Linux, for x86 and Arm)."""
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
