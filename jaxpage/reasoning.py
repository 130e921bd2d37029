"""What begins and ends a model's reasoning: as text, an option of the engine; as token ids, in a request.

Knows markers and a tokenizer. Must not know what is done with the ids: see `sampling.thinking`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_MARKER_LEN = 64  # tokens of a marker

# Reasoning parsers of vLLM, for models that jaxpage has -> what begins and ends the reasoning that they find.
MARKERS: dict[str, tuple[str, str]] = dict.fromkeys(
    ("deepseek_r1", "qwen3"), ("<think>", "</think>")
)


@dataclass(frozen=True, kw_only=True)
class ReasoningConfig:
    """Names and meanings are vLLM's (0.32). Raises ValueError for what is no string."""

    reasoning_parser: str = ""  # its markers are used where the strings below are empty
    reasoning_start_str: str = ""  # after it a model reasons
    # What is forced when the budget is spent. It may begin with words that lead to the parser's own end marker, which
    # then is what ends the reasoning; without a parser only the whole of it does.
    reasoning_end_str: str = ""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, str):
                raise ValueError(f"{f.name} of reasoning_config must be a string, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class ReasoningTokens:
    """The markers as token ids, each of 1 to MAX_MARKER_LEN."""

    start: tuple[int, ...]
    end: tuple[int, ...]  # ends the reasoning, whoever wrote it
    forced_end: tuple[int, ...]  # what is written when the budget is spent


def to_reasoning_config(value: Any) -> ReasoningConfig | None:
    """A config of one, of a dict of its fields, or of None or an empty dict, which mean none. Raises ValueError."""
    if value is None or isinstance(value, ReasoningConfig):
        return value
    names = [f.name for f in dataclasses.fields(ReasoningConfig)]
    if not isinstance(value, Mapping) or not set(value) <= set(names):
        raise ValueError(
            f"reasoning_config must be a ReasoningConfig or a dict of {', '.join(names)}, got {value!r}"
        )
    return ReasoningConfig(**value) if value else None


def with_parser(config: Any, parser: str) -> ReasoningConfig:
    """`config`, in any form that `to_reasoning_config` takes, with another parser. Raises ValueError."""
    return dataclasses.replace(
        to_reasoning_config(config) or ReasoningConfig(), reasoning_parser=parser
    )


def reasoning_tokens(
    config: Any, tokenizer: Any, vocab_size: int, *, wanted_by: str = "thinking_token_budget"
) -> ReasoningTokens:
    """The markers of `config`, in any form that `to_reasoning_config` takes, tokenised as vLLM does it.

    `tokenizer`: one of transformers, or None. `wanted_by`: what an error names.

    Raises ValueError without a tokenizer, for markers that are not known, and for those that the model or the sampler
    cannot take.
    """
    start, end, forced_end = _markers(to_reasoning_config(config) or ReasoningConfig(), wanted_by)
    if tokenizer is None:
        raise ValueError(f"{wanted_by} needs a tokenizer")

    def ids(marker: str) -> tuple[int, ...]:
        found = tuple(tokenizer.encode(marker, add_special_tokens=False))
        if not 1 <= len(found) <= MAX_MARKER_LEN or max(found) >= vocab_size:
            raise ValueError(
                f"{marker!r} of reasoning_config is the token ids {list(found)}; it must have 1 to "
                f"{MAX_MARKER_LEN} of the model's ids 0..{vocab_size - 1}"
            )
        return found

    return ReasoningTokens(start=ids(start), end=ids(end), forced_end=ids(forced_end))


def _markers(config: ReasoningConfig, wanted_by: str) -> tuple[str, str, str]:
    """What begins reasoning, what ends it, and what is forced. Raises ValueError."""
    parser = config.reasoning_parser
    if parser and parser not in MARKERS:
        raise ValueError(
            f"{wanted_by} needs the markers of reasoning, and those of reasoning_parser={parser!r} are not "
            f"known (of {', '.join(MARKERS)} they are); give {_ADVICE}, and no parser"
        )
    start, end = MARKERS.get(parser, ("", ""))
    start = config.reasoning_start_str or start
    forced_end = config.reasoning_end_str or end
    if not (start and forced_end):
        raise ValueError(
            f"{wanted_by} needs to know what begins and ends reasoning; start the engine with "
            f"{_ADVICE} or reasoning_parser={next(iter(MARKERS))!r}"
        )
    return start, end or forced_end, forced_end


_ADVICE = 'reasoning_config={"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}'
