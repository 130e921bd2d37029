"""Compiles programs ahead of time, through the persistent cache, and counts every compilation.

Knows names and how to lower what they stand for. Must not know what a program computes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax

logger = logging.getLogger(__name__)

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
_CACHE_DIR = "jax_compilation_cache_dir"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"

Lowering = Callable[[], jax.stages.Lowered]


@dataclass(frozen=True, kw_only=True)
class Program:
    """An executable and its line in the manifest."""

    name: str
    compiled: jax.stages.Compiled
    seconds: float  # tracing, lowering and compiling
    cache_hit: bool  # the executable came from the persistent cache

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


_thread = (
    threading.local()
)  # watcher: the counter at work; hit: the last compilation was a cache hit


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


def compile_program(name: str, lowering: Lowering) -> Program:
    start = time.perf_counter()
    _thread.hit = False
    compiled = lowering().compile()
    seconds = time.perf_counter() - start
    return Program(name=name, compiled=compiled, seconds=seconds, cache_hit=_thread.hit)


class Programs:
    """The programs of an engine by name.

    `start` compiles those on which any plan can run, if need be in a larger bucket than necessary; the others follow
    in a thread behind the first requests. `wait` for them before measuring anything.
    """

    def __init__(self, lowerings: dict[str, Lowering]):
        self.ready: dict[str, Program] = {}
        self.seconds = 0.0  # from `start` until all were compiled; 0 before that
        self._lowerings = lowerings
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, first: Iterable[str]) -> None:
        """Compile `first` in parallel, return, and go on with the others in the order of the lowerings."""
        start = time.perf_counter()
        with ThreadPoolExecutor(max_workers=num_cores()) as threads:
            for program in threads.map(self._compile, first):
                self.ready[program.name] = program
        names = [name for name in self._lowerings if name not in self.ready]
        self._thread = threading.Thread(
            target=_compile_behind, args=(weakref.ref(self), names, start), name="jaxpage-compile"
        )
        self._thread.start()

    def wait(self) -> None:
        """Until all are compiled. Raises what the compiler raised."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def __getitem__(self, name: str) -> jax.stages.Compiled:
        """Compiles it first if that has not been done."""
        if name not in self.ready:
            self.ready[name] = self._compile(name)
        return self.ready[name].compiled

    def manifest(self) -> str:
        """The table printed after warm-up: name, seconds, temporaries, cache hit."""
        lines = [f"{'program':<20} {'seconds':>8} {'temporaries':>12}  cache"]
        for program in self.ready.values():
            megabytes = program.temp_bytes / 1e6
            cache = "hit" if program.cache_hit else "miss"
            lines.append(
                f"{program.name:<20} {program.seconds:>8.2f} {megabytes:>9.1f} MB  {cache}"
            )
        hits = sum(program.cache_hit for program in self.ready.values())
        lines.append(f"{len(self.ready)} programs in {self.seconds:.1f} s, {hits} from the cache")
        return "\n".join(lines)

    def _compile(self, name: str) -> Program:
        return compile_program(name, self._lowerings[name])


def _compile_behind(reference: weakref.ref[Programs], names: list[str], start: float) -> None:
    """The thread's work; ends early when nobody needs the programs any more: engine gone, or Python exiting."""
    for name in names:
        programs = reference()
        if programs is None or not threading.main_thread().is_alive():
            return
        try:
            programs.ready[name] = programs._compile(name)
        except BaseException as error:  # raised by `wait`, or again at first use
            programs._error = error
            logger.error("compiling %s failed: %s", name, error)
            return
        del programs
    if programs := reference():
        programs.seconds = time.perf_counter() - start
        logger.info("%s", programs.manifest())


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
