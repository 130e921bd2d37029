"""The mesh of an engine: its devices along one axis, which share weights and KV heads. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpage.parallel.sharding import TENSOR


def tensor_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """The devices in this order along TENSOR."""
    return Mesh(np.array(devices), (TENSOR,))


def flat(mesh: Mesh) -> Mesh:
    """All devices of a user's mesh along TENSOR, in its order, whatever its axes are for its owner."""
    return tensor_mesh(list(mesh.devices.flat))


def local_mesh(num_devices: int) -> Mesh:
    """The first devices of this process. Raises ValueError if it has fewer."""
    devices = jax.local_devices()
    if num_devices > len(devices):
        hint = ""
        if devices[0].platform == "cpu":
            hint = (
                f"; XLA_FLAGS=--xla_force_host_platform_device_count={num_devices}, set before jax starts, "
                "makes as many of a CPU"
            )
        raise ValueError(
            f"tensor_parallel_size={num_devices}, but this process has {len(devices)} "
            f"{devices[0].device_kind} device(s){hint}"
        )
    return tensor_mesh(devices[:num_devices])
