"""Runs a recording of `LLM(..., record_calls=FILE)` again and compares what it samples, bit for bit.

So a failure can be reproduced from a file, and another process can follow an engine by its calls alone: it needs
neither requests nor a scheduler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tyro

from jaxpage.build import make_runner
from jaxpage.composition import spec_of_this_machine
from jaxpage.config import EngineConfig
from jaxpage.plan import RESULT_ARRAYS, StepResult
from jaxpage.runner.launched import Executed, Launched, to_host
from jaxpage.runner.recording import (
    CALLS,
    END,
    HEADER,
    RESULT,
    WEIGHTS_CHANGED,
    Frame,
    frames,
    read_calls,
    read_result,
)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The outcome of a replay."""

    num_launches: int
    num_results: int  # results compared
    # Numbers of the launches with other samples.
    different: tuple[int, ...]
    weights_changed: bool  # during the recording; results after that may differ
    is_complete: bool  # the recording has its end: it was not cut off


@dataclass(frozen=True, kw_only=True)
class ReplayFlags:
    """Run recorded calls again, and compare what they sample bit for bit. Exit code 1 if any differs or is missing."""

    file: tyro.conf.Positional[Path]  # written by LLM(..., record_calls=FILE)
    model: str | None = None  # the folder of the checkpoint; none: as recorded


def replay(file: BinaryIO, *, model: str | None = None) -> Replay:
    """Execute the calls of a recording in order, and compare the results.

    As many devices share the weights as in the recording. `model`: the folder of the checkpoint; None: as recorded.
    Raises ValueError for a file that is not a recording, and if there are fewer devices.
    """
    recording = _frames_of_recording(file)
    _, header, _ = next(recording)
    options = header["options"] | ({} if model is None else {"model": model})
    spec = spec_of_this_machine(_engine_config(options))
    # Calls name slots of these states, whose number follows from the memory of the device.
    recorded = header.get("num_cached_states", spec.num_cached_states)
    _, runner = make_runner(dataclasses.replace(spec, num_cached_states=recorded))
    runner.warmup()
    launched: dict[int, Executed] = {}
    num_launches = num_results = 0
    different: list[int] = []
    weights_changed = is_complete = False
    for kind, metadata, arrays in recording:
        if kind == CALLS:
            result = runner.execute(read_calls(metadata, arrays))
            if result.sampled is not None:
                launched[num_launches] = result
            num_launches += 1
        elif kind == RESULT:
            number = metadata["launch"]
            num_results += 1
            if not _is_same(launched.pop(number), read_result(arrays)):
                different.append(number)
            # Launches whose collection failed have no result.
            launched = {later: result for later, result in launched.items() if later > number}
        elif kind == WEIGHTS_CHANGED:
            weights_changed = True
        elif kind == END:
            is_complete = True
    return Replay(
        num_launches=num_launches,
        num_results=num_results,
        different=tuple(different),
        weights_changed=weights_changed,
        is_complete=is_complete,
    )


def _frames_of_recording(file: BinaryIO) -> Iterator[Frame]:
    """The frames of a recording, at least its header. Raises ValueError for another file, and where it is damaged."""
    name, count = getattr(file, "name", "the file"), 0
    try:
        for kind, metadata, arrays in frames(file):
            if count == 0 and (kind != HEADER or not isinstance(metadata.get("options"), dict)):
                break
            yield kind, metadata, arrays
            count += 1
    except ValueError as error:
        if count:
            raise ValueError(f"{name} is damaged after {count} frames: {error}") from None
    if count == 0:
        raise ValueError(
            f"{name} is not a recording; LLM(..., record_calls=FILE) writes one, and completes it when the engine is "
            "gone"
        )


def _engine_config(options: dict[str, Any]) -> EngineConfig:
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    unknown = options.keys() - known
    if unknown:
        raise ValueError(
            f"the recording is of another version of jaxpage: it has {', '.join(sorted(unknown))}"
        )
    return EngineConfig(**options)


def _is_same(executed: Executed, recorded: StepResult) -> bool:
    steps, rows, width = recorded.top_token_ids.shape
    again = to_host(Launched(steps, rows, width > 0, executed))
    return all(
        _bytes(getattr(again, name)) == _bytes(getattr(recorded, name)) for name in RESULT_ARRAYS
    )


def _bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def main(flags: ReplayFlags) -> int:
    """Run recorded calls again. Raises ValueError."""
    try:
        with flags.file.open("rb") as file:
            found = replay(file, model=flags.model)
    except OSError as error:
        raise ValueError(f"{flags.file} cannot be read: {error.strerror}") from None
    print(f"{found.num_launches} launches, {found.num_results} results compared")
    if found.weights_changed:
        print("parameters were replaced while this was recorded; results after that differ")
    if not found.is_complete:
        print(
            "the recording is incomplete: it has no end, because the file was cut off, the disk was full, or its "
            "engine still runs or was killed; record it again, or compare only what is there"
        )
    if found.different:
        numbers = ", ".join(map(str, found.different[:10]))
        print(f"{len(found.different)} results differ, the first ones of launches {numbers}")
        return 1
    print(f"{'all' if found.is_complete else 'the compared'} results are the same, bit for bit")
    return 0 if found.is_complete else 1
