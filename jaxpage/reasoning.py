"""The markers of a model's reasoning: as text, in an option of the engine; as token ids, in a request.

Knows markers and a tokenizer. Must not know how the ids are used: see `sampling.thinking`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_MARKER_LEN = 64  # tokens of a marker

# Reasoning parsers of vLLM, for models that jaxpage supports -> start and end of the reasoning that they find.
MARKERS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("deepseek_r1", "qwen3", "glm45", "glm47", "minimax_m2"), ("<think>", "</think>")
    ),
    "gemma4": ("<|channel>", "<channel|>"),
}
# Models whose prompts always begin the reasoning, whether with the start marker or not.
ALWAYS_REASON = ("deepseek_r1", "minimax_m2")
# Parsers of gpt-oss, whose reasoning has no such markers; vLLM's option has the second name.
HARMONY = ("gpt_oss", "openai_gptoss")
PARSERS = (*HARMONY, *MARKERS)


@dataclass(frozen=True, kw_only=True)
class ReasoningConfig:
    """Names and meanings are vLLM's (0.32). Raises ValueError for values that are not strings, and unknown parsers."""

    reasoning_parser: str = ""  # its markers replace empty strings below
    reasoning_start_str: str = ""  # starts the reasoning
    # Forced when the budget is spent. It may begin with words that lead to the parser's own end marker; then that
    # marker ends the reasoning. Without a parser only the whole string does.
    reasoning_end_str: str = ""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, str):
                raise ValueError(f"{f.name} of reasoning_config must be a string, got {value!r}")
        if self.reasoning_parser not in ("", *PARSERS):
            raise ValueError(
                f"reasoning_parser={self.reasoning_parser!r} is not known; there are {', '.join(sorted(PARSERS))}. "
                f"For a budget the markers are enough: {_ADVICE}"
            )


@dataclass(frozen=True, kw_only=True)
class ReasoningTokens:
    """The markers as token ids, each of 1 to MAX_MARKER_LEN."""

    start: tuple[int, ...]
    end: tuple[int, ...]  # ends the reasoning, whether sampled or forced
    forced_end: tuple[int, ...]  # written when the budget is spent


def to_reasoning_config(value: Any) -> ReasoningConfig | None:
    """A config, from itself or a dict of its fields; None for None or an empty dict. Raises ValueError."""
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
    """The markers of `config`, in any form that `to_reasoning_config` takes, tokenized as in vLLM.

    `tokenizer`: one of transformers, or None. `wanted_by`: what error messages name as the cause.

    Raises ValueError without a tokenizer, for unknown markers, and for markers that the model or the sampler does not
    support.
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


def has_markers(config: Any) -> bool:
    """Whether `reasoning_tokens` knows the markers of `config`, so that reasoning can be limited."""
    found = to_reasoning_config(config)
    if found is None:
        return False
    try:
        _markers(found, "")
    except ValueError:
        return False
    return True


def _markers(config: ReasoningConfig, wanted_by: str) -> tuple[str, str, str]:
    """The start, the end, and the forced end. Raises ValueError."""
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
