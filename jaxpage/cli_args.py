"""The engine's options as flags of a script that uses argparse, as vLLM's `EngineArgs.add_cli_args` adds them.

jaxpage's own commands have `flags`. Knows names and what values look like; must not know what an option does.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, get_args, get_origin, get_type_hints

from jaxpage.vllm_flags import SEVERAL, SHORT, is_switch, to_value
from jaxpage.vllm_options import NAMES

_FOR_PYTHON = ("mesh", "research", "logits_processors", "options_without_effect")
_SHORT = {name: flag for flag, name in SHORT.items()} | {
    "tensor_parallel_size": "-tp",
    "data_parallel_size": "-dp",
}


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """Add the fields of a dataclass, and vLLM's further options. The default of each is None, which means its own."""
    hints = get_type_hints(config)
    ours = [field.name for field in dataclasses.fields(config) if field.name not in _FOR_PYTHON]
    group = parser.add_argument_group("engine", "options of jaxpage.LLM; objects as JSON")
    for name in ours:
        _add(group, name, _how_ours(hints[name]))
    for name in sorted({*NAMES, "reasoning_parser"} - {*ours, *_FOR_PYTHON}):
        if not name.startswith("_"):
            _add(group, name, _how_vllm_s(name))


def given_flags(args: argparse.Namespace, config: type) -> dict[str, Any]:
    """The options among the parsed flags of a script."""
    names = {field.name for field in dataclasses.fields(config)} | {*NAMES, "reasoning_parser"}
    return {name: value for name, value in vars(args).items() if name in names}


def _add(group: Any, name: str, how: dict[str, Any]) -> None:
    flags = [f"--{name.replace('_', '-')}", *([_SHORT[name]] if name in _SHORT else [])]
    group.add_argument(*flags, dest=name, default=None, **how)


def _how_ours(hint: Any) -> dict[str, Any]:
    """How a value of this type is written."""
    kinds = {kind for kind in get_args(hint) or (hint,) if kind is not type(None)}
    if get_origin(hint) is tuple:
        return {"nargs": "+"}
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": str if kinds == {str} else to_value}


def _how_vllm_s(name: str) -> dict[str, Any]:
    if is_switch(name):
        return {"action": argparse.BooleanOptionalAction}
    return {"type": to_value, "nargs": "+"} if name in SEVERAL else {"type": to_value}
