"""The interface of an engine, whether it is one or several replicas.

`engine.Engine` and `replicas.Replicas` implement it. Only one thread calls these methods, unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from jaxpage.engine.scheduler import Scheduler
from jaxpage.engine.stats import EngineStats
from jaxpage.engine.step_output import StepOutput, TextEnd
from jaxpage.request import Request

T = TypeVar("T")


class EngineVerbs(Protocol):
    """Answers requests, a step at a time."""

    def add(self, request: Request) -> None:
        """Queue a request, which the engine owns from here on. Raises ValueError for one that can never run."""
        ...

    def abort(self, request_id: str) -> Request | None:
        """End a request between two steps; None if it is unknown or has ended. No later output mentions it."""
        ...

    def end_by_text(self, end: TextEnd) -> None:
        """End a sequence between two steps because of its text; no effect if it has already ended."""
        ...

    def step(self) -> StepOutput:
        """Run a step. Returns what sequences gained, which may be nothing. It may wait, but only briefly.

        If it raises, some requests have ended: `take_failed` returns them. All others continue with the next call.
        """
        ...

    def collect(self) -> StepOutput:
        """Collect a step in flight without launching another. Returns and raises like `step`."""
        ...

    @property
    def has_step_in_flight(self) -> bool:
        """Whether a step is in flight or unreported, so that `collect` has something to return."""
        ...

    def take_failed(self) -> list[str]:
        """Ids of the requests that failed steps have ended since the last call."""
        ...

    def has_unfinished_requests(self) -> bool:
        """Whether to call `step` again."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have not ended."""
        ...

    @property
    def unfinished_ids(self) -> list[str]:
        """Ids of the requests that have not ended."""
        ...

    @property
    def death(self) -> str | None:
        """Why no further step is likely to succeed; None while the engine is alive."""
        ...

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Empty the prefix cache. Returns False and does nothing while any request holds blocks.

        With `reset_running_requests`, running requests are preempted first and recomputed when they resume.
        """
        ...

    def save_prefix_cache(self) -> None:
        """Write all cached blocks of device and host to `kv_offload_dir`; no effect without that option."""
        ...

    def with_schedulers(
        self, function: Callable[[Scheduler], T], replica: int | None = None
    ) -> dict[int, Future[T]]:
        """Call a function with each scheduler, or that of one replica, between two of its steps.

        Returns futures by the numbers of live replicas. The function must change nothing and be quick: steps wait.
        """
        ...

    def stats(self) -> EngineStats:
        """The current counters. Thread-safe."""
        ...

    def programs(self) -> list[Any]:
        """A `runner.programs.ProgramRecord` of each program. Thread-safe."""
        ...

    def keep_pace(self) -> None:
        """From now on launch little at a time, and late, so that requests which arrive meanwhile wait less."""
        ...

    def sleep_until_due(self) -> None:
        """After `keep_pace`: sleep until the next launch is due. Requests that arrive meanwhile join that step."""
        ...

    def wait_until_warm(self) -> None:
        """Wait until nothing is left to compile. Thread-safe."""
        ...

    def close(self) -> None:
        """End its threads; requests are no longer answered."""
        ...
