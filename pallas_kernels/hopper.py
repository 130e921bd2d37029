"""What the kernels in Mosaic GPU ask of a device and of jax; what they cannot do besides, each says itself."""

from __future__ import annotations

import jax

CAPABILITY = "9.0"
# From the first jax that has all of what the kernels use, to the first with which they were not seen to compile.
JAX_VERSIONS = ((0, 11, 2), (0, 12))


def unsupported_reason_on(compute_capability: str | None) -> str | None:
    """Why these kernels cannot run on a device of such a compute capability, in one line; None if they can."""
    if compute_capability == CAPABILITY:
        return None
    has = compute_capability or "unknown"
    return f"the kernels are for Hopper GPUs, of compute capability {CAPABILITY}; this device's is {has}"


def unsupported_jax() -> str | None:
    """Why they cannot be lowered by this jax, in one line; None if they can."""
    oldest, newest = JAX_VERSIONS
    if oldest <= jax.__version_info__ < newest:
        return None
    names = [".".join(map(str, version)) for version in JAX_VERSIONS]
    return f"the kernels need jax >= {names[0]} and < {names[1]}, and this is {jax.__version__}"
