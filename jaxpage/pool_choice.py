"""The KV pool of a model: its shape, which layers share a block table, and the attention that reads it."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpage.config import ResolvedConfig
from jaxpage.device import Device
from jaxpage.kv_groups import KVGroups, group_layers
from jaxpage.kv_pool import KVPoolSpec, Layout
from jaxpage.models.config import KVHeads, ModelConfig
from jaxpage.ops import attention
from jaxpage.ops.implementations import Choice
from jaxpage.parallel.heads import share_heads


def kv_groups(model: ModelConfig, *, max_model_len: int, num_devices: int) -> KVGroups:
    """The KV-cache groups of a model's layers that have KV."""
    windows = tuple(model.windows[layer] for layer in model.kv_layers)
    groups = group_layers(windows, max_model_len, _kv_sizes(model, num_devices))
    found = dict(zip(model.kv_layers, groups.layer_locations, strict=True))
    locations = tuple(found.get(layer) for layer in range(model.kv_layers[-1] + 1))
    return replace(groups, layer_locations=locations)


def _kv_sizes(model: ModelConfig, num_devices: int) -> tuple[int, ...]:
    """Of each layer with KV: how many heads of the pool its KV heads take, on all devices together."""
    head_dim = _head_dim(model)
    sizes = []
    for layer in model.kv_layers:
        heads = model.kv_heads(layer)
        shares = share_heads(model.num_heads, heads.num, num_devices)
        sizes.append(shares.of_pool * (heads.head_dim // head_dim))
    return tuple(sizes)


def heads_of_pool(model: ModelConfig, num_devices: int) -> KVHeads:
    """Of a pool for the model, on all devices together; `kv_write.parts` says how layers share them."""
    return KVHeads(max(_kv_sizes(model, num_devices)), _head_dim(model))


def heads_of_layers(model: ModelConfig, num_devices: int) -> tuple[attention.Heads, ...]:
    """Of each kind of layer."""
    kinds = dict.fromkeys(model.kv_heads(layer) for layer in model.kv_layers)
    return tuple(
        attention.Heads(share_heads(model.num_heads, kind.num, num_devices), kind.head_dim)
        for kind in kinds
    )


def _head_dim(model: ModelConfig) -> int:
    """Of the pool: that of the smallest heads, of which others take several. Raises ValueError if they cannot."""
    dims = [model.kv_heads(layer).head_dim for layer in model.kv_layers]
    if any(dim % min(dims) for dim in dims):
        raise ValueError(
            f"{model.architecture}: the head dims {min(dims)} and {max(dims)} of different layers cannot share a KV "
            "pool; one must be a multiple of the other"
        )
    return min(dims)


def layout_of(model: ModelConfig, hardware: Device) -> Layout:
    """Of a pool for plain XLA, which on a TPU would copy one of latents in the layout "heads"."""
    return "tpu" if model.latent is not None and hardware.platform == "tpu" else "heads"


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
    heads = heads_of_pool(model, num_devices)
    pool = KVPoolSpec(
        num_arrays=num_arrays,
        num_blocks=0,
        block_size=config.block_size,
        num_kv_heads=heads.num,
        head_dim=heads.head_dim,
        value_dim=model.value_dim,
        dtype=jnp.dtype(config.dtype),
        format=None if config.kv_cache_dtype == config.dtype else config.kv_cache_dtype,
        sharded=num_devices > 1,
        platform=hardware.platform,
        layout=layout_of(model, hardware),
        num_drafts=config.num_drafts,
    )
    if config.numerics == "strict":
        return Choice("xla", pool)
    return attention.choose(
        pool,
        hardware,
        heads=heads_of_layers(model, num_devices),
        table=(config.max_num_seqs, config.blocks_per_row),
        sees_ahead=model.vision is not None and model.vision.bidirectional,
    )
