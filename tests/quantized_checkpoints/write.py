"""Checkpoint folders."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from tests.quantized_checkpoints.format import DTYPES, Array, Format

_ROUTERS = (".gate", ".router", ".shared_expert_gate")


def write(
    source: Path,
    target: Path,
    format: Format,
    *,
    ignore: Sequence[str] = ("lm_head",),
    routers: bool = False,
    dtype: str | None = None,
    shards: int = 1,
) -> dict[str, Array]:
    """Write the float checkpoint in `source`, quantised, to the folder `target`; return the dequantised weights.

    They are float32 arrays of all tensors under the names of `source`, with the values that `target` has. Quantised
    are the matrices of decoder layers, lm_head and mtp.fc, but for layers in `ignore`: names, or dotted parts of names,
    or "re:" and a regular expression for the beginning of one; the config has them as they are. Routers are only with
    `routers`. `dtype` is that of all other tensors, if not the format's own. With several `shards`, files, what
    belongs to one layer may be in different ones.
    """
    dtype = dtype or format.dtype
    floats = safetensors.numpy.load_file(source / "model.safetensors")
    candidates = [name.removesuffix(".weight") for name in floats if _is_matrix(name, floats[name])]
    kept_routers = [name for name in candidates if name.endswith(_ROUTERS) and not routers]
    layers = {
        name for name in candidates if name not in kept_routers and not _matches(name, ignore)
    }
    stored: dict[str, Array] = {}
    meaning: dict[str, Array] = {}
    for name, array in sorted(floats.items()):
        layer = name.removesuffix(".weight")
        if layer in layers and layer != name:
            tensors, meaning[name] = format.quantize(layer, array.astype(np.float32))
            stored |= {f"{layer}.{suffix}": tensor for suffix, tensor in tensors.items()}
        else:
            stored[name] = array.astype(DTYPES[dtype])
            meaning[name] = stored[name].astype(np.float32)
    if format.zero_biases:
        stored = _zero_biases(layers, meaning, DTYPES[dtype]) | stored
    if format.kv_scales:
        stored |= _kv_scales(layers)
    quantization = format.config([*ignore, *kept_routers])
    _write_folder(source, target, dtype, {format.config_file: quantization})
    _write_tensors(target, stored, shards)
    return meaning


def write_float(source: Path, target: Path, weights: Mapping[str, Array]) -> Path:
    """Write float32 `weights` with the config of the checkpoint in `source` to the folder `target`; return it."""
    _write_folder(source, target, "float32", {})
    _write_tensors(target, weights, 1)
    return target


def _write_folder(
    source: Path, target: Path, dtype: str, quantization: Mapping[str, dict[str, Any]]
) -> None:
    """All but tensors: as in `source`, with `quantization` by the file that it is written to."""
    shutil.copytree(
        source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors")
    )
    config = json.loads((source / "config.json").read_text()) | {"dtype": dtype}
    for file, content in quantization.items():
        if file == "config.json":
            config["quantization_config"] = content
        else:
            (target / file).write_text(json.dumps(content, indent=2))
    (target / "config.json").write_text(json.dumps(config, indent=2))


def _write_tensors(folder: Path, tensors: Mapping[str, Array], shards: int) -> None:
    names = sorted(tensors)
    files = {}
    for shard in range(shards):
        file = (
            f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            if shards > 1
            else "model.safetensors"
        )
        content = {name: np.array(tensors[name], order="C") for name in names[shard::shards]}
        safetensors.numpy.save_file(content, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(content, file)
    if shards > 1:
        size = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _is_matrix(name: str, array: Array) -> bool:
    known = ".layers." in name or name in ("lm_head.weight", "mtp.fc.weight")
    return known and array.ndim == 2 and name.endswith(".weight")


def _matches(layer: str, patterns: Sequence[str]) -> bool:
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern.removeprefix("re:"), layer):
                return True
        elif f".{pattern}." in f".{layer}.":
            return True
    return False


def _zero_biases(layers: set[str], weights: Mapping[str, Array], dtype: Any) -> dict[str, Array]:
    return {f"{name}.bias": np.zeros(len(weights[f"{name}.weight"]), dtype) for name in layers}


def _kv_scales(layers: set[str]) -> dict[str, Array]:
    """float32 of shape []."""
    attentions = {
        name.rpartition(".")[0] for name in layers if name.endswith((".k_proj", ".qkv_proj"))
    }
    keys = {f"{name}.k_scale": np.array(0.05, np.float32) for name in attentions}
    return keys | {f"{name}.v_scale": np.array(0.04, np.float32) for name in attentions}
