"""What the end of a command means to a shell: its exit code, and one line on stderr for what went wrong."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable

from jaxpage.call_guard import interrupts_kept
from jaxpage.hosts.errors import HostLostError

INTERRUPTED, NO_READER = 130, 141  # what shells report for SIGINT and SIGPIPE


def run(command: Callable[[], int | None]) -> int:
    """Run a command. Its exit code; 2 for errors of the user or of files, 1 for a lost host, 130 for Ctrl-C.

    141, and no message, if nobody reads stdout any more, as in `jaxpage doctor | head -1`.
    """
    try:
        with interrupts_kept():
            code = command() or 0
    except HostLostError as error:
        code = _tell(str(error), 1)
    except (ValueError, TypeError) as error:
        code = _tell(str(error), 2)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            _flush()
            return NO_READER
        code = _tell(_described(error), 2)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit:
        if isinstance(_flush(), BrokenPipeError):
            return NO_READER
        raise
    failure = _flush()  # here, because Python's own at its exit ends with a traceback
    if failure is None or code:
        return code
    return NO_READER if isinstance(failure, BrokenPipeError) else _tell(_described(failure), 2)


def _tell(message: str, code: int) -> int:
    print(f"jaxpage: {' '.join(message.split())}", file=sys.stderr)
    return code


def _described(error: OSError) -> str:
    """The file, if the system named one, and what is wrong; libraries raise OSError with a text of their own."""
    if error.strerror is None:
        return str(error) or type(error).__name__
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


def _reader_is_gone() -> bool:
    """Whether it is stdout that is broken, rather than a pipe to a worker."""
    if sys.stdout is None or not hasattr(select, "poll"):  # Windows
        return False
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are reported in any case
    return bool(poll.poll(0))


def _flush() -> OSError | None:
    """Write what stdout holds back. If that fails, the error; stdout is /dev/null from then on."""
    if sys.stdout is None:  # closed before Python started
        return None
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None
