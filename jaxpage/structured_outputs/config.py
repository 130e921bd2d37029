"""How structured outputs are served: vLLM's `StructuredOutputsConfig`, and the limits that protect the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BACKENDS = ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsConfig:
    """The first names are vLLM's (0.32), the last four jaxpage's own. Raises ValueError for bad values."""

    backend: str = "auto"  # whatever is asked for, llguidance does it
    disable_fallback: bool = False  # there is none
    disable_any_whitespace: bool = False  # as if every request said so
    disable_additional_properties: bool = False  # likewise
    reasoning_parser: str = ""  # becomes that of `reasoning_config`, if it has none
    reasoning_parser_plugin: str = ""
    enable_in_reasoning: bool = False  # a model that reasons is constrained from its first token

    max_grammar_bytes: int = 2**20  # of the text of a schema, a regex or a grammar
    max_nesting: int = 128  # lists and objects within each other in a schema
    compile_timeout: float = (
        30.0  # seconds, from the request's arrival until its grammar is compiled
    )
    max_mask_time: float = (
        0.05  # seconds, about, for one mask; a grammar that needs more has failed
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
    """The config itself, of a dict of its fields, or of None, which means the defaults. Raises ValueError."""
    if isinstance(value, StructuredOutputsConfig):
        return value
    names = {f.name for f in dataclasses.fields(StructuredOutputsConfig)}
    if value is not None and not (isinstance(value, Mapping) and set(value) <= names):
        raise ValueError(
            f"structured_outputs_config must be a StructuredOutputsConfig or a dict of {', '.join(sorted(names))}, "
            f"got {value!r}"
        )
    return StructuredOutputsConfig(**(value or {}))
