"""Other names of sampling parameters: LMDeploy's `GenerationConfig`, older vLLM.

Only names with the same meaning. Each is warned about once, at its first use, with the name to use instead.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from jaxpage.structured_outputs.params import from_response_format

logger = logging.getLogger(__name__)

Class = TypeVar("Class", bound=type)

# Old or foreign name -> standard name.
_SAME = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "random_seed": "seed",
    "stop_words": "stop",
    "guided_decoding": "structured_outputs",
}
# The fields of `StructuredOutputsParams`, as requests of vLLM named them before 0.12.
_GUIDED = {
    f"guided_{name}": name
    for name in ("json", "regex", "choice", "grammar", "json_object", "whitespace_pattern")
}
_told: set[str] = set()


def accept_aliases(cls: Class) -> Class:
    """A class whose constructor also takes other names. Raises TypeError if a value is given under two names."""
    init: Callable = cls.__init__

    @functools.wraps(init)
    def __init__(self: Any, *values: Any, **options: Any) -> None:
        init(self, *values, **with_standard_names(options))

    setattr(cls, "__init__", __init__)  # noqa: B010, the type checker knows the fields only from the class
    return cls


def with_standard_names(options: dict[str, Any]) -> dict[str, Any]:
    """The options under vLLM's names. Raises TypeError for a value under two names, ValueError for invalid values."""
    if options.keys().isdisjoint(_ALL):
        return options
    standard = {name: value for name, value in options.items() if name not in _ALL}

    def put(name: str, given: str, value: Any) -> None:
        if value is None:
            return
        if standard.get(name) is not None:
            raise TypeError(f"{given} is another name of {name}; give one of them")
        standard[name] = value
        tell(given, f"use {name}")

    for given, name in _SAME.items():
        put(name, given, options.get(given))
    guided = {_GUIDED[name]: value for name, value in options.items() if name in _GUIDED}
    guided = {name: value for name, value in guided.items() if value is not None}
    if guided:
        put("structured_outputs", "guided_" + next(iter(guided)), guided)
    response_format = from_response_format(options.get("response_format"))
    put("structured_outputs", "response_format", response_format)
    if options.get("do_sample") is False:
        put("temperature", "do_sample", 0.0)
    if options.get("guided_decoding_backend") is not None:
        tell("guided_decoding_backend", "it cannot be chosen")
    return standard


def tell(name: str, instead: str) -> None:
    """Warn about an old or foreign name, once."""
    if name not in _told:
        _told.add(name)
        logger.warning("%s is not a name of jaxpage's own: %s", name, instead)


_ALL = {*_SAME, *_GUIDED, "response_format", "do_sample", "guided_decoding_backend"}
