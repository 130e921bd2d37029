"""Compiles programs ahead of time, through the persistent cache, and counts every compilation.

Knows names and how to lower what they stand for. Must not know what a program computes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import jax

from jaxpage.runner.program_store import ProgramStore

logger = logging.getLogger(__name__)

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
_CACHE_DIR = "jax_compilation_cache_dir"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"

MAX_THREADS = 8  # more would wait for each other in Python, where programs are traced

Lowering = Callable[[], jax.stages.Lowered]


@dataclass(frozen=True, kw_only=True)
class Program:
    """An executable and its line in the manifest."""

    name: str
    compiled: jax.stages.Compiled
    seconds: float  # tracing, lowering and compiling, or loading
    # "stored": loaded from a `ProgramStore`; "cached": compiled through jax's persistent cache; "compiled"
    origin: str

    @property
    def temp_bytes(self) -> int:
        return self._memory("temp_size_in_bytes")

    @property
    def alias_bytes(self) -> int:
        return self._memory("alias_size_in_bytes")

    @property
    def result_bytes(self) -> int:
        """Outputs that no donated input gave its memory to."""
        return self._memory("output_size_in_bytes") - self.alias_bytes

    def _memory(self, name: str) -> int:
        return getattr(self.compiled.memory_analysis(), name)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramRecord:
    """A program of an engine as `LLM.programs` reports it. Until it is compiled, only the name is known."""

    name: str
    origin: str | None = None  # as in `Program`; None until it is compiled
    seconds: float = 0.0  # tracing, lowering and compiling, or loading
    executable: jax.stages.Compiled | None = None
    num_calls: int = 0  # since start
    replica: int = 0  # whose program it is, with `data_parallel_size`

    @property
    def temp_bytes(self) -> int:
        """What a launch needs besides its arguments and results. To ask takes some 20 ms."""
        if self.executable is None:
            return 0
        memory: Any = self.executable.memory_analysis()
        return memory.temp_size_in_bytes


class CompilationCounter:
    """Counts what jax compiles on this thread while `watching`: a launch after warm-up should compile nothing."""

    def __init__(self) -> None:
        self.num_compilations = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        _thread.watcher = self
        try:
            yield
        finally:
            _thread.watcher = None


# watcher: the counter at work; hit: the last compilation was a cache hit
_thread = threading.local()


def _on_duration(event: str, duration_secs: float, **_: str | int) -> None:
    watcher = getattr(_thread, "watcher", None)
    if event == _BACKEND_COMPILE and watcher is not None:
        watcher.num_compilations += 1


def _on_event(event: str, **_: str | int) -> None:
    if event == _CACHE_HIT:
        _thread.hit = True


# Once for the process: jax has no public way to take a listener back.
jax.monitoring.register_event_duration_secs_listener(_on_duration)
jax.monitoring.register_event_listener(_on_event)


def compile_program(name: str, lowering: Lowering, store: ProgramStore | None = None) -> Program:
    """The program, from the store if it is there; else it is there from now on, if it was compiled.

    XLA:CPU writes a program that came from jax's cache without the functions it calls: that one cannot be stored.
    """
    start = time.perf_counter()
    compiled = None if store is None else store.load(name)
    origin = "stored"
    if compiled is None:
        _thread.hit = False
        compiled = lowering().compile()
        origin = "cached" if _thread.hit else "compiled"
    seconds = time.perf_counter() - start
    if store is not None and origin == "compiled":
        store.save(name, compiled)
    return Program(name=name, compiled=compiled, seconds=seconds, origin=origin)


class NeedsMemory(Protocol):
    """A program, or what is known of one. Both in bytes."""

    @property
    def temp_bytes(self) -> int: ...

    @property
    def result_bytes(self) -> int: ...


def step_bytes(programs: Sequence[NeedsMemory]) -> int:
    """Temporaries and results of a step that runs through these programs. Two results: one waits to be read."""
    results = sum(program.result_bytes for program in programs)
    return max(program.temp_bytes for program in programs) + 2 * results


class Programs:
    """The programs of an engine by name.

    `start` compiles them behind the first requests, on as many threads as there are cores; who needs one before its
    turn waits for it. `wait` for all before measuring anything.
    """

    def __init__(self, lowerings: dict[str, Lowering], store: ProgramStore | None = None):
        self.ready: dict[str, Program] = {}
        self.seconds = 0.0  # from `start` until all were compiled; 0 before that
        self.names = tuple(lowerings)
        self.num_calls: Counter[str] = Counter()  # by name; whoever runs a program counts it
        self._lowerings, self._store = lowerings, store
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()  # of `ready` and of the error
        self._error: BaseException | None = None

    def start(self, order: Iterable[str]) -> None:
        """Begin to compile the named programs in this order, and return at once."""
        queue: SimpleQueue[str] = SimpleQueue()
        for name in order:
            queue.put(name)
        arguments = (weakref.ref(self), queue, time.perf_counter())
        self._threads = [
            threading.Thread(target=_compile_behind, args=arguments, name="jaxpage-compile")
            for _ in range(min(num_cores(), MAX_THREADS))
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Until all are compiled. Raises what the compiler raised."""
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def wait_for(self, choices: Sequence[Sequence[str]]) -> int:
        """The index of the first choice whose programs are all ready; waits until there is one.

        If nobody compiles any more (nothing was started, or the main thread has ended and others go on), the first
        choice is compiled here. Raises what the compiler raised, if that is why there is none.
        """
        with self._changed:
            while True:
                for index, names in enumerate(choices):
                    if all(name in self.ready for name in names):
                        return index
                if self._error is not None:
                    raise self._error
                if not any(thread.is_alive() for thread in self._threads):
                    break
                self._changed.wait(1.0)  # seconds; a thread that ends early tells nobody
        for name in choices[0]:
            if name not in self.ready:
                self._compile(name)
        return 0

    def __getitem__(self, name: str) -> jax.stages.Compiled:
        """Waits until it is compiled, or compiles it if that was not started."""
        if name not in self.ready:
            self.wait_for([[name]])
        return self.ready[name].compiled

    def records(self) -> list[ProgramRecord]:
        """All programs, in the order of their names."""
        found = [(name, self.ready.get(name)) for name in self.names]
        return [
            ProgramRecord(name=name)
            if program is None
            else ProgramRecord(
                name=name,
                origin=program.origin,
                seconds=program.seconds,
                executable=program.compiled,
                num_calls=self.num_calls[name],
            )
            for name, program in found
        ]

    def manifest(self) -> str:
        """The table printed after warm-up: name, seconds, temporaries, origin."""
        lines = [f"{'program':<20} {'seconds':>8} {'temporaries':>12}  origin"]
        for program in self.ready.values():
            megabytes = program.temp_bytes / 1e6
            lines.append(
                f"{program.name:<20} {program.seconds:>8.2f} {megabytes:>9.1f} MB  {program.origin}"
            )
        count = Counter(program.origin for program in self.ready.values())
        origins = ", ".join(f"{number} {origin}" for origin, number in count.items())
        lines.append(f"{len(self.ready)} programs in {self.seconds:.1f} s: {origins}")
        return "\n".join(lines)

    def _compile(self, name: str) -> None:
        program = compile_program(name, self._lowerings[name], self._store)
        with self._changed:
            self.ready[name] = program
            self._changed.notify_all()

    def _fail(self, name: str, error: BaseException) -> None:
        logger.error("compiling %s failed: %s", name, error)
        with self._changed:
            self._error = error
            self._changed.notify_all()


def _compile_behind(
    reference: weakref.ref[Programs], queue: SimpleQueue[str], start: float
) -> None:
    """A thread's work; ends early when nobody needs the programs any more: engine gone, or Python exiting."""
    while True:
        programs = reference()
        if programs is None or programs._error or not threading.main_thread().is_alive():
            return
        try:
            name = queue.get_nowait()
        except Empty:
            return
        try:
            programs._compile(name)
        except BaseException as error:  # raised to whoever waits
            programs._fail(name, error)
            return
        if len(programs.ready) == len(programs.names):
            programs.seconds = time.perf_counter() - start
            logger.debug("%s", programs.manifest())
        del programs


def use_persistent_cache(folder: str) -> None:
    """Keep executables in `folder` across processes; "" leaves jax as it is. A folder the user chose wins.

    XLA:CPU cuts loops into as many parts as there are cores, which jax's cache keys do not tell: a program compiled on
    one core would run on one of sixteen. So each number of cores has a subfolder.
    """
    if not folder or getattr(jax.config, _CACHE_DIR) is not None:
        return
    path = Path(folder) / f"{num_cores()}-cores"
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update(_CACHE_DIR, str(path))
    # By default jax keeps only programs that took a second to compile: half of a small model's would be missing.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def num_cores() -> int:
    """Cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # there is none on macOS
    return len(allowed(0)) if allowed else os.cpu_count() or 1
