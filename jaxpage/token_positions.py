"""Selects tokens of a sequence by position, independently of chunks and steps."""

from __future__ import annotations

import numbers
from dataclasses import dataclass

OPEN_END = 2**31 - 1  # the stop of positions that have no last one
Where = tuple[int, int, int]  # start, stop, stride


@dataclass(frozen=True)
class Positions:
    """Tokens of a sequence, counted from its first: every `stride`-th of `start .. stop`."""

    kind: str  # "prompt", "last_prompt", "generated" or "slice"
    start: int = 0
    stop: int = OPEN_END
    stride: int = 1

    def resolve(self, prompt_len: int) -> Where:
        """(start, stop, stride) in a sequence with a prompt of so many tokens."""
        known = {
            "prompt": (0, prompt_len, 1),
            "last_prompt": (prompt_len - 1, prompt_len, 1),
            "generated": (prompt_len, OPEN_END, 1),
        }
        return known.get(self.kind, (self.start, self.stop, self.stride))


def prompt() -> Positions:
    """All tokens of the prompt."""
    return Positions("prompt")


def last_prompt() -> Positions:
    """The last token of the prompt, from which the first token of the answer is sampled."""
    return Positions("last_prompt")


def generated() -> Positions:
    """All tokens of the answer, as inputs. The first of them is sampled before any: from the prompt's last token."""
    return Positions("generated")


def to_positions(given: Positions | slice) -> Positions:
    """A slice or Positions, as Positions. Raises ValueError for other values, and for slices with negative numbers."""
    if isinstance(given, Positions):
        return given
    if not isinstance(given, slice):
        raise ValueError(
            f"positions must be prompt(), last_prompt(), generated() or a slice, got {given!r}"
        )
    bounds = [
        0 if given.start is None else given.start,
        OPEN_END if given.stop is None else given.stop,
        1 if given.step is None else given.step,
    ]
    is_int = all(isinstance(x, numbers.Integral) and not isinstance(x, bool) for x in bounds)
    if not is_int or min(bounds) < 0 or max(bounds) > OPEN_END or bounds[2] == 0:
        raise ValueError(
            f"a slice of positions has ints of at least 0, and a step of at least 1, got {given}"
        )
    return Positions("slice", *map(int, bounds))


def within(where: Where, start: int, end: int) -> range:
    """Those of `start .. end`."""
    first, stop, stride = where
    if first < start:
        first += -(-(start - first) // stride) * stride
    return range(first, min(stop, end), stride)
