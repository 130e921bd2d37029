"""`jaxpage run-batch`: answers the requests of an OpenAI batch file, in order of completion.

An interrupted run can be resumed: requests with a result are not computed again. Knows the files' formats, but not how
requests are answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import io
import json
import stat
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxpage.config import EngineConfig
from jaxpage.pooling.choose import pools
from jaxpage.server.protocol.pooling import POOLING_PATHS

# From a path and a request's body to a status code and the answer's body. It answers invalid requests too; an exception
# ends the run.
Answer = Callable[[str, dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", *POOLING_PATHS)
ID_PREFIX = "batch_req_"
LINE_BEGIN = f'{{"id": "{ID_PREFIX}'.encode()  # of every result


@dataclass
class Summary:
    """The number of lines of a batch by outcome."""

    answered: int = 0
    refused: int = 0  # answered with an error
    unreadable: int = 0  # lines that are not valid requests
    skipped: int = 0  # done in earlier runs
    seconds: float = 0.0

    def __str__(self) -> str:
        text = (
            f"{self.answered} requests answered, {self.refused} refused, "
            f"{self.unreadable} lines that are no request, in {self.seconds:.1f} s"
        )
        return f"{text}; {self.skipped} had results already" if self.skipped else text


@dataclass(frozen=True, kw_only=True)
class BatchLine:
    """A line of the input: a request, or a problem."""

    number: int  # of the line, from 1
    custom_id: str | None
    url: str = ""
    body: dict[str, Any] | None = None
    problem: tuple[str, str] | None = None  # a code and a text


def main(
    source: Path,
    target: Path,
    options: dict[str, Any],
    max_concurrency: int,
    model_names: tuple[str, ...] = (),
) -> None:
    """Answer a batch with an engine with these options, and print a summary.

    Raises ValueError, and SystemExit (exit code 1) if the input has lines, but no request.
    """
    _check_concurrency(max_concurrency)
    with Results(target, source):
        pass  # report invalid files before the model is loaded
    if _has_only_problems(source):
        # This needs no engine: the output gets the problem of each line.
        print(asyncio.run(run_batch(source, target, _no_engine)))
        raise SystemExit(f"jaxpage: no line of {source} is a request; {target} has the reasons")
    config = EngineConfig.from_options(**options)
    if pools(config):
        from jaxpage.pooling.async_pooler import AsyncPooler
        from jaxpage.server.in_process import pooling_answerer

        llm = AsyncPooler(config)
        answer = pooling_answerer(llm, model_names)
    else:
        from jaxpage.async_llm import AsyncLLM
        from jaxpage.server.in_process import answerer

        llm = AsyncLLM(**options)
        answer = answerer(llm, model_names)
    try:
        print(asyncio.run(run_batch(source, target, answer, max_concurrency=max_concurrency)))
    except KeyboardInterrupt:
        print(f"stopped; the same command continues {target}", file=sys.stderr)
        raise
    finally:
        llm.shutdown()


async def run_batch(
    source: Path, target: Path, answer: Answer, *, max_concurrency: int = 256
) -> Summary:
    """Write a result for each request of `source` that has none in `target` yet.

    Keeps `max_concurrency` requests in flight; of the others only custom ids are in memory. Raises ValueError for
    invalid files, and exceptions of `answer`; then `target` has the results so far.
    """
    _check_concurrency(max_concurrency)
    summary, begin = Summary(), time.monotonic()
    slots = asyncio.Semaphore(max_concurrency)

    async def run(line: BatchLine) -> None:
        try:
            assert line.body is not None
            status, body = await answer(line.url, line.body)
        finally:
            slots.release()
        results.write(line, status, body)
        shown.update()
        if status < 400:
            summary.answered += 1
        else:
            summary.refused += 1

    # Progress is shown only on a terminal.
    with (
        Results(target, source) as results,
        source.open("rb") as lines,
        tqdm(disable=None) as shown,
    ):
        try:
            async with asyncio.TaskGroup() as group:
                for line in read_lines(lines):
                    line = results.check(line)
                    if results.have(line):
                        summary.skipped += 1
                    elif line.problem is not None:
                        results.write_problem(line)
                        summary.unreadable += 1
                    else:
                        await slots.acquire()
                        group.create_task(run(line))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
    summary.seconds = time.monotonic() - begin
    return summary


def _check_concurrency(max_concurrency: int) -> None:
    if max_concurrency < 1:
        raise ValueError(f"max_concurrency must be at least 1, got {max_concurrency}")


def _has_only_problems(source: Path) -> bool:
    """Whether there are lines, and none is a request. Reads up to the first request."""
    with source.open("rb") as lines:
        problems = (line.problem for line in read_lines(lines))
        return next(problems, None) is not None and all(problems)


async def _no_engine(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    raise ValueError("the input got its first request while it was read; run the command again")


def read_lines(lines: io.BufferedIOBase) -> Iterator[BatchLine]:
    """The lines of a batch file one by one, without blank ones."""
    for number, data in enumerate(lines, 1):
        if number == 1:
            data = data.removeprefix(b"\xef\xbb\xbf")  # the BOM that some editors write
        if data.strip():
            yield parse_line(number, data)


def parse_line(number: int, data: bytes) -> BatchLine:
    """The request of a line, or why it is invalid."""
    try:
        fields = json.loads(data.decode())
        problem = _problem(fields)
    except (ValueError, RecursionError) as error:
        fields, problem = {}, ("invalid_json_line", f"no JSON: {error}")
    found = fields if isinstance(fields, dict) else {}
    custom_id = found.get("custom_id")
    if problem is not None:
        known = custom_id if isinstance(custom_id, str) else None
        return BatchLine(number=number, custom_id=known, problem=problem)
    return BatchLine(number=number, custom_id=custom_id, url=found["url"], body=found["body"])


def _problem(fields: Any) -> tuple[str, str] | None:
    """Why the JSON of a line is not a valid request: a code and a text."""
    if not isinstance(fields, dict) or not isinstance(fields.get("custom_id"), str):
        return "missing_required_parameter", "not an object with a custom_id that is a string"
    method, url, body = (fields.get(name) for name in ("method", "url", "body"))
    if method != "POST":
        return "invalid_method", f'the method must be "POST", got {method!r}'
    if url not in URLS:
        return "invalid_url", f"the url must be one of {', '.join(URLS)}, got {url!r}"
    if not isinstance(body, dict):
        return "invalid_request", f"the body must be an object, got {type(body).__name__}"
    if body.get("stream"):
        return "invalid_request", "a batch has no streams; leave stream out of the body"
    return None


class Results:
    """The output file: each result is one line, written at once. Locked for one process at a time."""

    def __init__(self, path: Path, source: Path) -> None:
        """Open it, with the results of earlier runs. Raises ValueError if it is not such a file."""
        _check_source(source)
        if (kind := _kind(path)) is not None:
            if path.samefile(source):
                raise ValueError(f"{path} is the input; name another file for the results")
            if kind != _REGULAR:  # a device may have no end, and earlier results are read first
                raise ValueError(f"{path} is {kind}; name a regular file for the results")
        self._path = path
        self._done: set[str] = set()  # custom ids with a result that this run has not reached
        self._bad_lines: set[int] = set()  # whose problem was written
        self._met: dict[str, int] = {}  # line by custom id, in this run
        self._end = 0  # bytes of complete lines
        try:
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise ValueError(f"cannot write to {path}: {error.strerror}") from None
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def check(self, line: BatchLine) -> BatchLine:
        """The line, with a problem if its custom id is a duplicate."""
        if line.custom_id is None:
            return line
        first = self._met.setdefault(line.custom_id, line.number)
        if first == line.number:
            return line
        why = f"line {first} has the same custom_id {line.custom_id!r}"
        return dataclasses.replace(line, problem=("duplicate_custom_id", why))

    def have(self, line: BatchLine) -> bool:
        """Whether there is a result from an earlier run."""
        if line.problem is not None and line.number in self._bad_lines:
            return True
        if line.custom_id in self._done and self._met[line.custom_id] == line.number:
            self._done.remove(line.custom_id)
            return True
        return False

    def write(self, line: BatchLine, status: int, body: dict[str, Any]) -> None:
        """Write an answer or an error."""
        response = {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
        self._write(line, {"response": response, "error": None})

    def write_problem(self, line: BatchLine) -> None:
        """Write why a line is not a valid request."""
        assert line.problem is not None
        code, why = line.problem
        error = {"code": code, "message": f"line {line.number}: {why}", "line": line.number}
        self._write(line, {"response": None, "error": error})

    def _write(self, line: BatchLine, fields: dict[str, Any]) -> None:
        result = {"id": f"{ID_PREFIX}{uuid.uuid4().hex}", "custom_id": line.custom_id} | fields
        try:
            data = json.dumps(result, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError:  # a lone surrogate
            data = json.dumps(result).encode() + b"\n"
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        except BaseException as error:  # such as a full disk: no partial line may stay
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
            if isinstance(error, OSError):
                raise ValueError(
                    f"cannot write to {self._path}: {error.strerror}; the {self._end} bytes of complete results stay, "
                    "and the same command continues after them"
                ) from None
            raise
        self._end += len(data)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is writing to {self._path}") from None
        except OSError:
            pass  # a file system without locks

    def _read(self) -> None:
        """Read earlier results, and cut off an incomplete line."""
        self._file.seek(0)
        with open(self._file.fileno(), "rb", closefd=False) as lines:
            for number, data in enumerate(lines, 1):
                if not data.endswith(b"\n") and data[: len(LINE_BEGIN)] == LINE_BEGIN[: len(data)]:
                    break
                try:
                    result = json.loads(data)
                    self._take(result["custom_id"], result["response"], result["error"])
                except (ValueError, LookupError, TypeError):
                    raise ValueError(
                        f"{self._path}, line {number} is no result of a batch; name another file"
                    ) from None
                self._end += len(data)
        self._file.truncate(self._end)

    def _take(self, custom_id: str | None, response: Any, error: dict[str, Any] | None) -> None:
        if error is not None:
            self._bad_lines.add(error["line"])
        elif response is None or custom_id is None:
            raise ValueError("neither an answer nor an error")
        else:
            self._done.add(custom_id)


_REGULAR = "a regular file"
_KINDS = {
    stat.S_IFREG: _REGULAR,
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def _check_source(source: Path) -> None:
    """Raise ValueError if this is not a file that can be read."""
    kind = _kind(source)
    if kind is None:
        raise ValueError(f"there is no file {source}")
    if kind != _REGULAR:
        raise ValueError(f"{source} is {kind}; name a regular file with the requests")
    try:
        source.open("rb").close()
    except OSError as error:
        raise ValueError(f"cannot read {source}: {error.strerror}") from None


def _kind(path: Path) -> str | None:
    """What is at a path, in words; None for nothing. Raises ValueError if that cannot be known."""
    try:
        return _KINDS[stat.S_IFMT(path.stat().st_mode)]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
