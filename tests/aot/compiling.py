"""Compiles the programs of a suite for targets of one compiler, in a process of its own.

jax must not have been imported with another platform, hence the process: `python -m tests.aot.compiling SUITE MODE
TARGET,TARGET`. It judges nothing: of each target the first line of JSON that it prints is about the compiler and the
device, the last about the sources, and each of the others about a program.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxpage.aot.topology import cuda_folder, environment, mesh_of, missing_compiler
from tests.aot import evidence
from tests.aot.program import Program, hash_of, hash_of_observer
from tests.aot.sources import ROOT, Sources, of_this_process
from tests.aot.suites import suite, target_of

# Nothing in a TPU kernel says where its source is: text that moves is no other program.
_NO_LOCATIONS = {"JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0"}
_PREFIX = "@@ "  # of lines that are ours: compilers write to the same output


class Mode(StrEnum):
    """What is compiled although a record says what was seen of it."""

    CHANGED = "changed"  # nothing
    DUE = "due"  # what has its turn today
    ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Of a suite on a target. `programs`: what was found of each, with its "name"; an "error" if it was refused."""

    programs: list[dict[str, Any]]
    evidence: evidence.Evidence  # as it would be written now
    num_compiled: int
    num_changed: int  # of these because no record holds
    seconds: float


seen_so_far: dict[tuple[str, str], Seen] = {}  # for the summary


def missing(target: str) -> str | None:
    """What must be installed to compile for it."""
    return missing_compiler(target_of(target).chip.platform)


def seen(suite_name: str, target: str) -> Seen:
    """What the tests judge. Raises RuntimeError if the process ends badly or a program does not compile that should."""
    return _seen_by(suite_name, target_of(target).chip.platform)[target]


@cache
def _seen_by(suite_name: str, platform: str) -> dict[str, Seen]:
    """By target. One process for all, since importing jax and transformers takes seconds."""
    all_targets = suite(suite_name).TARGETS
    targets = [t for t in all_targets if target_of(t).chip.platform == platform]
    found = _compile_what_must_be(suite_name, targets, Mode.DUE)
    seen_so_far.update({(suite_name, target): found[target] for target in targets})
    return found


def seen_on(suite_name: str, targets: Iterable[str]) -> dict[str, Seen]:
    """By target, as far as there are compilers; TPUs and GPUs at the same time."""
    targets = [target for target in targets if missing(target) is None]
    platforms = dict.fromkeys(target_of(target).chip.platform for target in targets)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda platform: _seen_by(suite_name, platform), platforms))
    return {target: seen(suite_name, target) for target in targets}


def compile_suite(suite_name: str, target: str, mode: Mode, *more: str) -> Seen:
    """In another process. `more`: arguments of the suite's `programs`. Raises RuntimeError, see `seen`."""
    return _compile_what_must_be(suite_name, [target], mode, *more)[target]


def _compile_what_must_be(
    suite_name: str, targets: list[str], mode: Mode, *more: str
) -> dict[str, Seen]:
    """By target, all of one platform. There is no process if all records hold and nothing is due."""
    compiler = _compiler(target_of(targets[0]).chip.platform)
    kept = {target: evidence.read(suite_name, target) for target in targets}
    has_work = mode == Mode.ALL or not all(each.is_of_now(compiler) for each in kept.values())
    if mode == Mode.DUE:
        has_work |= any(_is_due(suite_name, t, name) for t in targets for name in kept[t].records)
    if has_work:
        return _compile_in_one_process(suite_name, targets, mode, *more)
    return {target: _seen_before(each) for target, each in kept.items()}


def _is_due(suite_name: str, target: str, program: str) -> bool:
    return evidence.is_due(suite_name, target, program, date.today())


def _compile_in_one_process(
    suite_name: str, targets: list[str], mode: Mode, *more: str
) -> dict[str, Seen]:
    """By target, all of one platform."""
    target = targets[0]  # the environment depends on the platform only
    dropped = ("JAX_COMPILATION_", "XLA_", "JAX_NUMPY_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    told = dict(each.split("=", 1) for each in environment(target_of(target)))
    more_of = getattr(suite(suite_name), "environment", None)
    told |= _NO_LOCATIONS | (more_of(target) if more_of else {})
    dumps_to = getattr(suite(suite_name), "dump_variables", None)
    command = [sys.executable, "-m", "tests.aot.compiling", suite_name, mode, ",".join(targets)]
    with tempfile.TemporaryDirectory(prefix="jaxpage-") as folder:
        told |= dumps_to(Path(folder)) if dumps_to else {}
        done = subprocess.run(
            [*command, *more], cwd=ROOT, env=kept | told, capture_output=True, text=True
        )
    if done.returncode:
        names = ", ".join(targets)
        raise RuntimeError(f"compiling {suite_name} for {names} failed:\n{done.stderr[-4000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith(_PREFIX)]
    told_of = [json.loads(line.removeprefix(_PREFIX)) for line in lines]
    return {
        target: _seen(suite_name, target, [each for each in told_of if each["target"] == target])
        for target in targets
    }


def _seen(suite_name: str, target: str, lines: list[dict[str, Any]]) -> Seen:
    head, *programs, last = lines
    for each in programs:
        if "error" in each["found"] and not each["is_refused"]:
            raise RuntimeError(
                f"{suite_name} for {target}: {each['name']}: {each['found']['error']}"
            )
    records = {
        each["name"]: evidence.Record(**{k: each[k] for k in ("text", "observer", "found")})
        for each in programs
    }
    sources = Sources(modules=tuple(last["sources"]["modules"]), hash=last["sources"]["hash"])
    found = evidence.Evidence(
        compiler=head["compiler"], device=head["device"], sources=sources, records=records
    )
    return Seen(
        programs=[{"name": name} | records[name].found for name in sorted(records)],
        evidence=found,
        num_compiled=sum(each["is_compiled"] for each in programs),
        num_changed=sum(each["has_changed"] for each in programs),
        seconds=sum(each["seconds"] for each in programs),
    )


def _seen_before(kept: evidence.Evidence) -> Seen:
    return Seen(
        programs=[{"name": name} | kept.records[name].found for name in sorted(kept.records)],
        evidence=kept,
        num_compiled=0,
        num_changed=0,
        seconds=0.0,
    )


def ptxas_environment(target: str) -> dict[str, str]:
    """That makes Mosaic tell what ptxas says of its kernels."""
    folder = cuda_folder()
    if target_of(target).chip.platform != "gpu" or folder is None:
        return {}
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "MOSAIC_GPU_DUMP_PTXAS": "1"}


def main(suite_name: str, mode: str, targets: str, *more: str) -> None:
    import jax

    # Or the garbage collector scans all of jax's modules again and again.
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    for target in targets.split(","):
        _examine_all(suite_name, target, mode, *more)
        # What was traced for one target must not be lowered for another.
        jax.clear_caches()


def _examine_all(suite_name: str, target: str, mode: str, *more: str) -> None:
    device = mesh_of(target_of(target), 1).devices.flat[0]
    capability = getattr(device, "compute_capability", None)
    compiler = _compiler(target_of(target).chip.platform)
    about = {"kind": device.device_kind, "capability": capability}
    _print({"target": target, "compiler": compiler, "device": about})
    kept = evidence.read(suite_name, target)
    is_of_now = kept.is_of_now(compiler)
    for program in suite(suite_name).programs(target, *more):
        anew = mode == Mode.ALL or (mode == Mode.DUE and _is_due(suite_name, target, program.name))
        record = kept.records.get(program.name) if is_of_now else None
        if record and not anew:
            found = _of_record(record)
        else:
            found = _examine(program, compiler, kept, anew)
        named = {"target": target, "name": program.name, "is_refused": program.is_refused}
        _print(named | found)
    now = kept.sources if is_of_now and kept.sources else of_this_process()
    _print({"target": target, "sources": dataclasses.asdict(now)})


def _compiler(platform: str) -> str:
    packages = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-pjrt", "nvidia-cuda-nvcc")}[platform]
    return ", ".join(f"{package} {version(package)}" for package in ("jaxlib", *packages))


def _examine(
    program: Program, compiler: str, kept: evidence.Evidence, anew: bool
) -> dict[str, Any]:
    """`anew`: also what has a record."""
    begin = time.perf_counter()
    observer = hash_of_observer(program.look, *program.observers)
    try:
        lowered = program.lower()
        text = hash_of(lowered)
    except Exception as error:
        text, lowered = f"{type(error).__name__}: {error}", None
    record = kept.record_of(program.name, text, observer, compiler)
    if record and not anew:
        found = record.found
    else:
        found = _compile(program, lowered) if lowered else {"error": text}
    return {
        "text": text,
        "observer": observer,
        "has_changed": record is None,
        "is_compiled": record is None or anew,
        "seconds": time.perf_counter() - begin,
        "found": found,
    }


def _of_record(record: evidence.Record) -> dict[str, Any]:
    """The same of a program that cannot have changed."""
    return vars(record) | {"has_changed": False, "is_compiled": False, "seconds": 0.0}


def _compile(program: Program, lowered: Any) -> dict[str, Any]:
    print(f"compiling {program.name}", file=sys.stderr, flush=True)
    log: list[str] = []
    try:
        with _logged(log):
            compiled = lowered.compile()
        return program.look(compiled, log[0])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


@contextmanager
def _logged(log: list[str]) -> Iterator[None]:
    """What is written to both outputs meanwhile, by any part of the process, goes to `log`."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush(), sys.stderr.flush()
        outputs = {number: os.dup(number) for number in (1, 2)}
        for number in outputs:
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            for number, before in outputs.items():
                os.dup2(before, number)
                os.close(before)
            file.seek(0)
            log.append(file.read().decode(errors="replace"))


def _print(line: dict[str, Any]) -> None:
    print(f"\n{_PREFIX}{json.dumps(line)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
