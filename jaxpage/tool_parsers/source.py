"""Text that arrives in pieces, and readers for it: generators that yield when they need more.

Each character is read once, by one state of one generator, so results do not depend on where the pieces were cut, and
time is linear in the text. Knows no format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # yields while it waits for more text, returns what it read

SPACE = re.compile(r"[ \t\r\n]*")


class Source:
    """`text[pos:]` has arrived but is not read yet. Readers move `pos`; they may peek ahead without reading.

    While the source holds, it keeps what is read, for text that turns out not to be a call.
    """

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False  # `text` is complete
        self._held: list[str] = []
        self._held_to: int | None = None  # text before it is in `_held`; None: not holding

    def add(self, text: str) -> None:
        if self._held_to is not None:
            self._held.append(self.text[self._held_to : self.pos])
            self._held_to = 0
        self.text = self.text[self.pos :] + text
        self.pos = 0

    def hold(self, start: int | None = None) -> None:
        """Keep what is read from now on, or from `start` on, before `pos`."""
        self._held = []
        self._held_to = self.pos if start is None else start

    def take_held(self) -> str:
        """Returns what was read since `hold`, and stops holding; "" if the source does not hold."""
        if self._held_to is None:
            return ""
        held = "".join([*self._held, self.text[self._held_to : self.pos]])
        self._held_to = None
        return held

    def more(self) -> Reading[bool]:
        """Waits for text; False at the end of the output."""
        while self.pos == len(self.text):
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Reading[str]:
        """The next character, without reading it; "" at the end."""
        return self.text[self.pos] if (yield from self.more()) else ""

    def run(self, characters: re.Pattern[str]) -> Reading[str]:
        """Reads a run of characters of one class; the pattern is that class with a star."""
        pieces = []
        while (yield from self.more()):
            match = characters.match(self.text, self.pos)
            assert match is not None, "a starred class matches the empty string"
            pieces.append(match.group())
            self.pos = match.end()
            if self.pos < len(self.text):
                break
        return "".join(pieces)

    def match(self, *markers: str) -> Reading[str]:
        """Reads and returns the marker that comes next; otherwise reads nothing and returns ""."""
        longest = max(map(len, markers))
        while True:
            ahead = self.text[self.pos : self.pos + longest]
            for marker in markers:
                if ahead.startswith(marker):
                    self.pos += len(marker)
                    return marker
            if self.ended or not any(marker.startswith(ahead) for marker in markers):
                return ""
            yield


class Markers:
    """Strings to search for. None may be part of another: otherwise results would depend on the pieces."""

    def __init__(self, *markers: str):
        assert not any(a != b and a in b for a in markers for b in markers), markers
        self._markers = markers
        self._any = re.compile("|".join(map(re.escape, markers)))
        self._firsts = {marker[0] for marker in markers}
        self._longest = max(map(len, markers))

    def find(self, text: str, start: int) -> tuple[int, int]:
        """The span of the first marker; without one, the position before which none begins, twice."""
        found = self._any.search(text, start)
        if found:
            return found.span()
        for at in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[at] in self._firsts and any(m.startswith(text[at:]) for m in self._markers):
                return at, at
        return len(text), len(text)


def read_until(source: Source, markers: Markers, write: Callable[[str], None]) -> Reading[str]:
    """Writes the text before the first marker; reads, holds and returns the marker.

    Returns "" at the end of the output. Only a possible beginning of a marker waits for more text.
    """
    while True:
        start, end = markers.find(source.text, source.pos)
        if start == end and source.ended:
            start = end = len(source.text)
        if start > source.pos:
            write(source.text[source.pos : start])
        source.pos = end
        if end > start:
            source.hold(start)
            return source.text[start:end]
        if source.ended:
            return ""
        yield


def read_rest(source: Source, write: Callable[[str], None]) -> Reading[None]:
    """Writes the rest of the output."""
    while (yield from source.more()):
        write(source.text[source.pos :])
        source.pos = len(source.text)


def read_whole(text: str, read: Callable[[Source], Reading[T]]) -> tuple[T, str]:
    """The result of a reader for a complete text, and the text left unread."""
    source = Source()
    source.add(text)
    source.ended = True
    try:
        next(read(source))
    except StopIteration as stop:
        return stop.value, source.text[source.pos :]
    raise AssertionError("a reader waited for more after the end")
