"""Compiles programs ahead of time, through the persistent cache, and counts every compilation.

Knows the names of programs and how to lower them. Must not know what a program computes.
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

MAX_THREADS = 8  # more would contend for the GIL while tracing

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
        """Bytes of outputs that do not reuse the memory of a donated input."""
        return self._memory("output_size_in_bytes") - self.alias_bytes

    def _memory(self, name: str) -> int:
        return getattr(self.compiled.memory_analysis(), name)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramRecord:
    """A program of an engine, as `LLM.programs` reports it. Until it is compiled, only its name is known."""

    name: str
    origin: str | None = None  # as in `Program`; None until it is compiled
    seconds: float = 0.0  # tracing, lowering and compiling, or loading
    executable: jax.stages.Compiled | None = None
    num_calls: int = 0  # since start
    replica: int = 0  # the owner, with `data_parallel_size`

    @property
    def temp_bytes(self) -> int:
        """Bytes that a launch needs besides its arguments and results. Asking takes about 20 ms."""
        if self.executable is None:
            return 0
        memory: Any = self.executable.memory_analysis()
        return memory.temp_size_in_bytes


class CompilationCounter:
    """Counts compilations by jax on this thread while `watching`: after warm-up a launch should compile nothing."""

    def __init__(self) -> None:
        self.num_compilations = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        _thread.watcher = self
        try:
            yield
        finally:
            _thread.watcher = None


# watcher: the active counter; hit: the last compilation was a cache hit
_thread = threading.local()


def _on_duration(event: str, duration_secs: float, **_: str | int) -> None:
    watcher = getattr(_thread, "watcher", None)
    if event == _BACKEND_COMPILE and watcher is not None:
        watcher.num_compilations += 1


def _on_event(event: str, **_: str | int) -> None:
    if event == _CACHE_HIT:
        _thread.hit = True


# Once per process: jax has no public way to unregister a listener.
jax.monitoring.register_event_duration_secs_listener(_on_duration)
jax.monitoring.register_event_listener(_on_event)


def compile_program(name: str, lowering: Lowering, store: ProgramStore | None = None) -> Program:
    """Load a program from the store, or compile it and store it.

    A program from jax's cache is not stored, because XLA:CPU serialises it without the functions that it calls.
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
    """The memory that a program needs, in bytes."""

    @property
    def temp_bytes(self) -> int: ...

    @property
    def result_bytes(self) -> int: ...


def step_bytes(programs: Sequence[NeedsMemory]) -> int:
    """Temporaries and results of a step that runs these programs. Results count twice: one may still be unread."""
    results = sum(program.result_bytes for program in programs)
    return max(program.temp_bytes for program in programs) + 2 * results


class Programs:
    """The programs of an engine by name.

    `start` compiles them in the background, on one thread per core; a caller that needs a program early waits for it.
    Call `wait` before measuring anything.
    """

    def __init__(self, lowerings: dict[str, Lowering], store: ProgramStore | None = None):
        self.ready: dict[str, Program] = {}
        self.seconds = 0.0  # from `start` until all were compiled; 0 before that
        self.names = tuple(lowerings)
        self.num_calls: Counter[str] = Counter()  # by name; counted by whoever runs the program
        self._lowerings, self._store = lowerings, store
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()  # `ready` or `_error` changed
        self._error: BaseException | None = None

    def start(self, order: Iterable[str]) -> None:
        """Start to compile the named programs in this order, and return at once."""
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
        """Wait until all are compiled. Raises what the compiler raised."""
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def wait_for(self, choices: Sequence[Sequence[str]]) -> int:
        """The index of the first choice whose programs are all compiled; waits until there is one.

        If no thread is compiling (nothing was started, or the main thread has ended while others continue), the first
        choice is compiled here. Raises what the compiler raised, if no choice is available for that reason.
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
                self._changed.wait(1.0)  # seconds; a thread that ends early does not notify
        for name in choices[0]:
            if name not in self.ready:
                self._compile(name)
        return 0

    def __getitem__(self, name: str) -> jax.stages.Compiled:
        """Waits until it is compiled, or compiles it if no thread does."""
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
    """Runs in a thread; ends early when the programs are no longer needed: engine gone, or Python exiting."""
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
        except BaseException as error:  # raised again where somebody waits
            programs._fail(name, error)
            return
        if len(programs.ready) == len(programs.names):
            programs.seconds = time.perf_counter() - start
            logger.debug("%s", programs.manifest())
        del programs


def use_persistent_cache(folder: str) -> None:
    """Keep executables in `folder` across processes; "" leaves jax as it is. A folder that the user set stays.

    A folder that cannot be made is logged, and nothing is kept.

    XLA:CPU splits loops by the number of cores, which is not part of jax's cache keys: a program compiled on one core
    would use one core of sixteen. So each number of cores has its own subfolder.
    """
    if not folder or getattr(jax.config, _CACHE_DIR) is not None:
        return
    path = Path(folder) / f"{num_cores()}-cores"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning(
            "no programs are kept for the next start: %s cannot be made (%s); name another folder with "
            'compilation_cache_dir, or give it "off"',
            path,
            error.strerror,
        )
        return
    jax.config.update(_CACHE_DIR, str(path))
    # By default jax caches only programs that took a second to compile, which leaves out half of a small model's.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def num_cores() -> int:
    """Cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # missing on macOS
    return len(allowed(0)) if allowed else os.cpu_count() or 1
