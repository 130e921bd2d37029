"""What the `tokenization_kwargs` of a call mean, as in vLLM.

Knows names and values. Must not know prompts or tokenizers.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

_KNOWN = (
    *("add_special_tokens", "truncation", "max_length", "truncate_prompt_tokens"),
    *("truncation_side", "do_lower_case", "needs_detokenization"),
)
_NO_PADDING = (None, False, "do_not_pad")
_NO_TRUNCATION = (None, False, "do_not_truncate")
_TRUNCATION = (True, "longest_first")


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """How the prompts of a call become token ids."""

    options: dict[str, Any] = field(default_factory=dict)  # of the tokenizer
    length: int | None = None  # the most tokens of a prompt; -1: what the model takes
    side: Literal["left", "right"] | None = None  # which end of a longer prompt is lost
    lower_case: bool = False
    needs_text: bool = False  # prompts of ids get their text, too

    def within(self, max_model_len: int, longest: int) -> Tokenization:
        """The same, with `longest` as the length that -1 stands for. Raises ValueError for a bad length."""
        if self.length is None:
            return self
        check_length(self.length, max_model_len)
        return replace(self, length=longest if self.length == -1 else int(self.length))

    def cut_by_tokenizer(self) -> Tokenization:
        """The same for texts that the tokenizer truncates, which then keep its special tokens."""
        if self.length is None:
            return self
        options = self.options | {"truncation": True, "max_length": self.length}
        return replace(self, options=options)

    def uncut(self) -> Tokenization:
        """The same for texts that the tokenizer must not truncate."""
        left_out = ("truncation", "max_length")
        return replace(self, options={k: v for k, v in self.options.items() if k not in left_out})


def read_tokenization(kwargs: Mapping[str, Any] | Tokenization | None) -> Tokenization:
    """The meaning of `tokenization_kwargs`. Prompts are truncated only with `truncation` or `truncate_prompt_tokens`.

    What has been read already is returned as it is. Raises ValueError for unknown names and values.
    """
    if isinstance(kwargs, Tokenization):
        return kwargs
    given = {name: value for name, value in (kwargs or {}).items() if value is not None}
    if given.get("padding") in _NO_PADDING:
        given.pop("padding", None)
    unknown = given.keys() - set(_KNOWN)
    if unknown:
        raise ValueError(
            f"tokenization_kwargs has {', '.join(sorted(unknown))}; supported are {', '.join(_KNOWN)}"
        )
    longest: Any = given.get("max_length")
    side = given.get("truncation_side")
    if longest is not None and not (is_int(longest) and longest >= 1):
        raise ValueError(
            f"max_length of tokenization_kwargs must be an int of at least 1, got {longest!r}"
        )
    if side not in (None, "left", "right"):
        raise ValueError(f"truncation_side must be 'left' or 'right', got {side!r}")
    length, truncation = given.get("truncate_prompt_tokens"), given.get("truncation")
    options = {name: given[name] for name in ("add_special_tokens",) if name in given}
    if truncation in _TRUNCATION:
        length = -1 if longest is None else longest
    elif truncation not in _NO_TRUNCATION:
        raise ValueError(f"truncation must be True or False, got {truncation!r}")
    elif truncation == "do_not_truncate":
        length = None
    return Tokenization(
        options=options,
        length=length,
        side=side,
        lower_case=bool(given.get("do_lower_case")),
        needs_text=bool(given.get("needs_detokenization")),
    )


def check_length(length: Any, max_model_len: int) -> None:
    """Raise ValueError unless prompts can be truncated to `length` tokens, or -1 for as many as the model takes."""
    if not is_int(length) or (length < 1 and length != -1):
        raise ValueError(f"truncate_prompt_tokens must be at least 1, or -1, got {length!r}")
    if length > max_model_len:
        raise ValueError(
            f"truncate_prompt_tokens (or max_length) of {length} is more than max_model_len={max_model_len}"
        )


def is_int(value: Any) -> bool:
    """Whether it is an int, also one of NumPy, but not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
