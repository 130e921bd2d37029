"""`adapter_config.json` of a PEFT folder: which layers a LoRA adapter changes, by how much, and what is unsupported.

Knows PEFT's fields. Must not know models or tensors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"

# Fields that ask for more than low-rank products beside linear layers: (what they mean, what to do).
_REFUSED = {
    "use_dora": "DoRA also rescales the weights; merge the adapter into the model",
    "modules_to_save": "whole modules were trained; merge the adapter into the model",
    "lora_bias": "biases were trained; train with lora_bias=False, or merge the adapter into the model",
    "trainable_token_indices": "embeddings were trained; merge the adapter into the model",
    "target_parameters": "only linear layers can be adapted",
    "layer_replication": "the model would have other layers; merge the adapter into the model",
    "alora_invocation_tokens": "the adapter would begin in the middle of a prompt",
    "use_qalora": "QALoRA pools the inputs; merge the adapter into the model",
    "use_bdlora": "block-diagonal factors are stored in another way; merge the adapter into the model",
    "arrow_config": "a router would choose among adapters",
    "kasa_config": "its factors are three; merge the adapter into the model",
    "velora_config": "its inputs are compressed; merge the adapter into the model",
    "monteclora_config": "its factors are random; merge the adapter into the model",
}
# Values of `init_lora_weights` that do not change the model's own weights.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
_ANY_NUMBERED = r".*?\.[^.]*\.(?P<idx>\d+)\."  # see `_numbered`


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """What a LoRA adapter changes. Layers have transformers' module names."""

    file: Path
    rank: int
    alpha: float
    use_rslora: bool
    # A regular expression for whole names, name suffixes, or ALL_LINEAR.
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...] = ()
    layers: tuple[int, ...] = ()  # restricts to these layers; (): all
    layers_pattern: tuple[str, ...] = ()  # names of the lists that `layers` indexes; (): any
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def rank_of(self, name: str) -> int:
        """The rank of a layer's halves."""
        return _by_pattern(self.rank_pattern, name, self.rank)

    def scale_of(self, name: str) -> float:
        """The factor of the product of a layer's halves."""
        rank, alpha = self.rank_of(name), _by_pattern(self.alpha_pattern, name, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, name: str) -> bool:
        """Whether PEFT would put an adapter on the linear layer with that name."""
        if _matches(self.exclude_modules, name):
            return False
        if self.target_modules == ALL_LINEAR:
            return True
        if not _matches(self.target_modules, name):
            return False
        if isinstance(self.target_modules, str) or name in self.target_modules or not self.layers:
            return True
        expressions = [_numbered(p) for p in self.layers_pattern] or [_ANY_NUMBERED]
        found = next(filter(None, (re.match(e, name) for e in expressions)), None)
        # Another alternative of the expression may have matched, without a number.
        return found is not None and found["idx"] is not None and int(found["idx"]) in self.layers


def read_peft_config(folder: Path) -> PeftConfig:
    """Raises ValueError that names the file and the field, if this is not a LoRA adapter of linear layers."""
    file = folder / CONFIG
    if not folder.is_dir():
        raise ValueError(f"lora_path {str(folder)!r} is not a folder with {CONFIG}")
    if not file.is_file():
        raise ValueError(f"{folder} has no {CONFIG}, so it is not a PEFT adapter")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise ValueError(f"it holds a {type(raw).__name__}, not an object")
    except ValueError as error:  # from JSON or UTF-8 decoding
        raise ValueError(f"{file} is not valid: {error}") from None
    try:
        return _checked(file, raw)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not valid: {error}") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _checked(file: Path, raw: dict[str, Any]) -> PeftConfig:
    kind = raw.get("peft_type")
    if str(kind).upper() != "LORA":
        raise ValueError(f'peft_type is {kind!r}; only "LORA" can be applied')
    for name, reason in _REFUSED.items():
        if raw.get(name):
            raise ValueError(f"{name}={raw[name]!r} is not supported: {reason}")
    if raw.get("bias", "none") != "none":
        raise ValueError(f'bias={raw["bias"]!r} is not supported; train with bias="none"')
    start = raw.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise ValueError(
            f"init_lora_weights={start!r} is not supported: it changes the model's own weights. Save the adapter with "
            "path_initial_model_for_weight_conversion, which makes a plain one of it"
        )
    config = PeftConfig(
        file=file,
        rank=_rank("r", raw.get("r", 8)),
        alpha=_number("lora_alpha", raw.get("lora_alpha", 8)),
        use_rslora=bool(raw.get("use_rslora", False)),
        target_modules=_targets(raw.get("target_modules")),
        exclude_modules=_names("exclude_modules", raw.get("exclude_modules")),
        layers=_layers(raw.get("layers_to_transform")),
        layers_pattern=_all_names("layers_pattern", raw.get("layers_pattern")),
        rank_pattern=_patterns("rank_pattern", raw.get("rank_pattern"), _rank),
        alpha_pattern=_patterns("alpha_pattern", raw.get("alpha_pattern"), _number),
    )
    _check_expressions(config)
    return config


def _rank(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive int, got {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def _targets(value: Any) -> str | tuple[str, ...]:
    found = _names("target_modules", value)
    if not found:
        raise ValueError(f"target_modules names no layer, got {value!r}")
    if isinstance(found, str):
        return ALL_LINEAR if found.lower() == ALL_LINEAR else found
    for name in found:
        if name.split(".")[-1] in ("embed_tokens", "lm_head"):
            raise ValueError(
                f"target_modules has {name!r}: only linear layers of attention and MLP can be adapted; merge the "
                "adapter into the model"
            )
    return found


def _names(field: str, value: Any) -> str | tuple[str, ...]:
    """A regular expression, or a list of names."""
    if value is None or isinstance(value, str):
        return value or ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{field} must be a string or a list of strings, got {value!r}")
    return tuple(value)


def _all_names(field: str, value: Any) -> tuple[str, ...]:
    names = _names(field, value)
    return (names,) if isinstance(names, str) else names


def _layers(value: Any) -> tuple[int, ...]:
    numbers = [value] if isinstance(value, int) else value or []
    if not isinstance(numbers, list) or not all(isinstance(number, int) for number in numbers):
        raise ValueError(f"layers_to_transform must be an int or a list of ints, got {value!r}")
    return tuple(numbers)


def _patterns(field: str, value: Any, read: Any) -> dict[str, Any]:
    if not isinstance(value or {}, dict):
        raise ValueError(f"{field} must be an object, got {value!r}")
    return {name: read(f"{field}[{name!r}]", number) for name, number in (value or {}).items()}


def _check_expressions(config: PeftConfig) -> None:
    """Compile every regular expression, as it will be used."""
    found = [(field, getattr(config, field)) for field in ("target_modules", "exclude_modules")]
    expressions = [(field, each, each) for field, each in found if isinstance(each, str)]
    expressions += [("layers_pattern", each, _numbered(each)) for each in config.layers_pattern]
    for field in ("rank_pattern", "alpha_pattern"):
        expressions += [(field, each, _at_end(each)) for each in getattr(config, field)]
    for field, given, expression in expressions:
        try:
            re.compile(expression)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{field}: a regular expression cannot be read: {given!r}: {getattr(error, 'msg', error)}"
            ) from None


def _matches(expression: str | Iterable[str], name: str) -> bool:
    if isinstance(expression, str):
        return re.fullmatch(expression, name) is not None
    return any(name == ending or name.endswith(f".{ending}") for ending in expression)


def _numbered(pattern: str) -> str:
    """PEFT's expression for the number of a layer, which follows the pattern in its name."""
    return rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\."


def _at_end(pattern: str) -> str:
    """PEFT's expression for the names that end with the pattern."""
    return rf"(.*\.)?({pattern})$"


def _by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    return next((v for key, v in patterns.items() if re.match(_at_end(key), name)), default)
