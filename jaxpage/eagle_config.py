"""config.json of EAGLE heads: how they are recognised, and the format of the library speculators.

Knows JSON alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Architecture -> method: vLLM's names of heads, and SGLang's and SpecForge's.
HEADS = {
    "Eagle3LlamaForCausalLM": "eagle3",
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3Qwen3ForCausalLM": "eagle3",
    "Eagle3Qwen2_5vlForCausalLM": "eagle3",
    "Eagle3Qwen3vlForCausalLM": "eagle3",
    "EagleLlamaForCausalLM": "eagle",
    "LlamaForCausalLMEagle": "eagle",
}
# Of the layers of EAGLE-3: Llama's, and Qwen 3's, which has norms of queries and keys.
LAYERS = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}


def method_of_head(model: str) -> str | None:
    """The method that the architecture in config.json of the folder `model` needs, or in the file of this name; None if
    that is no head.

    None too for what cannot be read: whoever loads it reports what is wrong.
    """
    file = Path(model) if Path(model).is_file() else Path(model, "config.json")
    try:
        values = flattened(json.loads(file.read_text(encoding="utf-8")), file)
        return HEADS.get(values["architectures"][0])
    except (ValueError, OSError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def flattened(values: dict[str, Any], file: Path) -> dict[str, Any]:
    """The values of a head that speculators wrote as other trainers write them, and as vLLM reads them; those of any
    other config unchanged. Raises ValueError for a speculator of another kind.
    """
    if "speculators_config" not in values:
        return values
    algorithm, layer = values.get("speculators_model_type"), values.get("transformer_layer_config")
    kind = layer.get("model_type") if isinstance(layer, dict) else None
    if algorithm != "eagle3" or not isinstance(layer, dict) or kind not in [*LAYERS]:
        raise ValueError(
            f"{file} is of a speculator {algorithm!r} with a layer {kind!r}; supported are "
            f"'eagle3' with a layer of {', '.join(LAYERS)}"
        )
    inner = ("transformer_layer_config", "speculators_config", "architectures", "auto_map")
    own = {name: value for name, value in values.items() if name not in inner and value is not None}
    # That is the library's default, and not that of other heads.
    own.setdefault("norm_before_residual", True)
    return layer | own | {"model_type": kind, "architectures": [LAYERS[kind]]}
