"""The KV pool of a model: its shape, and the attention that reads it."""

from __future__ import annotations

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpage.config import ResolvedConfig
from jaxpage.device import Device
from jaxpage.kv_pool import KVPoolSpec
from jaxpage.models.config import ModelConfig
from jaxpage.ops import attention
from jaxpage.ops.implementations import Choice
from jaxpage.parallel.heads import share_heads


def choose_pool(
    config: ResolvedConfig,
    model: ModelConfig,
    *,
    num_arrays: int,
    hardware: Device,
    mesh: Mesh | None,
) -> Choice[KVPoolSpec]:
    """The pool of a model in an engine with this config, without blocks yet."""
    num_devices = 1 if mesh is None else mesh.size
    shares = share_heads(model.num_heads, model.num_kv_heads, num_devices)
    pool = KVPoolSpec(
        num_arrays=num_arrays,
        num_blocks=0,
        block_size=config.block_size,
        num_kv_heads=shares.of_pool,
        head_dim=model.head_dim,
        dtype=jnp.dtype(config.dtype),
        format=None if config.kv_cache_dtype == config.dtype else config.kv_cache_dtype,
        sharded=num_devices > 1,
        platform=hardware.platform,
    )
    if config.numerics == "strict":
        return Choice("xla", pool)
    return attention.choose(
        pool,
        hardware,
        shares=shares,
        table=(config.max_num_seqs, config.blocks_per_row),
        sees_ahead=model.vision is not None and model.vision.bidirectional,
    )
