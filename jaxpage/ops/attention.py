"""Paged attention for a step: write the new keys and values, then attend. Chooses the implementation, and shards it.

On a mesh each device has its own query heads, the KV heads that they read, and those heads of the pool. The
implementation is chosen before the pool is allocated, because the TPU kernel needs a layout of its own: `choose`
records the decision in the pool's spec. The TPU kernel also writes new keys and values; for the Hopper kernels, XLA's
scatter does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpage.batch import StepBatch
from jaxpage.device import Device
from jaxpage.kv_groups import Location
from jaxpage.kv_pool import KVPool, KVPoolSpec, Layer
from jaxpage.ops.implementations import (
    Choice,
    Implementation,
    first_supported,
    require,
)
from jaxpage.parallel.heads import HeadShares, share_heads
from jaxpage.parallel.sharding import TENSOR
from pallas_kernels import hopper
from pallas_kernels.kv_write.latents import LatentPool
from pallas_kernels.kv_write.parts import PoolPart, whole
from pallas_kernels.kv_write.quantized import QuantizedPool
from pallas_kernels.kv_write.xla import write_kv
from pallas_kernels.paged_attention import gpu_layout, tpu_layout, xla
from pallas_kernels.paged_attention.queries import SeeingAhead
from pallas_kernels.tile_sizes import tuned_sizes

# Separate jits, so that they are traced and lowered once for all equal layers; XLA inlines them.
_OPTIONS = ("scale", "window", "soft_cap", "one_query_per_row")
_write_kv = jax.jit(write_kv)
_paged_attention = jax.jit(xla.paged_attention, static_argnames=_OPTIONS)
_BY_HEAD = P(None, TENSOR)
POOL_BY_HEAD = P(None, None, TENSOR)


@cache
def _tpu_attention():
    from pallas_kernels.paged_attention import tpu

    return jax.jit(tpu.paged_attention, static_argnames=(*_OPTIONS, "num_drafts", "sizes"))


@cache
def _gpu_attention():
    from pallas_kernels.paged_attention import gpu

    return jax.jit(gpu.paged_attention, static_argnames=(*_OPTIONS, "sizes"))


class Heads(NamedTuple):
    """Of a layer."""

    shares: HeadShares
    head_dim: int


def layer_on_device(
    spec: KVPoolSpec, heads: Heads
) -> tuple[jax.ShapeDtypeStruct, Layer | PoolPart | LatentPool, int]:
    """Of a layer on one device: q [1, H, D], what it has of an array of the pool, number of KV heads."""
    shares, head_dim = heads
    num_kv_heads = shares.kv_heads_of_a_device
    of_a_device = spec.num_kv_heads // shares.num_devices
    share = replace(spec, num_blocks=1, num_arrays=1, num_kv_heads=of_a_device)
    own = _own_part(spec, share.abstract()[0], (num_kv_heads, head_dim), 0)
    q = jax.ShapeDtypeStruct((1, shares.query_heads_of_a_device, head_dim), spec.dtype)
    return q, own, num_kv_heads


@dataclass(frozen=True, kw_only=True)
class _Need:
    """A pool that attention is to read."""

    spec: KVPoolSpec
    device: Device
    heads: tuple[Heads, ...]  # of all kinds of layers
    table: tuple[int, int]  # [R, M]
    sees_ahead: bool

    @property
    def num_kv_heads(self) -> int:
        """Of a device's share of the pool."""
        return self.spec.num_kv_heads // self.heads[0].shares.num_devices

    def layers(self, spec: KVPoolSpec) -> Iterator[tuple[jax.ShapeDtypeStruct, Any, int]]:
        """Of each kind of layer on one device: q [1, H, D], what it has of an array of the pool, number of KV heads."""
        return (layer_on_device(spec, heads) for heads in self.heads)


_AHEAD = (
    "the kernel is causal, and tokens of one picture see each other; without pictures it serves "
    '(limit_mm_per_prompt={"image": 0})'
)


_PROMPTS_OF_LATENTS = (
    "their kernel reads keys and values, and multi-head latent attention keeps latents"
)


def _accept_tpu(need: _Need) -> KVPoolSpec:
    require(_AHEAD if need.sees_ahead else None)
    sizes = tuned_sizes("paged_attention", "tpu", need.device.kind)
    rows = tpu_layout.scale_rows(need.num_kv_heads)
    spec = replace(need.spec, layout="tpu", scale_rows=rows)
    for layer in need.layers(spec):
        require(tpu_layout.unsupported_reason(*layer, need.table, sizes))
    return replace(spec, attention="tpu", kernel_sizes=sizes)


def _accept_hopper(need: _Need) -> KVPoolSpec:
    require(_AHEAD if need.sees_ahead else None)
    require(hopper.unsupported_reason_on(need.device.compute_capability))
    for q, pool, _ in need.layers(need.spec):
        require(gpu_layout.unsupported_reason(q, pool))
    require(hopper.unsupported_ptxas_here())
    sizes = tuned_sizes("paged_attention", "gpu", need.device.kind)
    return replace(need.spec, attention="hopper", kernel_sizes=sizes)


IMPLEMENTATIONS: tuple[Implementation[_Need, KVPoolSpec], ...] = (
    Implementation("tpu", "tpu", _accept_tpu),
    Implementation("hopper", "gpu", _accept_hopper),
    Implementation("xla", None, lambda need: need.spec),
)


def choose(
    spec: KVPoolSpec,
    device: Device,
    *,
    heads: tuple[Heads, ...],
    table: tuple[int, int],
    sees_ahead: bool = False,
) -> Choice[KVPoolSpec]:
    """The pool's spec for the first implementation that supports it.

    spec: a pool in the layout "heads", for XLA. heads: of all kinds of layers. table: the largest block table, [R, M].
    sees_ahead: some tokens attend to later ones (`StepBatch.last_keys`).

    Of latents the Hopper kernel serves rows with one token, in all steps; the reason is why it serves no others.
    """
    need = _Need(spec=spec, device=device, heads=heads, table=table, sees_ahead=sees_ahead)
    choice = first_supported("paged attention", IMPLEMENTATIONS, need, device.platform)
    if choice.name == "hopper" and spec.value_dim is not None:
        return replace(choice, refusals=(_PROMPTS_OF_LATENTS,))
    return choice


_KERNELS = {"tpu": "the kernel for TPUs", "hopper": "the kernel for Hopper GPUs"}


def describe(name: str, reason: str | None) -> str:
    """Which attention serves, in one line, and why no kernel does, or only of rows with one token. name: of an
    implementation; reason: a choice's.
    """
    if name != "xla":
        prompts = f"; prompts in plain XLA: {reason}" if reason else ""
        return f"{_KERNELS[name]}{prompts}"
    return f"plain XLA: {reason or 'the kernels are for TPUs and Hopper GPUs'}"


def max_blocks(spec: KVPoolSpec) -> int:
    """The most blocks of a pool that its attention can address."""
    if spec.layout == "tpu":
        return tpu_layout.MOST_BLOCKS
    return (2**31 - 1) // spec.block_size  # slots are int32


class PagedAttention:
    """The attention argument of a model inside a compiled step (`models.attention.Attention`).

    Lives only while the step is traced. `kv_pool` is the list of the pool's arrays, as `spec` describes them;
    `layer_locations` says where the KV of each layer is. A call replaces that array, and the step
    returns the list when the model is done. K and V of all rows are written before any row reads, so a request may hit
    blocks that another request computes in the same step. Several layers may read the KV of one: it is written once.
    """

    def __init__(
        self,
        kv_pool: KVPool,
        batch: StepBatch,
        layer_locations: tuple[Location | None, ...],
        *,
        spec: KVPoolSpec,
        one_query_per_row: bool,
        mesh: Mesh | None = None,
        causal_without_window: bool = False,
    ):
        self.kv_pool = list(kv_pool)
        self._batch = batch
        self._layer_locations = layer_locations
        self._written: set[int] = set()  # layers
        self._spec = spec
        self._one_query_per_row = one_query_per_row
        self._mesh = mesh
        self._causal_without_window = causal_without_window  # see `VisionConfig`

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
        """q [T, H, D], k [T, K, D] and v [T, K, V] after RoPE, sinks [H] → [T, H, V]. V is D, or the pool's
        `value_dim`.
        """
        batch, location = self._batch, self._layer_locations[layer]
        assert location is not None
        group, array, part = location
        attend = partial(
            _write_and_attend,
            self._spec,
            part,
            writes=layer not in self._written,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            one_query_per_row=self._one_query_per_row,
        )
        self._written.add(layer)
        pool, queries = self.kv_pool[array], batch.query_starts
        sees_ahead = window is not None or not self._causal_without_window
        if batch.last_keys is not None and sees_ahead:
            queries = SeeingAhead(queries, batch.last_keys)
        if self._mesh is not None and self._mesh.size > 1:
            shares = share_heads(q.shape[1], k.shape[1], self._mesh.size)
            partition = _partition_of(pool, self._spec)
            attend = on_shares(attend, self._mesh, shares, partition, has_sinks=sinks is not None)
        self.kv_pool[array], out = attend(
            pool,
            q,
            k,
            v,
            batch.slot_mappings[group],
            batch.block_tables[group],
            batch.kv_lens,
            queries,
            *(() if sinks is None else (sinks,)),
        )
        return out


def _write_and_attend(
    spec: KVPoolSpec,
    part: int,
    pool: Layer,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *rows: jax.Array | SeeingAhead,
    writes: bool,
    **options,
) -> tuple[Layer, jax.Array]:
    """The pool with k and v written, and the attention of q. part: the layer's, of an array that several share. rows:
    block table, kv_lens, query_starts, and optionally sinks. writes: False if k and v are in the pool already.
    """
    if len(rows) > 3:
        rows, options["sinks"] = rows[:3], rows[3]
    own = _own_part(spec, pool, k.shape[1:], part)
    if spec.attention == "tpu":
        options |= {"num_drafts": spec.num_drafts, "sizes": spec.kernel_sizes}
        # It writes again what is there already: the same bits.
        out, pool = _tpu_attention()(q, k, v, own, *rows, **options)
        return pool, out
    if spec.attention == "hopper":
        own = _write_kv(own, k, v, slot_mapping) if writes else own
        attended = _gpu_attention()(q, own, *rows, sizes=spec.kernel_sizes, **options)
        return whole(own), attended
    own = _write_kv(own, k, v, slot_mapping) if writes else own
    return whole(own), _paged_attention(q, own, *rows, **options)


def _own_part(
    spec: KVPoolSpec, pool: Layer, heads: tuple[int, ...], index: int
) -> Layer | PoolPart | LatentPool:
    """What a layer has of an array. heads: K and D of the layer, on this device."""
    if spec.value_dim is not None:
        return LatentPool(pool, spec.value_dim)
    num_kv_heads, head_dim = heads
    slot = math.prod(pool.shape[2:]) * (2 if spec.format == "int4" else 1)
    if head_dim == spec.head_dim and 2 * num_kv_heads * head_dim == slot:
        return pool
    return PoolPart(pool, num_kv_heads, head_dim // spec.head_dim, index)


def _partition_of(pool: Layer, spec: KVPoolSpec) -> Any:
    """How an array of the pool is sharded."""
    if spec.layout == "tpu" and isinstance(pool, QuantizedPool) and pool.scale_zero is not None:
        return replace(pool, data=POOL_BY_HEAD, scale_zero=_BY_HEAD)
    return POOL_BY_HEAD


def on_shares(
    attend: Callable,
    mesh: Mesh,
    shares: HeadShares,
    pool_partition: Any,
    *,
    num_others: int = 4,
    has_sinks: bool = False,
) -> Callable:
    """`attend(pool, q, k, v, *others)`, optionally with sinks at the end, with a share of the heads on each device. It
    returns the pool and an array of as many heads as q has.

    Devices exchange nothing unless some heads are padding: then every device has all heads before and after.
    """
    everywhere = NamedSharding(mesh, P())

    def attend_own(pool, q, k, v, *rest):
        if not shares.owns_kv_heads:  # every device has all KV heads and reads one
            head = lax.axis_index(TENSOR) * shares.padded_kv_heads // mesh.size
            k, v = (lax.dynamic_slice_in_dim(x, head, 1, axis=1) for x in (k, v))
        pool, out = attend(pool, q, k, v, *rest)
        # One gather: by itself XLA would remove the padding of the heads in three collectives.
        out = lax.all_gather(out, TENSOR, axis=1, tiled=True) if shares.has_padding else out
        return pool, out

    kv_partition = _BY_HEAD if shares.owns_kv_heads else P()
    on_each = jax.shard_map(
        attend_own,
        mesh=mesh,
        in_specs=(
            *(pool_partition, _BY_HEAD, kv_partition, kv_partition),
            *([P()] * num_others),
            *([P(TENSOR)] * has_sinks),
        ),
        out_specs=(pool_partition, P() if shares.has_padding else _BY_HEAD),
        check_vma=False,  # the loops' carries start as constants
    )

    def attend_padded(pool, q, k, v, *rest):
        if shares.has_padding:
            q, k, v = (lax.with_sharding_constraint(x, everywhere) for x in (q, k, v))
        padded = shares.pad_queries(q), shares.pad_kv(k), shares.pad_kv(v)
        if has_sinks:  # one number for each query head, padded like queries
            *rest, sinks = rest
            rest.append(shares.pad_queries(sinks[None, :, None])[0, :, 0])
        pool, out = on_each(pool, *padded, *rest)
        out = shares.without_padding(out)
        if shares.has_padding:
            out = lax.with_sharding_constraint(out, everywhere)
        return pool, out

    return attend_padded
