"""Options of structured outputs: vLLM's `StructuredOutputsConfig`, and limits that protect the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BACKENDS = ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsConfig:
    """The first fields are vLLM's (0.32), the last four jaxpage's own. Raises ValueError for invalid values."""

    backend: str = "auto"  # always llguidance, whatever is given
    disable_fallback: bool = False  # there is none
    disable_any_whitespace: bool = False  # as if set in every request
    disable_additional_properties: bool = False  # as if set in every request
    reasoning_parser: str = ""  # for `reasoning_config`, if that has none
    reasoning_parser_plugin: str = ""
    enable_in_reasoning: bool = False  # constrain reasoning models from their first token

    max_grammar_bytes: int = 2**20  # size of a schema, a regex or a grammar
    max_nesting: int = 128  # depth of lists and objects in a schema
    compile_timeout: float = (
        30.0  # seconds, from the arrival of a request until its grammar is compiled
    )
    max_mask_time: float = (
        0.05  # seconds, approximately, for one mask; a grammar that needs more fails
    )

    def __post_init__(self) -> None:
        if self.backend not in _BACKENDS:
            raise ValueError(
                f"backend of structured_outputs_config must be one of {', '.join(_BACKENDS)}, got {self.backend!r}"
            )
        if self.reasoning_parser_plugin:
            raise ValueError(
                "reasoning_parser_plugin of structured_outputs_config would run code of a file, which "
                "jaxpage does not; leave it empty"
            )
        for name in ("max_grammar_bytes", "max_nesting", "compile_timeout", "max_mask_time"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(
                    f"{name} of structured_outputs_config must be a number greater than 0, got {value!r}"
                )


def to_structured_outputs_config(value: Any) -> StructuredOutputsConfig:
    """The config, from itself, a dict of its fields, or None for the defaults. Raises ValueError."""
    if isinstance(value, StructuredOutputsConfig):
        return value
    names = {f.name for f in dataclasses.fields(StructuredOutputsConfig)}
    if value is not None and not (isinstance(value, Mapping) and set(value) <= names):
        raise ValueError(
            f"structured_outputs_config must be a StructuredOutputsConfig or a dict of {', '.join(sorted(names))}, "
            f"got {value!r}"
        )
    return StructuredOutputsConfig(**(value or {}))
