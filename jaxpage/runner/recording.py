"""Calls and results in a file, to be replayed later or elsewhere.

A recording is a sequence of frames. A frame is its length, 8 bytes little-endian, followed by that many bytes of
safetensors: arrays named "0", "1" ..., described in the metadata. Nothing is ever unpickled. The first frame says what
the runner was built from; then come calls, and results in the order in which they were collected. The last frame says
that this is the end: a recording without it was cut off.

Recordings contain the token ids of prompts and answers, but no text.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes  # noqa: F401 (its dtypes have names from here on)
import numpy as np
from safetensors.numpy import load, save

from jaxpage.plan import RESULT_ARRAYS, StepResult
from jaxpage.runner.calls import Call

logger = logging.getLogger(__name__)

MAX_BYTES = 2**30  # of a recording
MAX_FRAME_BYTES = 2**32
LENGTH_BYTES = 8

HEADER, CALLS, RESULT, WEIGHTS_CHANGED = "header", "calls", "result", "weights changed"
END = "end"

Frame = tuple[str, dict[str, Any], list[np.ndarray]]  # kind, metadata, arrays


def frame(kind: str, arrays: list[np.ndarray], **metadata: Any) -> bytes:
    """One frame, including its length."""
    described = [(array.dtype.name, array.shape) for array in arrays]
    # As bytes: safetensors' NumPy side does not know bfloat16 and its narrower relatives.
    tensors = {
        str(i): np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for i, array in enumerate(arrays)
    }
    text = json.dumps({"kind": kind, "arrays": described, **metadata})
    body = save(tensors, metadata={"frame": text})
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def frames(file: BinaryIO) -> Iterator[Frame]:
    """Each frame, except an incomplete last one. Raises ValueError for other contents."""
    while True:
        length = int.from_bytes(head := file.read(LENGTH_BYTES), "little")
        if len(head) < LENGTH_BYTES:
            return
        if length > MAX_FRAME_BYTES:
            raise ValueError(f"not a frame of a recording: it would have {length} bytes")
        body = file.read(length)
        if len(body) < length:
            return
        yield parse(body)


def parse(body: bytes) -> Frame:
    """A frame, given without its length. Raises ValueError for other contents."""
    try:
        size = int.from_bytes(body[:8], "little")
        metadata = json.loads(json.loads(body[8 : 8 + size])["__metadata__"]["frame"])
        tensors = load(body)
        arrays = [
            tensors[str(i)].view(np.dtype(dtype)).reshape(shape)
            for i, (dtype, shape) in enumerate(metadata.pop("arrays"))
        ]
        return metadata.pop("kind"), metadata, arrays
    except Exception as error:  # whatever safetensors, JSON or NumPy raise for foreign bytes
        raise ValueError(f"not a frame of a recording: {type(error).__name__}: {error}") from None


def calls_frame(calls: list[Call]) -> bytes:
    """A frame of calls, in order."""
    arrays = [buffer for call in calls for buffer in call.buffers]
    programs = [[call.program, len(call.buffers)] for call in calls]
    return frame(CALLS, arrays, programs=programs)


def read_calls(metadata: dict[str, Any], arrays: list[np.ndarray]) -> list[Call]:
    """The calls of a frame."""
    rest, calls = iter(arrays), []
    for program, count in metadata["programs"]:
        calls.append(Call(program, tuple(next(rest) for _ in range(count))))
    return calls


def result_frame(launch: int, result: StepResult) -> bytes:
    """A frame with the result of a launch."""
    return frame(RESULT, [getattr(result, name) for name in RESULT_ARRAYS], launch=launch)


def read_result(arrays: list[np.ndarray]) -> StepResult:
    """The result of a frame."""
    found: dict[str, Any] = dict(zip(RESULT_ARRAYS, arrays, strict=True))
    return StepResult(**found)


_END_FRAME = frame(END, [])


class CallRecorder:
    """Writes a recording to `file`, of at most `max_bytes`; later calls are not recorded, and the log says so.

    `close_file` is called once, when the recorder is closed or full, with True; or with False if writing failed.
    Nothing is recorded after that, and no OSError reaches the engine.
    """

    def __init__(
        self,
        file: BinaryIO,
        header: dict[str, Any],
        *,
        max_bytes: int = MAX_BYTES,
        close_file: Callable[[bool], None] = lambda is_complete: None,
    ):
        """`header`: what the runner was built from, JSON."""
        self._file: BinaryIO | None = file
        self._max_bytes, self._close_file = max_bytes, close_file
        self._num_bytes = 0
        self._write(frame(HEADER, [], **header))

    def calls(self, calls: list[Call]) -> None:
        """One launch. Launches are numbered from 0, in order."""
        self._write(calls_frame(calls))

    def result(self, launch: int, result: StepResult) -> None:
        """The result of the launch with that number."""
        self._write(result_frame(launch, result))

    def weights_changed(self) -> None:
        """Parameters were replaced: later calls cannot be replayed with those of the checkpoint."""
        self._write(frame(WEIGHTS_CHANGED, []))

    def close(self) -> None:
        """End the recording. Calling it again does nothing."""
        if self._put(_END_FRAME):
            self._file = None
            self._close_file(True)

    def _write(self, data: bytes) -> None:
        if self._file is None:
            return
        if self._num_bytes + len(data) + len(_END_FRAME) > self._max_bytes:
            logger.warning("the recording has %d bytes; later calls are left out", self._num_bytes)
            self.close()
        elif self._put(data):
            self._num_bytes += len(data)

    def _put(self, data: bytes) -> bool:
        """Whether the data was written. If that fails, the recording stops."""
        if self._file is None:
            return False
        try:
            self._file.write(data)
            self._file.flush()
            return True
        except OSError as error:
            logger.warning(
                "%s cannot be written (%s); the recording stops after %d bytes and is incomplete",
                getattr(self._file, "name", "the recording"),
                error.strerror or error,
                self._num_bytes,
            )
        self._file = None
        self._close_file(False)
        return False


def record_to(path: str | os.PathLike[str], header: dict[str, Any]) -> CallRecorder:
    """A recorder that writes to `path`.partial, and renames it to `path` when it is closed or full.

    The name stays `path`.partial if writing fails. Raises OSError if the file cannot be created.
    """
    whole = Path(path)
    partial = whole.with_name(whole.name + ".partial")
    file = partial.open("wb")

    def close_file(is_complete: bool) -> None:
        try:
            file.close()  # after a failure it tries again to write what is left
            if is_complete:
                os.replace(partial, whole)
        except OSError as error:
            if is_complete:
                logger.warning("the recording stays at %s: %s", partial, error.strerror)

    return CallRecorder(file, header, close_file=close_file)
