"""The option `lora_modules`: the adapters that a server has from its start. Checked before the model is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from jaxpage.config import EngineConfig
from jaxpage.weights.peft_config import read_peft_config


def parse_modules(modules: Sequence[str], model_names: Sequence[str]) -> list[tuple[str, str]]:
    """(name, path) of each adapter. Raises ValueError for one that is malformed, or whose name is taken."""
    found = [_parse(module) for module in modules]
    names = [name for name, _ in found]
    for name in names:
        if names.count(name) > 1 or name in model_names:
            raise ValueError(f"lora_modules: {name!r} is the name of something else too")
    return found


def check_folders(modules: Sequence[str]) -> None:
    """Raise ValueError if a folder is not a LoRA adapter. Reads its configuration, not its weights."""
    for name, path in parse_modules(modules, ()):
        try:
            read_peft_config(Path(path))
        except (ValueError, OSError) as error:
            raise ValueError(f"lora_modules: {name}={path}: {error}") from None


def check_engine(modules: Sequence[str], config: EngineConfig) -> None:
    """Raise ValueError if an engine with these options takes no adapters."""
    if modules and not config.enable_lora:
        raise ValueError(
            f"lora_modules names {len(modules)} adapter(s), but the engine takes none; add --enable-lora"
        )


def _parse(module: str) -> tuple[str, str]:
    """(name, path) from "name=path", or from vLLM's JSON."""
    if module.startswith("{"):
        try:
            fields = json.loads(module)
            name, path = fields["name"], fields["path"]
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"lora_modules: {module!r} is not {{'name': ..., 'path': ...}}: {error!r}"
            ) from None
    else:
        name, _, path = module.partition("=")
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise ValueError(f"lora_modules: {module!r} is not NAME=PATH")
    return name, path
