"""Paged attention for a step: write the new keys and values, then attend. Chooses the implementation, and shards it.

On a mesh each device has its own heads: query heads, the KV heads that they read, and those heads of the pool.
Who reads a pool is settled before there is one: `choose` says it in the pool's spec. A TPU's kernel wants it laid out
in its own way and writes it too; the kernel of Hopper GPUs reads what XLA's scatter has written.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpage.batch import StepBatch
from jaxpage.kv_pool import KernelSizes, KVPool, KVPoolSpec, Layer
from jaxpage.parallel.sharding import TENSOR
from pallas_kernels.hopper import unsupported_reason_on
from pallas_kernels.kv_write.quantized import QuantizedPool
from pallas_kernels.kv_write.xla import write_kv
from pallas_kernels.paged_attention import gpu_layout, tpu_layout, xla
from pallas_kernels.paged_attention.tune import tuned_sizes

# XLA inlines them; as jits of their own they are traced and lowered once for all layers that are alike.
_OPTIONS = ("scale", "window", "soft_cap", "one_query_per_row")
_write_kv = jax.jit(write_kv)
_paged_attention = jax.jit(xla.paged_attention, static_argnames=_OPTIONS)


@cache
def _tpu_attention():
    from pallas_kernels.paged_attention import tpu

    return jax.jit(tpu.paged_attention, static_argnames=(*_OPTIONS, "sizes"))


@cache
def _gpu_attention():
    from pallas_kernels.paged_attention import gpu

    return jax.jit(gpu.paged_attention, static_argnames=(*_OPTIONS, "sizes"))


def choose(
    spec: KVPoolSpec,
    *,
    platform: str,
    num_devices: int,
    table: tuple[int, int],
    num_heads: int | None = None,
    device_kind: str = "",
    compute_capability: str | None = None,
) -> tuple[KVPoolSpec, str | None]:
    """The pool as the kernel of the platform reads it; or as it was, for XLA, and why the kernel cannot serve.

    table: the largest block table, [R, M]; num_heads: the query heads of the model; device_kind and, of GPUs,
    compute_capability, as jax tells them of a device: "NVIDIA H200", "9.0".
    """
    sharing = num_devices if spec.sharded else 1
    kv_heads = spec.num_kv_heads // sharing
    heads = (num_heads or spec.num_kv_heads) // sharing
    q = jax.ShapeDtypeStruct((1, heads, spec.head_dim), spec.dtype)

    def share(spec: KVPoolSpec) -> Layer:  # of one device, in shapes
        return replace(spec, num_blocks=1, num_arrays=1, num_kv_heads=kv_heads).abstract()[0]

    if platform == "tpu":
        sizes = tuned_sizes("tpu", device_kind)
        rows = tpu_layout.scale_rows(kv_heads)
        lanes = replace(spec, lanes=True, scale_rows=rows, kernel_sizes=sizes)
        reason = tpu_layout.unsupported_reason(q, share(lanes), kv_heads, table, sizes)
        return (spec, reason) if reason else (lanes, None)
    if platform == "gpu":
        reason = unsupported_reason_on(compute_capability) or gpu_layout.unsupported_reason(
            q, share(spec)
        )
        if reason is None:
            return replace(spec, kernel_sizes=tuned_sizes("gpu", device_kind)), None
        return spec, reason
    return spec, None


class PagedAttention:
    """The attention argument of a model inside a compiled step (`models.attention.Attention`).

    Lives only while the step is traced. `kv_pool` is the list of the pool's arrays, `layer_locations` says of each
    layer which KV-cache group and which array are its; a call replaces that array, and the step returns the list when
    the model is done. `kernel_sizes` as `choose` left it in the pool's spec. K and V of all rows are written before
    any row reads, so a request may hit blocks which another computes in the same step.
    """

    def __init__(
        self,
        kv_pool: KVPool,
        batch: StepBatch,
        layer_locations: tuple[tuple[int, int], ...],
        *,
        one_query_per_row: bool,
        mesh: Mesh | None = None,
        kernel_sizes: KernelSizes | None = None,
    ):
        self.kv_pool = list(kv_pool)
        self._batch = batch
        self._layer_locations = layer_locations
        self._one_query_per_row = one_query_per_row
        self._mesh = mesh
        self._kernel_sizes = kernel_sizes

    def __call__(
        self,
        layer: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """q [T, H, D] and k, v [T, K, D] after RoPE, sinks [H] → [T, H, D]."""
        batch, (group, array) = self._batch, self._layer_locations[layer]
        attend = partial(
            _write_and_attend,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            one_query_per_row=self._one_query_per_row,
            kernel_sizes=self._kernel_sizes,
        )
        pool = self.kv_pool[array]
        if self._mesh is not None and num_sharded_kv_heads(q.shape[1], k.shape[1], self._mesh.size):
            attend = _sharded(attend, self._mesh, k.shape[1], pool)
        elif self._mesh is not None and self._mesh.size > 1:  # XLA cannot divide a kernel
            attend = jax.shard_map(
                attend, mesh=self._mesh, in_specs=P(), out_specs=P(), check_vma=False
            )
        self.kv_pool[array], out = attend(
            pool,
            q,
            k,
            v,
            batch.slot_mappings[group],
            batch.block_tables[group],
            batch.kv_lens,
            batch.query_starts,
            sinks,
        )
        return out


def num_sharded_kv_heads(num_heads: int, num_kv_heads: int, num_devices: int) -> int:
    """KV heads of a pool whose heads are dealt out to devices; 0 if they cannot be, and each device has all.

    More than the model has if there are more devices: then several keep the same head, each for other query heads.
    """
    if num_devices == 1 or num_heads % num_devices:
        return 0
    if num_kv_heads % num_devices == 0:
        return num_kv_heads
    return num_devices if num_devices % num_kv_heads == 0 else 0


def _write_and_attend(
    pool: Layer,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *where_and_sinks: jax.Array | None,
    kernel_sizes: KernelSizes | None,
    **options,
) -> tuple[Layer, jax.Array]:
    """The pool with k and v in it, and the attention of q.

    `where_and_sinks` are block table, kv_lens and query_starts, then the sinks or None.
    """
    *where, options["sinks"] = where_and_sinks
    if len(pool.shape) == 3:  # as `choose` laid it out for a TPU
        out, pool = _tpu_attention()(q, k, v, pool, *where, sizes=kernel_sizes, **options)
        return pool, out
    pool = _write_kv(pool, k, v, slot_mapping)
    if kernel_sizes is not None:
        return pool, _gpu_attention()(q, pool, *where, sizes=kernel_sizes, **options)
    return pool, _paged_attention(q, pool, *where, **options)


def _sharded(attend, mesh: Mesh, num_kv_heads: int, pool: Layer):
    """`attend` with a share of the heads on each device. No device needs anything of another."""
    by_head, pool_by_head = P(None, TENSOR), P(None, None, TENSOR)
    if isinstance(pool, QuantizedPool) and len(pool.shape) == 3 and pool.scale_zero is not None:
        pool_by_head = replace(pool, data=pool_by_head, scale_zero=by_head)
    own_kv_heads = num_kv_heads % mesh.size == 0

    def attend_own(pool, q, k, v, *rest):
        if not own_kv_heads:  # all are here, and one is read
            head = lax.axis_index(TENSOR) * num_kv_heads // mesh.size
            k, v = (lax.dynamic_slice_in_dim(x, head, 1, axis=1) for x in (k, v))
        return attend(pool, q, k, v, *rest)

    kv_spec = by_head if own_kv_heads else P()
    return jax.shard_map(
        attend_own,
        mesh=mesh,
        in_specs=(pool_by_head, by_head, kv_spec, kv_spec, P(), P(), P(), P(), P(TENSOR)),
        out_specs=(pool_by_head, by_head),
        check_vma=False,  # the loops' carries start as constants
    )
