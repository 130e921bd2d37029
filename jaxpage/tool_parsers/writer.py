"""Collects what the readers of formats find."""

from __future__ import annotations

from itertools import groupby

from jaxpage.tool_parsers.deltas import (
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)

_SPACE = " \t\r\n"


class Writer:
    """Deltas in the order in which they were found.

    Whitespace alone before, between or after calls is dropped; all other text stays unchanged. `separators` are dropped
    between calls too.
    """

    def __init__(self, separators: str = "") -> None:
        self._deltas: list[Delta] = []
        self._num_calls = 0
        self._separators = separators
        # Whitespace since the beginning or the last call; None after other text.
        self._blank: list[str] | None = []

    def text(self, text: str) -> None:
        if self._blank is None:
            self._deltas.append(TextDelta(text))
            return
        self._blank.append(text)
        if text.strip(_SPACE + (self._separators if self._num_calls else "")):
            self._deltas += [TextDelta(piece) for piece in self._blank]
            self._blank = None

    def reasoning(self, text: str) -> None:
        self._deltas.append(ReasoningDelta(text))

    def start(self, name: str) -> None:
        """Begin a call; `arguments` from now on belong to it."""
        self._deltas.append(ToolCallStart(self._num_calls, name))
        self._num_calls += 1
        self._blank = []

    def arguments(self, text: str) -> None:
        self._deltas.append(ToolCallArguments(self._num_calls - 1, text))

    def end(self) -> None:
        """The output has ended."""
        if self._blank and not self._num_calls:
            self._deltas += [TextDelta(piece) for piece in self._blank]
        self._blank = None

    def take(self) -> list[Delta]:
        """The deltas since the last time. Adjacent ones of a kind are merged; none is empty."""
        deltas, self._deltas = self._deltas, []
        if len(deltas) < 2:
            return [d for d in deltas if isinstance(d, ToolCallStart) or d.text]
        return [delta for _, group in groupby(deltas, _kind) for delta in _merged(list(group))]


def _kind(delta: Delta) -> tuple[type, int]:
    match delta:
        case ToolCallStart(index) | ToolCallArguments(index):
            return type(delta), index
    return type(delta), 0


def _merged(group: list[Delta]) -> list[Delta]:
    """Merge adjacent deltas of a kind."""
    match group[0]:
        case ToolCallStart():
            return group
        case ToolCallArguments(index):
            text = "".join(d.text for d in group if isinstance(d, ToolCallArguments))
            return [ToolCallArguments(index, text)] if text else []
        case kind:
            text = "".join(d.text for d in group if isinstance(d, TextDelta | ReasoningDelta))
            return [type(kind)(text)] if text else []
