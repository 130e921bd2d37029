"""Long lines arrive whole from a terminal, typed ahead or not, with readline or without."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading

import pytest

from jaxpage.terminal import long_lines, read_line_shown

CODE = """
import sys, time
from jaxpage.terminal import long_lines, read_line
with long_lines():
    print("READY", file=sys.stderr, flush=True)
    time.sleep({delay})
    lines = []
    try:
        while True:
            lines.append(read_line("> "))
    except EOFError:
        pass
print("GOT", [(len(line), line[-5:]) for line in lines], file=sys.stderr, flush=True)
"""


def test_a_closed_stdin_is_at_its_end(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with long_lines(), pytest.raises(EOFError):
        read_line_shown()


@pytest.mark.parametrize("output_is_terminal", [True, False])
@pytest.mark.parametrize("delay", [0, pytest.param(0.7, marks=pytest.mark.slow)])
def test_lines_of_any_length_arrive_whole(output_is_terminal, delay):
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", CODE.format(delay=delay)],
        stdin=slave,
        stdout=slave if output_is_terminal else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TERM": "dumb"},
    )
    os.close(slave)
    threading.Thread(target=_drain, args=(master,), daemon=True).start()
    try:
        assert process.stderr.readline() == "READY\n"
        for typed in (b"x" * 10_000 + b"\n", b"ab\x7fc\n", b"wrong\x15right\n"):
            while typed:
                typed = typed[os.write(master, typed[:1000]) :]
        os.write(master, b"\x04")
        expected = [(10_000, "xxxxx"), (2, "ac"), (5, "right")]
        assert process.stderr.readline() == f"GOT {expected}\n"
    finally:
        process.kill()
        process.communicate()
        os.close(master)


def _drain(descriptor: int) -> None:
    """What the terminal shows; nobody looks at it, but somebody must take it."""
    try:
        while os.read(descriptor, 65536):
            pass
    except OSError:
        return
