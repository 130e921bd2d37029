"""Exit codes of commands that fail, and what is said about it; in processes of their own where stdout is at stake."""

from __future__ import annotations

import gc
import hashlib
import operator
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from jaxpage import cli, exit_codes


def fails(error):
    def command():
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            FileNotFoundError(2, "No such file or directory", "/x/y"),
            "/x/y: No such file or directory",
        ),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("two\nlines of a library"), "two lines of a library"),
        (ValueError("two\nlines"), "two lines"),
    ],
)
def test_errors_of_files_and_users_are_one_line(error, said, capsys):
    assert exit_codes.run(fails(error)) == 2
    assert capsys.readouterr().err == f"jaxpage: {said}\n"


def test_a_config_file_that_cannot_be_read_is_one_line(capsys):
    assert cli.main(["serve", "--config", "/nonexistent.yaml"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("jaxpage: --config /nonexistent.yaml cannot be read")


@pytest.mark.parametrize("unbuffered", [[], ["-u"]])
@pytest.mark.parametrize("args", [["--help"], ["serve", "--help"]])
def test_a_reader_that_is_gone_is_no_error(args, unbuffered):
    """Whether Python finds out when it prints, or when it flushes at the end."""
    command = [sys.executable, *unbuffered, "-m", "jaxpage", *args]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (exit_codes.NO_READER, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("unbuffered", [[], ["-u"]])
def test_a_full_disk_is_one_line(unbuffered):
    command = [sys.executable, *unbuffered, "-m", "jaxpage", "--help"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "jaxpage: No space left on device\n")


def test_ctrl_c_in_a_callback_of_the_garbage_collector_is_not_lost():
    def callback(phase, info):
        if phase == "start" and not came:
            came.append(phase)
            signal.raise_signal(signal.SIGINT)

    def command():
        gc.callbacks.append(callback)
        try:
            gc.collect()
            time.sleep(10)
        finally:
            gc.callbacks.remove(callback)

    came, start = [], time.monotonic()
    assert exit_codes.run(command) == exit_codes.INTERRUPTED
    assert time.monotonic() - start < 9, "what the main thread waited for went on"


def test_ctrl_c_that_comes_again_just_before_the_main_thread_waits_is_not_lost():
    """Python looks for signals between its instructions, and here are none before the wait."""
    start = time.monotonic()
    busy = partial(hashlib.pbkdf2_hmac, "sha256", b"", b"", 1_000_000)
    calls = [busy, partial(time.sleep, 10)]

    class Dropping:
        def __del__(self):
            raise KeyboardInterrupt

    def command():
        Dropping()
        assert list(map(operator.call, calls))

    assert exit_codes.run(command) == exit_codes.INTERRUPTED
    assert time.monotonic() - start < 9, "what the main thread waited for went on"
