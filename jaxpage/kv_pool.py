"""The pool of KV blocks on the device: its layout, its size, its allocation."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class KVPoolSpec:
    """Shape of the pool: per layer `[num_blocks, block_size, 2 * num_kv_heads, head_dim]`.

    K and V are interleaved on the head axis (`2k` key, `2k + 1` value of KV head k): one DMA fetches both, and tensor
    parallelism shards one axis. Block 0 is the null block.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype  # of K and V

    @property
    def storage_dtype(self) -> jnp.dtype:
        """What the arrays hold: on a CPU the bits of 2-byte floats as uint16 (`kv_write.xla.to_storage` says why)."""
        dtype = jnp.dtype(self.dtype)
        on_cpu = jax.default_backend() == "cpu"
        return jnp.dtype(jnp.uint16) if on_cpu and dtype.itemsize == 2 else dtype

    @property
    def layer_shape(self) -> tuple[int, int, int, int]:
        return (self.num_blocks, self.block_size, 2 * self.num_kv_heads, self.head_dim)

    @property
    def bytes_per_block(self) -> int:
        per_layer = (
            self.block_size * 2 * self.num_kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize
        )
        return self.num_layers * per_layer

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    def abstract(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(self.layer_shape, self.storage_dtype)] * self.num_layers

    def allocate(self) -> list[jax.Array]:
        return [jnp.zeros(self.layer_shape, self.storage_dtype) for _ in range(self.num_layers)]
