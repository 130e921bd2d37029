"""Sharding of arrays: logical axis -> mesh axis, one flat table. Knows no model and no file."""

from __future__ import annotations

import functools

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

TENSOR = "tensor"  # the mesh axis of tensor parallelism
EXPERT = TENSOR  # the mesh axis of experts: the same devices; each has all heads of some and all of some experts

RULES: dict[str, str | None] = {
    "vocab": TENSOR,
    "draft vocab": None,
    "positions": None,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "experts": EXPERT,
    "expert": None,  # within an expert
    "router": None,
    "embed": None,
    "latent": None,
    "head_dim": None,
    "taps": None,  # of a convolution
    "rows": None,
    "sampled rows": TENSOR,
    "layers": None,
    "blocks": None,
    "block": None,
    "adapter slots": None,
}


@functools.cache
def sharding(
    mesh: Mesh | None, axes: tuple[str, ...] = (), units: tuple[int, ...] | None = None
) -> Sharding:
    """The sharding of an array whose dimensions have the logical names `axes`; no mesh: the first local device.

    `units[i]` is the number of pieces into which dimension i may be divided (KV heads, not their elements). A dimension
    that does not divide evenly over its mesh axis is replicated: 2 KV heads on 4 devices are on each of them. Objects
    are cached, so equal arguments give the identical sharding. Raises ValueError for a name that is not in RULES.
    """
    unknown = [axis for axis in axes if axis not in RULES]
    if unknown:
        raise ValueError(f"no sharding rule for axis {unknown[0]!r}; known are {', '.join(RULES)}")
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    spec: list[str | None] = []
    for index, axis in enumerate(axes):
        mesh_axis = RULES[axis]
        num_devices = mesh.shape.get(mesh_axis, 1)
        if num_devices == 1 or (units is not None and units[index] % num_devices):
            mesh_axis = None
        spec.append(mesh_axis)
    while spec and spec[-1] is None:  # a canonical form: jit compares specs literally
        spec.pop()
    return NamedSharding(mesh, PartitionSpec(*spec))
