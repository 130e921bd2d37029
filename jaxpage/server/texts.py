"""Rejects texts that are too long before they are tokenized, which would take long.

Not for texts that are truncated: they may be as long as `--max-body-size` allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxpage.input_processor import InputProcessor
from jaxpage.prompts import too_long


def check_length(prompt: object, inputs: InputProcessor) -> None:
    """Raise ValueError for a text that cannot fit, however it is tokenized."""
    if isinstance(prompt, str):
        _check(len(prompt), inputs)


def check_messages(messages: Iterable[Mapping[str, Any]], inputs: InputProcessor) -> None:
    """Raise ValueError for a conversation that cannot fit, however it is tokenized."""
    _check(sum(_num_characters(message.get("content")) for message in messages), inputs)


def _num_characters(content: Any) -> int:
    """The length of a text, or of a list of parts."""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return sum(len(text) for text in texts if isinstance(text, str))


def _check(num_characters: int, inputs: InputProcessor) -> None:
    if inputs.tokenizer is None:
        return
    most = inputs.limits.max_model_len * inputs.max_token_len
    if num_characters > most:
        message = too_long(inputs.limits.max_model_len, f"{num_characters} characters")
        raise ValueError(f"{message}, and a token has at most {inputs.max_token_len}; shorten it")
