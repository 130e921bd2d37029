"""Requirements of the Mosaic GPU kernels on the device, jax and ptxas. Kernels have further limits of their own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import jax

CAPABILITY = "9.0"
# From the first jax with all features that the kernels use, to the first version not tested.
JAX_VERSIONS = ((0, 11, 2), (0, 13))
PYTHON = (3, 12)  # the oldest for which there is such a jax
NUM_SMS = 132  # of H100 and H200 in SXM modules

Version = tuple[int, ...]
# ptxas from the first version to before the second miscompiles code for sm_90a. 12.8 to 12.9.0: causal masking, which
# JAX's own attention kernel for Hopper rejects too. 13.0: stores to shared memory in 13.0.88, fixed in 13.1.80
# (https://github.com/fla-org/flash-linear-attention/pull/1262).
MISCOMPILING: tuple[tuple[Version, Version, str], ...] = (
    ((12, 8), (12, 9, 86), "causal masking"),
    ((13, 0), (13, 1), "stores to shared memory"),
)


def unsupported_reason_on(compute_capability: str | None) -> str | None:
    """Why these kernels cannot run with this compute capability, in one line; None if they can."""
    if compute_capability == CAPABILITY:
        return None
    has = compute_capability or "unknown"
    return f"the kernels are for Hopper GPUs, of compute capability {CAPABILITY}; this device's is {has}"


def num_sms() -> int:
    """The SMs of the GPU that is compiled for; `NUM_SMS` if it is unknown, as in the interpreter.

    That GPU is the current mesh's, otherwise the first of `jax.devices()`. The number only sizes grids: where sums are
    cut is a constant of each kernel, so no result depends on it.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        found = getattr(jax.devices()[0], "core_count", None)
    else:
        found = device.num_cores if device.platform == "gpu" else None
    return found or NUM_SMS


def unsupported_jax() -> str | None:
    """Why this jax cannot lower them, in one line; None if it can."""
    oldest, newest = JAX_VERSIONS
    if oldest <= jax.__version_info__ < newest:
        return None
    names = [_text(version) for version in JAX_VERSIONS]
    python = (
        f"this is Python {_text(sys.version_info[:2])}: make an environment with Python 3.12 and "
    )
    return (
        f"the kernels need jax >= {names[0]} and < {names[1]}, and this is {jax.__version__}; "
        f"{python if sys.version_info < PYTHON else ''}"
        f'install "jax[cuda13]>={names[0]},<{names[1]}"'
    )


def unsupported_ptxas(path: Path | None, version: Version | None) -> str | None:
    """Why this ptxas is not safe to use, in one line; None if it is, or if its version is unknown."""
    if version is None:
        return None
    for first, fixed, what in MISCOMPILING:
        if first <= version < fixed:
            return (
                f"ptxas {_text(version)} ({path}) miscompiles {what} for Hopper GPUs; install nvidia-cuda-nvcc>=13.1 "
                f"and put its folder, nvidia/cu13/bin in site-packages, first on the PATH"
            )
    return None


def unsupported_ptxas_here() -> str | None:
    """`unsupported_ptxas` for the one that would be used. None if there is none: compilation reports that."""
    path = find_ptxas()
    return None if path is None else unsupported_ptxas(path, ptxas_version(path))


def find_ptxas() -> Path | None:
    """The assembler that Mosaic GPU uses: the first on the PATH, else that of NVIDIA's wheel or of the CUDA toolkit."""
    if on_path := shutil.which("ptxas"):
        return Path(on_path)
    folders = [Path(folder) / "nvidia" / "cu13" for folder in sys.path]
    places = [folder / "bin" / "ptxas" for folder in (*folders, Path("/usr/local/cuda"))]
    return next((place for place in places if place.exists()), None)


@cache
def ptxas_version(path: Path) -> Version | None:
    """Its version, such as (13, 1, 80); None if it does not report one."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_ptxas_version(done.stdout)


def parse_ptxas_version(text: str) -> Version | None:
    """From `ptxas --version`, whose last line but one ends with "release 13.1, V13.1.80"."""
    found = re.search(r"\bV(\d+)\.(\d+)\.(\d+)\b", text)
    return tuple(map(int, found.groups())) if found else None


def _text(version: Version) -> str:
    return ".".join(map(str, version))
