"""Flags from a YAML file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml


def with_config_file(args: Sequence[str]) -> list[str]:
    """The flags in the YAML file of `--config`, followed by those given here. Raises ValueError."""
    args = list(args)
    path = next((b for a, b in zip(args, args[1:], strict=False) if a == "--config"), None)
    if path is None:
        return args
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--config {path} must have flags and their values, as in port: 8000")
    model = values.pop("model", None)
    if model is not None and (not args or args[0].startswith("-")):
        args.insert(0, str(model))
    given = [word for name, value in values.items() for word in _as_flag(str(name), value)]
    return [*args[:1], *given, *args[1:]] if args and not args[0].startswith("-") else given + args


def _as_flag(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    match value:
        case None:
            return []
        case bool():
            return [flag if value else f"--no-{flag[2:]}"]
        case list():
            return [flag, *map(str, value)]
        case dict():
            return [flag, json.dumps(value)]
        case _:
            return [flag, str(value)]
