"""The mesh of an engine: one axis of devices, which divide weights and KV heads. Knows no model."""

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
    """All devices of a user's mesh along TENSOR, in the order of the mesh, whatever its axes."""
    return tensor_mesh(list(mesh.devices.flat))


def mesh_of_hosts(num_devices: int | None) -> Mesh:
    """Devices of all processes, the same number from each: the first of each, or all. Raises ValueError."""
    by_host = [jax.local_devices(process_index=i) for i in range(jax.process_count())]
    total = sum(map(len, by_host))
    each, rest = divmod(num_devices or total, len(by_host))
    if rest or any(len(devices) < each for devices in by_host):
        counts = ", ".join(str(len(devices)) for devices in by_host)
        raise ValueError(
            f"tensor_parallel_size={num_devices or total} cannot be shared evenly by {len(by_host)} hosts "
            f"with {counts} devices"
        )
    return tensor_mesh([device for devices in by_host for device in devices[:each]])


def check_hosts(mesh: Mesh, num_hosts: int) -> None:
    """Raise ValueError unless the mesh has devices of all `num_hosts` processes; one host: of this process only."""
    if jax.process_count() == 1:
        return
    wanted = set(range(num_hosts)) if num_hosts > 1 else {jax.process_index()}
    found = {device.process_index for device in mesh.devices.flat}
    if found != wanted:
        raise ValueError(
            f"mesh has devices of the processes {sorted(found)}, but with nnodes={num_hosts} "
            f"it must have some of {sorted(wanted)}"
        )


def local_mesh(num_devices: int) -> Mesh:
    """The first devices of this process. Raises ValueError if it has fewer."""
    (mesh,) = local_meshes(1, num_devices)
    return mesh


def local_meshes(num_meshes: int, num_devices: int) -> list[Mesh]:
    """Meshes of `num_devices` devices each: the first devices of this process, then the next ones, and so on.

    Raises ValueError if there are too few.
    """
    devices, needed = jax.local_devices(), num_meshes * num_devices
    if needed > len(devices):
        several = f"data_parallel_size={num_meshes} times " if num_meshes > 1 else ""
        hint = ""
        if devices[0].platform == "cpu":
            hint = (
                f"; XLA_FLAGS=--xla_force_host_platform_device_count={needed}, set before jax starts, "
                "makes as many of a CPU"
            )
        raise ValueError(
            f"{several}tensor_parallel_size={num_devices}, but this process has {len(devices)} "
            f"{devices[0].device_kind} device(s){hint}"
        )
    starts = range(0, needed, num_devices)
    return [tensor_mesh(devices[start : start + num_devices]) for start in starts]
