"""The pool of KV blocks on the device: its layout, its size, its allocation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.kv_write.quantized import LEVELS, QuantizedPool
from pallas_kernels.paged_attention import gpu_layout, tpu_layout

Layer = jax.Array | QuantizedPool
KVPool = list[Layer]
KernelSizes = gpu_layout.TileSizes | tpu_layout.TileSizes
# "heads": [num_blocks, block_size, 2 * num_kv_heads, head_dim]. "tpu": the last two axes are one, see
# `paged_attention.tpu_layout`.
Layout = Literal["heads", "tpu"]
_LANES = 128  # of a register of a TPU


@dataclass(frozen=True, kw_only=True)
class KVPoolSpec:
    """Shape of the pool: `num_arrays` arrays of `[num_blocks, block_size, 2 * num_kv_heads, head_dim]`, or as `layout`
    says.

    There is one array for each layer, or, with several KV-cache groups, for each layer of one group (see `kv_groups`).

    K and V are interleaved on the head axis (`2k` key, `2k + 1` value of KV head k): one DMA fetches both, and tensor
    parallelism shards one axis. Block 0 is the null block. With a `format`, each array is a `QuantizedPool` whose data
    have this shape (int4: half the head_dim). With a `value_dim` it has keys alone, `[num_blocks, block_size,
    num_kv_heads * slot_width]`. Raises ValueError for a head_dim that int4 cannot pack, and for a format with
    scales beside a `value_dim`.
    """

    num_arrays: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    # Values are the first so many elements of the keys and are not stored, see `kv_write.latents`; None: they are.
    value_dim: int | None = None
    dtype: jnp.dtype  # of K and V as the model computes them
    format: str | None = None  # one of `quantized.FORMATS`; None: not quantised
    sharded: bool = False  # over heads, on the devices of the mesh
    platform: str | None = None  # of its devices, "cpu", "gpu" or "tpu"; None: jax's default
    attention: Literal["xla", "tpu", "hopper"] = (
        "xla"  # the implementation that reads it, see `ops.attention`
    )
    kernel_sizes: KernelSizes | None = None  # tile sizes of that implementation; XLA has none
    num_drafts: int = 0  # most of a row in a step
    layout: Layout = "heads"
    scale_rows: int = 4  # with layout "tpu": rows of scales and zeros for each KV head

    def __post_init__(self) -> None:
        if self.format == "int4" and self.head_dim % 2:
            raise ValueError(
                f'kv_cache_dtype="int4" puts two values into a byte, and the head_dim of this model is '
                f'{self.head_dim}, which is odd; take "int8"'
            )
        if self.format in LEVELS and self.value_dim is not None:
            raise ValueError(
                f"kv_cache_dtype={self.format!r} is not supported with multi-head latent attention: one scale would "
                f"round the {self.value_dim} values of a token's latent and the rotated key beside them, which differ "
                'in size; take "fp8", which has no scales'
            )

    @property
    def slot_width(self) -> int:
        """Numbers that a key takes, with a `value_dim`: in the layout "tpu" those of whole registers."""
        return self.head_dim + (-self.head_dim % _LANES if self.layout == "tpu" else 0)

    @property
    def array_shape(self) -> tuple[int, ...]:
        """The shape of one array, or of its data if it is quantised."""
        if self.value_dim is not None:
            return (self.num_blocks, self.block_size, self.num_kv_heads * self.slot_width)
        width = self.head_dim // 2 if self.format == "int4" else self.head_dim
        if self.layout == "tpu":
            return (self.num_blocks, self.block_size, 2 * self.num_kv_heads * width)
        return (self.num_blocks, self.block_size, 2 * self.num_kv_heads, width)

    def axes_of(self, array: jax.Array | jax.ShapeDtypeStruct) -> tuple[str, ...]:
        """Logical axis names of an array of the pool, see `parallel.sharding`."""
        if not self.sharded:
            return ()
        is_scale_zero = self.format is not None and array.dtype != jnp.uint8
        if self.layout == "tpu" and is_scale_zero:
            return ("blocks", "kv_heads", "block")
        return ("blocks", "block", "kv_heads")

    @property
    def bytes_per_block(self) -> int:
        """Summed over all devices."""
        leaves = jax.tree.leaves(replace(self, num_blocks=1).abstract())
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    def abstract(self) -> KVPool:
        """The pool with a `jax.ShapeDtypeStruct` for each array."""
        return [self._layer(jax.ShapeDtypeStruct)] * self.num_arrays

    def allocate(self) -> KVPool:
        return [self._layer(jnp.zeros) for _ in range(self.num_arrays)]

    def _layer(self, make: Callable[[tuple[int, ...], DTypeLike], Any]) -> Layer:
        if self.format is None:
            return make(self.array_shape, self._storage_dtype(self.dtype))
        # Not float16: the zero of a narrow vector can overflow it, and the scale of a small one underflow.
        wide = jnp.dtype(self.dtype).itemsize == 4
        scale_zero_dtype = self._storage_dtype(jnp.float32 if wide else jnp.bfloat16)
        num_blocks, block_size = self.array_shape[:2]
        shape = (num_blocks, block_size, 2 * self.num_kv_heads, 2)
        if self.layout == "tpu":
            shape = (num_blocks, self.scale_rows * self.num_kv_heads, block_size)
        return QuantizedPool(
            data=make(self.array_shape, jnp.uint8),
            scale_zero=make(shape, scale_zero_dtype) if self.format in LEVELS else None,
            format=self.format,
        )

    def _storage_dtype(self, dtype: DTypeLike) -> jnp.dtype:
        """The dtype that stores `dtype`: uint16 for 2-byte floats on a CPU (see `kv_write.xla.to_storage`)."""
        dtype = jnp.dtype(dtype)
        on_cpu = (self.platform or jax.default_backend()) == "cpu"
        return jnp.dtype(jnp.uint16) if on_cpu and dtype.itemsize == 2 else dtype
