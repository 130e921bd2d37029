"""Checkpoints as trainers write them: Hugging Face's tensors in the trees of Tunix and MaxText, saved by Orbax itself.

The formulas are those of the trainers' own converters (Tunix `models/*/params.py`, MaxText `param_mapping.py`), so what
is tested shares nothing with them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

Tensors = dict[str, np.ndarray]


def save(tree: Any, folder: Path, **options: bool) -> Path:
    """Plain Orbax, as MaxText's `save_params_to_path` does it."""
    with ocp.PyTreeCheckpointer(**options) as checkpointer:
        checkpointer.save(folder, tree)
    return folder


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *folders, last = name.split(".")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = value
    return tree


def kernel(weight: np.ndarray, *shape: int) -> np.ndarray:
    """torch's [out, in] as [in, out], reshaped."""
    return np.ascontiguousarray(weight.T.reshape(shape))


def tunix(tensors: Tensors, config: Any) -> dict[str, Any]:
    """Tunix's Llama 3, Qwen 2 and Qwen 3."""
    embed, dim = config.hidden_size, _head_dim(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    flat = {}
    for name, x in tensors.items():
        name = name.removeprefix("model.").replace("self_attn", "attn")
        if found := re.fullmatch(r"(layers\.\d+\.attn\.)([qkv])_proj\.(weight|bias)", name):
            prefix, letter, kind = found.groups()
            if kind == "bias":
                flat[f"{prefix}{letter}_bias"] = x
            else:
                num = heads if letter == "q" else kv_heads
                flat[f"{prefix}{letter}_proj.w"] = kernel(x, embed, num, dim)
        elif name.endswith("o_proj.weight"):
            flat[name.replace("weight", "w")] = kernel(x, heads, dim, embed)
        elif "mlp" in name:
            flat[name.replace("weight", "kernel")] = kernel(x, *x.T.shape)
        elif name == "embed_tokens.weight":
            flat["embedder.input_embedding"] = x
        elif name == "lm_head.weight":
            flat["lm_head.w"] = kernel(x, *x.T.shape)
        elif name == "norm.weight":
            flat["final_norm.w"] = x
        else:
            flat[name.replace("weight", "w")] = x
    return nested(flat)


def tunix_gemma3(tensors: Tensors, config: Any) -> dict[str, Any]:
    embed, dim = config.hidden_size, _head_dim(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    flat = {
        "embedder.input_embedding": tensors["model.embed_tokens.weight"],
        "final_norm.scale": tensors["model.norm.weight"],
    }
    norms = {
        "input_layernorm": "pre_attention_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "pre_ffw_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "self_attn.q_norm": "attn._query_norm",
        "self_attn.k_norm": "attn._key_norm",
    }
    for i in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{i}", f"layers.{i}"

        def projection(letter: str, num: int, ours=ours) -> np.ndarray:
            x = tensors[f"{ours}.self_attn.{letter}_proj.weight"]
            return kernel(x, embed, num, dim).transpose(1, 0, 2)

        if heads == kv_heads:
            parts = [projection(letter, heads) for letter in "qkv"]
            flat[f"{theirs}.attn.qkv_einsum.w"] = np.stack(parts)
        else:
            flat[f"{theirs}.attn.q_einsum.w"] = projection("q", heads)
            parts = [projection(letter, kv_heads) for letter in "kv"]
            flat[f"{theirs}.attn.kv_einsum.w"] = np.stack(parts)
        out = tensors[f"{ours}.self_attn.o_proj.weight"]
        flat[f"{theirs}.attn.attn_vec_einsum.w"] = kernel(out, heads, dim, embed)
        for name in ("gate_proj", "up_proj", "down_proj"):
            x = tensors[f"{ours}.mlp.{name}.weight"]
            flat[f"{theirs}.mlp.{name}.kernel"] = kernel(x, *x.T.shape)
        for name, other in norms.items():
            flat[f"{theirs}.{other}.scale"] = tensors[f"{ours}.{name}.weight"]
    return nested(flat)


_MAXTEXT_NAMES = {
    "self_attn.q_proj.weight": "self_attention.query.kernel",
    "self_attn.k_proj.weight": "self_attention.key.kernel",
    "self_attn.v_proj.weight": "self_attention.value.kernel",
    "self_attn.o_proj.weight": "self_attention.out.kernel",
    "self_attn.q_proj.bias": "self_attention.query.bias",
    "self_attn.k_proj.bias": "self_attention.key.bias",
    "self_attn.v_proj.bias": "self_attention.value.bias",
    "self_attn.q_norm.weight": "self_attention.query_norm.scale",
    "self_attn.k_norm.weight": "self_attention.key_norm.scale",
    "mlp.gate_proj.weight": "mlp.wi_0.kernel",
    "mlp.up_proj.weight": "mlp.wi_1.kernel",
    "mlp.down_proj.weight": "mlp.wo.kernel",
    "input_layernorm.weight": "pre_self_attention_layer_norm.scale",
    "post_attention_layernorm.weight": "post_self_attention_layer_norm.scale",
}
_MAXTEXT_GEMMA_NORMS = {
    "input_layernorm.weight": "pre_self_attention_norm.scale",
    "post_attention_layernorm.weight": "post_self_attention_norm.scale",
    "pre_feedforward_layernorm.weight": "pre_ffw_norm.scale",
    "post_feedforward_layernorm.weight": "post_ffw_norm.scale",
}


def maxtext(
    tensors: Tensors, config: Any, *, stacked: bool, axis: int = 1, more_rows: int = 0
) -> dict[str, Any]:
    """MaxText's weights below `params`: layers apart or stacked along `axis`, the embedding with `more_rows`."""
    gemma = config.model_type.startswith("gemma3")
    names = _MAXTEXT_NAMES | (_MAXTEXT_GEMMA_NORMS if gemma else {})
    embedding = tensors["model.embed_tokens.weight"]
    if gemma:
        embedding = embedding * np.float32(ml_dtypes.bfloat16(config.hidden_size**0.5))
    offset = 1.0 if gemma else 0.0
    flat = {
        "token_embedder.embedding": np.pad(embedding, ((0, more_rows), (0, 0))),
        "decoder.decoder_norm.scale": tensors["model.norm.weight"] + np.float32(offset),
    }
    if "lm_head.weight" in tensors and not config.tie_word_embeddings:
        flat["decoder.logits_dense.kernel"] = np.ascontiguousarray(tensors["lm_head.weight"].T)
    layers: list[Tensors] = [{} for _ in range(config.num_hidden_layers)]
    for name, x in tensors.items():
        if found := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name):
            value = _maxtext_value(found[2], x, config)
            layers[int(found[1])][names[found[2]]] = value + np.float32(
                offset if "norm" in found[2] else 0
            )
    if not stacked:
        return nested(flat | _named("decoder.layers_{}", layers))
    if not gemma:
        together = _stacked(layers, axis)
        return nested(flat | {f"decoder.layers.{name}": x for name, x in together.items()})
    rounds = len(layers) // 6 * 6
    for block in range(6 if rounds else 0):
        together = _stacked(layers[block:rounds:6], axis)
        flat |= {f"decoder.layers.layers_{block}.{name}": x for name, x in together.items()}
    return nested(flat | _named("decoder.layers_remainder.layers_{}", layers[rounds:]))


def _named(pattern: str, layers: list[Tensors]) -> Tensors:
    return {
        f"{pattern.format(i)}.{name}": x
        for i, layer in enumerate(layers)
        for name, x in layer.items()
    }


def _stacked(layers: list[Tensors], axis: int) -> Tensors:
    return {name: np.stack([layer[name] for layer in layers], axis) for name in layers[0]}


def _maxtext_value(name: str, x: np.ndarray, config: Any) -> np.ndarray:
    embed, dim = config.hidden_size, _head_dim(config)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    num = heads if ".q_" in name or ".o_" in name else kv_heads
    if "norm" in name:
        return x
    if name.endswith("bias"):
        return x.reshape(num, dim)
    if "o_proj" in name:
        return kernel(x, heads, dim, embed)
    if "self_attn" not in name:
        return kernel(x, *x.T.shape)
    x = kernel(x, embed, num, dim)
    if config.model_type in ("llama", "mistral"):
        if config.rope_parameters["rope_type"] == "llama3" and ".v_" not in name:
            first, second = np.split(x, 2, axis=-1)
            x = np.stack([first, second], axis=-1).reshape(x.shape)
        if ".q_" in name:
            x = x * np.float32(1 / np.sqrt(dim))
    return x


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
