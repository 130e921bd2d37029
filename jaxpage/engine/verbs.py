"""What those who drive an engine may ask of it, whether it is one engine or several behind one front.

`engine.Engine` and `replicas.Replicas` have these verbs. One thread calls them, except where it is said otherwise.
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
        """Queue a request, the engine's from here on. Raises ValueError for what can never run."""
        ...

    def abort(self, request_id: str) -> Request | None:
        """End a request between two steps; None if unknown or ended. Nothing is said of it any more."""
        ...

    def end_by_text(self, end: TextEnd) -> None:
        """End a sequence between two steps, because of its text; nothing if it has ended already."""
        ...

    def step(self) -> StepOutput:
        """What sequences gained meanwhile, perhaps nothing. It may wait, but not for long.

        If it raises, some requests have ended, and `take_failed` says which; all others go on with the next call.
        """
        ...

    def collect(self) -> StepOutput:
        """The same of a step under way, without launching any more. What `step` raises."""
        ...

    @property
    def has_step_under_way(self) -> bool:
        """Whether to call `collect` again, until the device computes nothing."""
        ...

    def take_failed(self) -> list[str]:
        """Ids of the requests that calls which raised have ended, since this was last called."""
        ...

    def has_unfinished_requests(self) -> bool:
        """Whether to call `step` again."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        ...

    @property
    def unfinished_ids(self) -> list[str]:
        """Of the requests that have not ended."""
        ...

    @property
    def death(self) -> str | None:
        """Why no step is likely to succeed any more; None while one may."""
        ...

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Empty the prefix cache. False, and nothing happens, while any request holds blocks.

        With `reset_running_requests` they give them back, and are computed anew when they go on.
        """
        ...

    def save_prefix_cache(self) -> None:
        """Write what device and host know by hash to `kv_offload_dir`; nothing happens without it."""
        ...

    def look(
        self, function: Callable[[Scheduler], T], replica: int | None = None
    ) -> dict[int, Future[T]]:
        """Have a function called with each scheduler, or with that of one replica, between two of its steps.

        The keys are numbers of replicas that work. It may only look, and be quick: steps wait.
        """
        ...

    def stats(self) -> EngineStats:
        """The counters as of now. Any thread may ask."""
        ...

    def programs(self) -> list[Any]:
        """A `runner.programs.ProgramRecord` of each program. Any thread may ask."""
        ...

    def shorten_launches(self) -> None:
        """Launch fewer decode steps at a time from now on if they take long, as requests may come meanwhile."""
        ...

    def wait_until_warm(self) -> None:
        """Until nothing is left to compile. Any thread may wait."""
        ...

    def close(self) -> None:
        """End the threads that it has of its own. Requests are not answered any more."""
        ...
