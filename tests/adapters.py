"""LoRA adapters as PEFT would save them, made with NumPy, and checkpoints into which they are merged."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxpage import LoRARequest
from jaxpage.weights.safetensors import open_checkpoint

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def linear_shapes(checkpoint: Path, targets: Sequence[str] = ALL) -> dict[str, tuple[int, int]]:
    """[out, in] of a checkpoint's layers with these names."""
    tensors = open_checkpoint(checkpoint)
    names = {name.removesuffix(".weight"): x.shape for name, x in tensors.items()}
    found = {name: shape for name, shape in names.items() if name.split(".")[-1] in targets}
    return {name: shape[::-1] if is_turned(name) else shape for name, shape in found.items()}


def is_turned(name: str) -> bool:
    """Whether the layer's weight is stored [in, out]: GPT-2's."""
    return name.startswith("transformer.h.")


def save_adapter(
    path: str | Path,
    checkpoint: Path,
    *,
    seed: int,
    rank: int = 4,
    alpha: float = 8,
    targets: Sequence[str] = ALL,
    strength: float = 1.0,
    **fields: Any,
) -> Path:
    """A PEFT folder with random halves for the layers of `checkpoint` that `targets` names.

    `fields` of adapter_config.json come on top. "rank_pattern" is obeyed where it has whole names.
    """
    rng, path = np.random.default_rng(seed), Path(path)
    tensors = {}
    for name, (num_out, num_in) in linear_shapes(checkpoint, targets).items():
        r = fields.get("rank_pattern", {}).get(name, rank)
        a = rng.normal(0, num_in**-0.5, (r, num_in))
        b = rng.normal(0, strength * r**-0.5, (num_out, r))
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.astype(np.float32)
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.astype(np.float32)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets)}
    write(path, config | fields, tensors)
    return path


def write(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """The two files of a PEFT folder."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})


def merged(path: str | Path, checkpoint: Path, adapter: Path) -> Path:
    """A copy of a float32 checkpoint whose weights are W + scale B A."""
    path = Path(path)
    shutil.copytree(checkpoint, path)
    weights = load_file(checkpoint / "model.safetensors")
    halves = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for name in weights:
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in halves:
            a, b = halves[f"{prefix}.lora_A.weight"], halves[f"{prefix}.lora_B.weight"]
            layer = name.removesuffix(".weight")
            alpha = config.get("alpha_pattern", {}).get(layer, config["lora_alpha"])
            rank = math.sqrt(len(a)) if config.get("use_rslora") else len(a)
            change = alpha / rank * (b.astype(np.float64) @ a.astype(np.float64))
            change = change.T if is_turned(name) else change
            weights[name] = (weights[name] + change).astype(np.float32)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def lora(number: int, path: Path, **fields: Any) -> LoRARequest:
    """A request for an adapter of that number."""
    return LoRARequest(f"adapter {number}", number, str(path), **fields)
