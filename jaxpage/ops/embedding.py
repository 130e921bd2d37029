"""Lookups of tokens in a table of rows: the kernel of a TPU where XLA would bring all rows into another order first,
else XLA; and shards it. Knows no model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpage.device import Device
from jaxpage.ops.implementations import Choice, Implementation, first_supported, require
from pallas_kernels.embedding import tpu


@dataclass(frozen=True)
class LookupKernel:
    """The implementation of lookups: XLA, or the kernel for "tpu", for at most `most_tokens` in a call.

    `mesh`: the devices that share the table; `spec` says how its two axes are sharded.
    """

    platform: str | None
    most_tokens: int = 0
    mesh: Mesh | None = None
    spec: P = P()

    def serves(self, num_tokens: int) -> bool:
        """Whether the kernel finds so many tokens; of more, XLA does, which then moves fewer bytes."""
        return self.platform is not None and 0 < num_tokens <= self.most_tokens


XLA = LookupKernel(None)
_WHOLE = P()


@dataclass(frozen=True, kw_only=True)
class _Need:
    """`table`: of one device."""

    table: jax.ShapeDtypeStruct
    mesh: Mesh | None
    spec: P


def _accept_kernel(need: _Need) -> LookupKernel:
    across = need.spec[1:]
    require("the elements of rows are shared by devices" if any(across) else None)
    require(tpu.unsupported_reason(need.table))
    return LookupKernel("tpu", tpu.most_tokens(need.table.shape[0]), need.mesh, need.spec)


IMPLEMENTATIONS: tuple[Implementation[_Need, LookupKernel], ...] = (
    Implementation("tpu", "tpu", _accept_kernel),
    Implementation("xla", None, lambda need: XLA),
)


def choose(
    table: jax.Array | jax.ShapeDtypeStruct,
    device: Device,
    *,
    mesh: Mesh | None = None,
    spec: P = _WHOLE,
) -> Choice[LookupKernel]:
    """The implementation of lookups in a table [V, E]. `spec`: how the table is sharded over `mesh`.

    All find the same rows, bit by bit, but for -0, which is 0 if devices share the table.
    """
    shape = table.shape if mesh is None else NamedSharding(mesh, spec).shard_shape(table.shape)
    share = jax.ShapeDtypeStruct(shape, table.dtype)
    need = _Need(table=share, mesh=mesh, spec=spec)
    return first_supported("embedding", IMPLEMENTATIONS, need, device.platform)


def lookup(table: jax.Array, ids: jax.Array, *, kernel: LookupKernel = XLA) -> jax.Array:
    """[..., E]: the rows of a table [V, E] with these ids, int32[...]; an id that is too large means the last row.

    `kernel` is the result of `choose`. Only XLA has a gradient.
    """
    if not kernel.serves(math.prod(ids.shape)):
        return table.at[ids].get(mode="clip")
    num_rows, width = table.shape
    # As jax counts: -1 is the last row.
    inside = jnp.clip(jnp.where(ids < 0, ids + num_rows, ids), 0, num_rows - 1).reshape(-1)
    find = tpu.lookup
    if kernel.mesh is not None and kernel.mesh.size > 1:
        find = _divided(kernel.mesh, kernel.spec)
    return find(table, inside).reshape(*ids.shape, width)


def _divided(mesh: Mesh, spec: P):
    """A lookup in a table of which each device has some rows, or all."""
    axis = spec[0] if len(spec) else None

    def of_share(table: jax.Array, ids: jax.Array) -> jax.Array:
        if axis is None:
            return tpu.lookup(table, ids)
        own = ids - lax.axis_index(axis) * table.shape[0]
        return lax.psum(tpu.lookup(table, own), axis)

    return jax.shard_map(
        of_share, mesh=mesh, in_specs=(P(axis), P()), out_specs=P(), check_vma=False
    )
