"""Converts the values of sampling parameters to plain ints, floats and new lists. Each function raises ValueError.

`name` is the parameter's name in error messages.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

MAX_FLOAT32 = 3.4028235e38
# the least that XLA does not round to 0
MIN_FLOAT32 = 1.1754943e-38


def if_given(convert: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """The same conversion, but None stays None."""
    return lambda name, value: None if value is None else convert(name, value)


def to_int(name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError(f"{name} must be an int, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an int, got {value!r}") from None


def to_count(name: str, value: Any) -> int | None:
    """A number of logprobs; True is 1, False is none."""
    if value is None or isinstance(value, bool):
        return 1 if value else None
    return to_int(name, value)


def to_rows(name: str, value: Any) -> list[list[int]]:
    """Lists of ids, one per row of a list or an array."""
    if isinstance(value, str | bytes | dict) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of lists of token ids, got {value!r:.200}")
    rows = []
    for row in value:
        if isinstance(row, str | bytes | dict) or not isinstance(row, Iterable):
            raise ValueError(
                f"{name} must be a list of lists of token ids, got the row {row!r:.200}"
            )
        rows.append([to_int(name, x) for x in row])
    return rows


def to_bool(name: str, value: Any) -> bool:
    # Equality also allows NumPy's booleans, 0 and 1.
    if isinstance(value, str) or not (value == True or value == False):  # noqa: E712
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def to_float(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or isinstance(value, str):
        raise ValueError(f"{name} must be a finite number, got {value!r:.200}")
    return number


def to_biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dict of token id to number, got {value!r}")
    return {to_bias_id(key): to_bias(key, bias) for key, bias in value.items()}


def to_bias_id(key: Any) -> int:
    # JSON has no integer keys, so ids may come as strings.
    if isinstance(key, str) and key.removeprefix("-").isdecimal():
        return int(key)
    try:
        return to_int("logit_bias", key)
    except ValueError:
        raise ValueError(f"a key of logit_bias must be a token id, got {key!r}") from None


def to_bias(key: Any, value: Any) -> float:
    name = f"logit_bias[{key!r}]"
    if isinstance(value, float) and value == -math.inf:  # a ban
        return value
    number = to_float(name, value)
    if abs(number) > MAX_FLOAT32:
        raise ValueError(f"{name} must fit into float32, got {value!r}; -inf bans a token")
    return number


def to_ids(name: str, value: Any) -> list[int]:
    """A list of distinct ints, in the order given."""
    if isinstance(value, str | bytes | dict) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of token ids, got {value!r}")
    return list(dict.fromkeys(to_int(name, x) for x in value))


def to_strings(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    strings = list(value) if isinstance(value, Iterable) else [value]
    for s in strings:
        if not isinstance(s, str):
            raise ValueError(f"{name} must be a string or a list of strings, got {value!r}")
    return strings
