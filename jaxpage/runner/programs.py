"""Compiles programs ahead of time, in parallel, through the persistent cache, and counts every compilation."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


@dataclass(frozen=True, kw_only=True)
class Program:
    """An executable and its line in the manifest."""

    name: str
    compiled: jax.stages.Compiled
    seconds: float  # tracing, lowering and compiling
    cache_hit: bool  # the executable came from the persistent cache

    @property
    def temp_bytes(self) -> int:
        return self.compiled.memory_analysis().temp_size_in_bytes

    @property
    def alias_bytes(self) -> int:
        return self.compiled.memory_analysis().alias_size_in_bytes


class CompilationCounter:
    """Counts what jax compiles on this thread while `watching`: a launch after warm-up should compile nothing."""

    def __init__(self) -> None:
        self.num_compilations = 0
        self.num_cache_hits = 0
        self._thread = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_duration(self, event: str, duration: float, **_: object) -> None:
        if event == _BACKEND_COMPILE and getattr(self._thread, "watching", False):
            self.num_compilations += 1

    def _on_event(self, event: str, **_: object) -> None:
        if event == _CACHE_HIT:
            self._thread.hit = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._thread.watching = True
        try:
            yield
        finally:
            self._thread.watching = False

    def compile(self, name: str, lowered: Callable[[], jax.stages.Lowered]) -> Program:
        start = time.perf_counter()
        self._thread.hit = False
        compiled = lowered().compile()
        seconds = time.perf_counter() - start
        return Program(name=name, compiled=compiled, seconds=seconds, cache_hit=self._thread.hit)


def compile_all(
    lowerings: dict[str, Callable[[], jax.stages.Lowered]], counter: CompilationCounter
) -> dict[str, Program]:
    """All programs by name. Tracing holds Python's lock, compiling does not, so a pool of threads keeps cores busy."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        futures: dict[str, Future[Program]] = {
            name: threads.submit(counter.compile, name, lowered)
            for name, lowered in lowerings.items()
        }
        return {name: future.result() for name, future in futures.items()}


def use_persistent_cache(folder: str) -> None:
    """Keep executables in `folder` across processes; "" leaves jax as it is. A folder the user chose wins."""
    if not folder or jax.config.jax_compilation_cache_dir is not None:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # By default jax keeps only programs that took a second to compile: half of a small model's would be missing.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def manifest(programs: dict[str, Program], seconds: float) -> str:
    """The table printed after warm-up: name, seconds, temporaries, cache hit."""
    lines = [f"{'program':<20} {'seconds':>8} {'temporaries':>12}  cache"]
    for program in programs.values():
        megabytes = program.temp_bytes / 1e6
        cache = "hit" if program.cache_hit else "miss"
        lines.append(f"{program.name:<20} {program.seconds:>8.2f} {megabytes:>9.1f} MB  {cache}")
    hits = sum(program.cache_hit for program in programs.values())
    lines.append(f"{len(programs)} programs in {seconds:.1f} s, {hits} from the cache")
    return "\n".join(lines)
