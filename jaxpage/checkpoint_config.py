"""The JSON files of a checkpoint that say what it is and how to sample from it.

Knows config.json and generation_config.json, as transformers reads them. Runs no code of a checkpoint.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpage.eagle_config import flattened

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from jaxpage.config import EngineConfig


# Kinds of models that transformers does not know -> one that has the same options and tensors.
_SAME_AS = {"kimi_k2": "deepseek_v3"}


class CheckpointValues:
    """What config.json says, under the names of vLLM's `ModelConfig`. Read when first asked for."""

    model: str
    hf_config_path: str | None
    hf_overrides: dict[str, Any] | Callable[[Any], Any] | None

    @functools.cached_property
    def hf_config(self) -> PretrainedConfig:
        """config.json as transformers reads it, with `hf_overrides`."""
        return load_hf_config(self.hf_config_path or self.model, self.hf_overrides)

    @property
    def hf_text_config(self) -> PretrainedConfig:
        """The part about text, of models that take pictures; else the same."""
        return self.hf_config.get_text_config()

    @property
    def architectures(self) -> list[str]:
        return self.hf_config.architectures or []

    def get_vocab_size(self) -> int:
        return self.hf_text_config.vocab_size

    def get_hidden_size(self) -> int:
        return self.hf_text_config.hidden_size

    def get_total_num_hidden_layers(self) -> int:
        return self.hf_text_config.num_hidden_layers


def load_hf_config(
    model: str, hf_overrides: dict[str, Any] | Callable[[Any], Any] | None = None
) -> PretrainedConfig:
    """config.json of the folder `model`, or that file, with `hf_overrides` applied, as transformers reads it.

    Reads no other file, runs no code of the checkpoint, asks no network. Raises ValueError.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig

    file = Path(model) if Path(model).is_file() else Path(model, "config.json")
    if not file.parent.is_dir():
        raise ValueError(
            f"model={model!r} is not a folder; give the folder of a checkpoint, which can be had with "
            "hf download NAME --local-dir FOLDER"
        )
    values = flattened(_read_json(file), file)
    if isinstance(hf_overrides, dict):
        values = _merge(values, hf_overrides)
    model_type = values.get("model_type", "")
    if not model_type or not isinstance(model_type, str):
        raise ValueError(f"{file} names no model_type, so it is not the config.json of a model")
    model_type = values["model_type"] = _SAME_AS.get(model_type, model_type)
    names = values.get("architectures") or []
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{file}: architectures must be a list of names, got {names!r}")
    if model_type not in CONFIG_MAPPING:
        code = "its code comes with the checkpoint, which is never run, whatever trust_remote_code says"
        raise ValueError(
            f"{file} has model_type {model_type!r}, which this version of transformers does not know"
            f"{'; ' + code if 'auto_map' in values else ''}"
        )
    if model_type == "mistral" and "layer_types" in values:
        # As transformers' AutoConfig does: only this class has windows in some layers (Ministral 8B).
        model_type = values["model_type"] = "ministral"
    try:
        config = CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:  # of many types, according to what is wrong
        reason = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise ValueError(f"{file} cannot be read: {reason}") from error
    if callable(hf_overrides):
        config = hf_overrides(config)
        if not isinstance(config, PretrainedConfig):
            raise ValueError(f"hf_overrides must return a config, it returned {config!r}")
    text = config.get_text_config(decoder=True)
    if getattr(text, "rope_parameters", None):
        # Reading the file, transformers overlooks an original_max_position_embeddings beside these parameters; this
        # call, which its models make too, finds it.
        text.standardize_rope_params()
    return config


def load_generation_config(config: EngineConfig) -> dict[str, Any]:
    """generation_config.json as `generation_config` says, with the overrides. Raises ValueError."""
    values = {}
    if config.generation_config == "auto":
        path = Path(config.hf_config_path or config.model) / "generation_config.json"
        values = _read_json(path) if path.is_file() else {}
    elif config.generation_config != "vllm":
        values = _read_json(Path(config.generation_config) / "generation_config.json")
    return values | (config.override_generation_config or {})


def default_sampling(generation_config: dict[str, Any]) -> dict[str, Any]:
    """The part of a generation config that makes default SamplingParams, under their names."""
    names = {"max_new_tokens": "max_tokens"} | {
        name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    }
    return {
        ours: generation_config[theirs]
        for theirs, ours in names.items()
        if generation_config.get(theirs) is not None
    }


def eos_token_ids(
    hf_config: PretrainedConfig, generation_config: dict[str, Any], tokenizer: Any = None
) -> tuple[int, ...]:
    """Every id that ends a sequence: of the tokenizer, of config.json, of the generation config.

    The first is the model's EOS proper; the others count as stop ids, and are the `stop_reason` (as in vLLM).
    """
    found: dict[int, None] = {}
    for source, value in (
        ("the tokenizer", getattr(tokenizer, "eos_token_id", None)),
        ("config.json", getattr(hf_config, "eos_token_id", None)),
        ("config.json", getattr(hf_config.get_text_config(), "eos_token_id", None)),
        ("the generation config", generation_config.get("eos_token_id")),
    ):
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ValueError(
                f"eos_token_id of {source} must be a token id or a list of them, got {value!r}"
            )
        found.update(dict.fromkeys(ids))
    return tuple(found)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_hook=_float_of)
    except FileNotFoundError:
        raise ValueError(
            f"{path} does not exist; is the folder a checkpoint? Where weights are alone, hf_config_path is the "
            "folder, or name on the hub, of config.json and the tokenizer"
        ) from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is not JSON: {e}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, it holds a {type(values).__name__}")
    return values


def _float_of(values: dict[str, Any]) -> Any:
    """transformers writes what JSON does not know, as {"__float__": "Infinity"}."""
    tag = values.get("__float__")
    if len(values) == 1 and tag in ("Infinity", "-Infinity", "NaN"):
        return float(tag)
    return values


def _merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
