"""What a sentence-transformers folder contains besides the model: `modules.json` and the files it names.

Knows that package's file formats, and only reads them. Must not know how anything is computed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_POOLING = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
_OLD_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_ACTIVATIONS = {"identity": None, "tanh": "tanh"}
_MODEL_FILES = ("sentence_bert_config.json", "sentence_roberta_config.json")


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A linear layer after pooling, whose weights are in a separate folder."""

    folder: Path
    size_in: int
    size_out: int
    has_bias: bool
    activation: str | None  # "tanh" or None


@dataclass(frozen=True, kw_only=True)
class SentenceTransformer:
    """The modules after the model, and how its texts are prepared."""

    pooling: str | None = None  # CLS, LAST or MEAN; None: not given
    includes_prompt: bool = True  # whether the mean includes the tokens of a prompt
    dense: tuple[Dense, ...] = ()
    normalizes: bool = False
    max_seq_length: int | None = None  # tokens of a text, special ones included
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name; prepended to texts


def has_modules(folder: Path) -> bool:
    """Whether it is a sentence-transformers folder with a pooling module."""
    modules = _read(folder / "modules.json", list)
    return any(_kind(module) == "Pooling" for module in modules or ())


def read_sentence_transformer(folder: Path) -> SentenceTransformer:
    """Read a folder; the defaults for one of another kind. Raises ValueError for what is not supported."""
    model = next((found for name in _MODEL_FILES if (found := _read(folder / name, dict))), {})
    config = _read(folder / "config_sentence_transformers.json", dict) or {}
    fields: dict[str, Any] = {
        "max_seq_length": model.get("max_seq_length"),
        "lower_case": bool(model.get("do_lower_case")),
        "prompts": {k: v for k, v in (config.get("prompts") or {}).items() if isinstance(v, str)},
    }
    dense: list[Dense] = []
    for module in _read(folder / "modules.json", list) or ():
        kind, path = _kind(module), folder / str(module.get("path") or "")
        if kind == "Transformer":
            if path != folder:
                raise ValueError(
                    f"{folder}/modules.json places the model in {path.name}; move its files into {folder}"
                )
        elif kind == "Pooling":
            fields |= _pooling(path)
        elif kind == "Dense":
            dense.append(_dense(path))
        elif kind == "Normalize":
            fields["normalizes"] = True
        elif kind != "Dropout":
            raise ValueError(
                f"{folder}/modules.json has a module {kind!r}, which is not supported; supported are "
                "Transformer, Pooling, Dense and Normalize"
            )
    return SentenceTransformer(**fields, dense=tuple(dense))


def _kind(module: Any) -> str:
    return str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""


def _pooling(folder: Path) -> dict[str, Any]:
    config = _read(folder / "config.json", dict)
    if config is None:
        raise ValueError(f"{folder}/config.json, which modules.json names, does not exist")
    modes = config.get("pooling_mode") or [m for k, m in _OLD_POOLING.items() if config.get(k)]
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in _POOLING:
        raise ValueError(
            f"{folder}/config.json pools by {' and '.join(modes) or 'nothing'}; it must be exactly one of "
            f"{', '.join(_POOLING)}"
        )
    return {"pooling": _POOLING[modes[0]], "includes_prompt": config.get("include_prompt", True)}


def _dense(folder: Path) -> Dense:
    config = _read(folder / "config.json", dict)
    if config is None:
        raise ValueError(f"{folder}/config.json, which modules.json names, does not exist")
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = name.rpartition(".")[2].lower()
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"{folder}/config.json has the activation {name!r}; supported are Identity and Tanh"
        )
    if not (folder / "model.safetensors").is_file():
        raise ValueError(f"{folder} has no model.safetensors; pickled weights are not read")
    return Dense(
        folder=folder,
        size_in=config["in_features"],
        size_out=config["out_features"],
        has_bias=config.get("bias", True),
        activation=_ACTIVATIONS[activation],
    )


def _read(file: Path, kind: type) -> Any:
    """The parsed JSON of a file; None if it does not exist. Raises ValueError."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    if not isinstance(value, kind):
        raise ValueError(f"{file} must contain a {kind.__name__}, not a {type(value).__name__}")
    return value
