"""vLLM's class for the options of the engine, which can also add them to a script that uses argparse.

jaxpage's own commands have `flags`. Knows names and what values look like; must not know what an option does.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from jaxpage.config import EngineConfig
from jaxpage.vllm_flags import SEVERAL, SHORT, is_switch, to_value
from jaxpage.vllm_options import NAMES

_FOR_PYTHON = {"mesh", "research", "logits_processors", "options_without_effect"}
_OURS = [field.name for field in dataclasses.fields(EngineConfig) if field.name not in _FOR_PYTHON]
_VLLM_S = [
    name
    for name in sorted({*NAMES, "reasoning_parser"} - {*_OURS, *_FOR_PYTHON})
    if not name.startswith("_")
]
_SHORT = {name: flag for flag, name in SHORT.items()} | {
    "tensor_parallel_size": "-tp",
    "data_parallel_size": "-dp",
}


@dataclass(frozen=True, kw_only=True, init=False)
class EngineArgs(EngineConfig):
    """vLLM's class for options: `LLM(**dataclasses.asdict(EngineArgs(model=..., ...)))`.

    Takes the arguments of `EngineConfig.from_options`, and raises the same errors.
    """

    def __init__(self, model: str, **options: Any):
        config = EngineConfig.from_options(model=model, **options)
        for f in dataclasses.fields(config):
            object.__setattr__(self, f.name, getattr(config, f.name))

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each option, also of vLLM; then `LLM(**vars(parser.parse_args()))`.

        The default of each is None, which means the option's own.
        """
        group = parser.add_argument_group("engine", "options of jaxpage.LLM; objects as JSON")
        hints = get_type_hints(EngineConfig)
        for name in _OURS:
            _add(group, name, _how_ours(hints[name]))
        for name in _VLLM_S:
            _add(group, name, _how_vllm_s(name))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """The options among the parsed flags of a script; other flags are its own."""
        return cls(**{name: x for name, x in vars(args).items() if name in {*_OURS, *_VLLM_S}})


AsyncEngineArgs = EngineArgs  # vLLM has a separate class for its asynchronous engine


def _add(group: Any, name: str, how: dict[str, Any]) -> None:
    flags = [f"--{name.replace('_', '-')}", *([_SHORT[name]] if name in _SHORT else [])]
    group.add_argument(*flags, dest=name, default=None, **how)


def _how_ours(hint: Any) -> dict[str, Any]:
    """How a value of this type is written."""
    kinds = {kind for kind in get_args(hint) or (hint,) if kind is not type(None)}
    if get_origin(hint) is tuple:
        return {"nargs": "+"}
    if kinds == {bool, str}:
        return {"nargs": "?", "const": True}
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": str if kinds == {str} else to_value}


def _how_vllm_s(name: str) -> dict[str, Any]:
    if is_switch(name):
        return {"action": argparse.BooleanOptionalAction}
    return {"type": to_value, "nargs": "+"} if name in SEVERAL else {"type": to_value}
