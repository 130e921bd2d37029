"""Where parameters stand in a Hugging Face checkpoint, for families that store several in one
tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxpage.models.config import ModelConfig


@dataclass(frozen=True)
class Source:
    """Rows `start .. stop` of a checkpoint's tensor; all of it by default."""

    tensor: str
    start: int = 0
    stop: int | None = None


def same_names(config: ModelConfig) -> dict[str, Source]:
    """Every parameter has a tensor of its own, of its own name."""
    del config
    return {}


def fused_projections(config: ModelConfig) -> dict[str, Source]:
    """Phi-3: rows of q, k and v in `qkv_proj`, of gate and up in `gate_up_proj`."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    parts = {
        "self_attn.q_proj": ("self_attn.qkv_proj", 0, q),
        "self_attn.k_proj": ("self_attn.qkv_proj", q, q + kv),
        "self_attn.v_proj": ("self_attn.qkv_proj", q + kv, q + 2 * kv),
        "mlp.gate_proj": ("mlp.gate_up_proj", 0, inner),
        "mlp.up_proj": ("mlp.gate_up_proj", inner, 2 * inner),
    }
    return {
        f"model.layers.{i}.{part}.weight": Source(f"model.layers.{i}.{fused}.weight", start, stop)
        for i in range(config.num_layers)
        for part, (fused, start, stop) in parts.items()
    }
