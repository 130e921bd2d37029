"""Lines typed or pasted into a terminal, of any length.

A terminal that collects lines by itself drops what goes beyond 4,095 characters of one. So it hands over every
character at once; readline edits them, or where it cannot (the output is no terminal) the few keys of `_read_raw`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO

_ERASE, _KILL, _END = (0x7F, 0x08), 0x15, 0x04  # backspace, Ctrl-U, Ctrl-D


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal. One that was closed before Python started (`<&-`) is None."""
    return stream is not None and stream.isatty()


@contextlib.contextmanager
def long_lines() -> Iterator[None]:
    """Whatever is typed or pasted meanwhile is kept, also while nobody reads. Does nothing without a terminal."""
    if not is_terminal(sys.stdin):
        yield
        return
    try:
        import termios
    except ImportError:  # Windows, whose terminal has another limit
        yield
        return
    descriptor = sys.stdin.fileno()
    before, changed = (termios.tcgetattr(descriptor) for _ in range(2))
    changed[3] &= ~termios.ICANON
    changed[6][termios.VMIN], changed[6][termios.VTIME] = 1, 0
    termios.tcsetattr(descriptor, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def read_line(prompt: str) -> str:
    """A line of the terminal, without its end. Call it within `long_lines`. Raises EOFError."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives `input` its line editing and history

        if is_terminal(sys.stdout):
            return input(prompt)
    if os.name != "posix":
        return input(prompt)
    print(prompt, end="", flush=True)
    return _read_raw(sys.stdin.fileno())


def _read_raw(descriptor: int) -> str:
    line = bytearray()
    while character := os.read(descriptor, 1):
        code = character[0]
        if character == b"\n":
            return line.decode(errors="replace")
        if code in _ERASE:
            _drop_last(line)
        elif code == _KILL:
            line.clear()
        elif code != _END:
            line += character
        elif not line:
            break
    raise EOFError


def _drop_last(line: bytearray) -> None:
    """Take the last character, which may be several bytes of UTF-8."""
    while line and line.pop() & 0xC0 == 0x80:
        pass


def read_line_shown() -> str:
    """A line of stdin. Raises EOFError at its end. What was not typed here is shown."""
    if is_terminal(sys.stdin):
        return read_line("> ")
    if sys.stdin is None:
        raise EOFError
    line = input()
    print(f"> {line}", flush=True)
    return line
