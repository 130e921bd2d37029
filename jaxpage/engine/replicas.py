"""Several engines, each on its own devices, behind the interface of one: each request is answered by one of them.

Knows which replica has which request, and what happens to a request when its replica fails. Must not know how an engine
steps (`replica` does), how a replica is chosen (`routing` does), or what is computed.

A replica fails when several of its steps fail in a row, or when its thread ends for any other reason; it is then
removed. Its requests, and those of any failed step, restart on a replica that has not tried them yet, unless their
caller has already seen tokens of them; those end with an error.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from jaxpage.engine.engine import LONGEST_WAIT, Engine
from jaxpage.engine.errors import EngineDeadError, StepFailedError
from jaxpage.engine.replica import Replica, Report
from jaxpage.engine.routing import Router
from jaxpage.engine.scheduler import Scheduler
from jaxpage.engine.sequences import restart
from jaxpage.engine.stats import EngineStats, of_failed, total
from jaxpage.engine.step_output import StepOutput, TextEnd
from jaxpage.request import Request
from jaxpage.sampling_params import RequestOutputKind

logger = logging.getLogger(__name__)

T = TypeVar("T")

# How many replicas a request may be given to, in case it is the request that makes them fail.
MAX_TRIES = 3


@dataclass(kw_only=True, slots=True)
class _Assignment:
    """An unfinished request, and the replica that answers it."""

    request: Request
    tried: list[int]  # numbers of replicas; the last one has it now
    unfinished: set[int]  # indices of its sequences
    has_answer: bool = False  # the caller got tokens of it since it (re)started
    has_text_end: bool = False  # some of its sequences ended at a stop string

    @property
    def replica(self) -> int:
        return self.tried[-1]

    @property
    def may_be_reassigned(self) -> bool:
        """Whether it may restart elsewhere: the caller has seen no tokens, and fewer than MAX_TRIES have failed."""
        unseen = (
            not self.has_answer or self.request.params.output_kind is RequestOutputKind.FINAL_ONLY
        )
        return unseen and len(self.tried) < MAX_TRIES


class Replicas:
    """Implements `EngineVerbs`. From here on each engine belongs to its own thread."""

    def __init__(self, engines: Sequence[Engine]):
        """The engines must be interchangeable: the same request gives the same result on each."""
        self._reports: SimpleQueue[Report] = SimpleQueue()
        self._all = [Replica(i, engine, self._reports) for i, engine in enumerate(engines)]
        self._live = dict(enumerate(self._all))
        pools = [engine.scheduler.kv.pool for engine in engines]
        self._router = Router(
            len(engines),
            block_size=pools[0].block_size if pools[0].enable_prefix_caching else 0,
            max_blocks=sum(pool.num_blocks for pool in pools),
        )
        self._assignments: dict[str, _Assignment] = {}
        # For each replica, requests that have ended here but may still occur in its reports.
        self._forgotten = [Counter[str]() for _ in engines]
        self._restarted: list[str] = []  # reported with the next output
        self._failed: list[str] = []
        self._is_held = False
        # The threads have no reference to this object, so it can be garbage-collected while they run.
        self._finalizer = weakref.finalize(self, _stop, self._all)

    # Requests.

    def add(self, request: Request) -> None:
        """See `EngineVerbs`. Raises EngineDeadError if no replica is left, ValueError if the wanted one is not.

        `Request.replica` says where it begins; if that replica fails, another one may take it over like any request.
        """
        if request.request_id in self._assignments:
            raise ValueError(f"request id {request.request_id!r} is in use")
        able, error = self._able(request, list(self._live))
        if not able:
            raise error or EngineDeadError(f"all {len(self._all)} replicas have failed")
        if request.replica is not None:
            able = [number for number in able if number == request.replica]
        if not able:
            raise ValueError(f"replica {request.replica} has failed: choose another, or none")
        assignment = _Assignment(request=request, tried=[], unfinished=set())
        self._assignments[request.request_id] = assignment
        self._assign(assignment, able)

    def abort(self, request_id: str) -> Request | None:
        """See `EngineVerbs`."""
        assignment = self._assignments.get(request_id)
        if assignment is not None:
            self._forget(assignment)
        return assignment and assignment.request

    def end_by_text(self, end: TextEnd) -> None:
        """See `EngineVerbs`. Ignores the end of a request on a replica that no longer has it."""
        self._all[end.replica].end_by_text(end)
        assignment = self._assignments.get(end.request_id)
        if assignment is not None and assignment.replica == end.replica:
            assignment.unfinished.discard(end.index)
            assignment.has_text_end = True
            if not assignment.unfinished:
                self._forget(assignment)

    def _able(
        self, request: Request, replicas: Sequence[int]
    ) -> tuple[list[int], ValueError | None]:
        """The replicas that can answer a request, and the error of a working replica that cannot."""
        able, error = [], None
        for number in replicas:
            if self._all[number].error is not None:  # about to be removed
                continue
            try:
                self._all[number].engine.scheduler.first_sequences(request)
            except ValueError as e:
                error = e
            else:
                able.append(number)
        return able, error

    def _assign(self, assignment: _Assignment, able: list[int]) -> None:
        request = assignment.request
        assignment.tried.append(self._router.choose(request, able))
        assignment.unfinished = set(range(request.params.n if request.beams is None else 1))
        assignment.has_answer = assignment.has_text_end = False
        self._all[assignment.replica].add(request)

    def _forget(self, assignment: _Assignment) -> None:
        """End a request before its replica has reported the end."""
        request_id = assignment.request.request_id
        self._end(request_id)
        self._forgotten[assignment.replica][request_id] += 1
        self._all[assignment.replica].forget(request_id)

    def _end(self, request_id: str) -> None:
        del self._assignments[request_id]
        self._router.ended(request_id)

    # Steps.

    def step(self) -> StepOutput:
        """The output of the next replica to report. Replicas run steps by themselves, a little ahead of the caller.

        Raises what a step raised, or StepFailedError if a replica was removed, if that ends any request or no replica
        is left.
        """
        if self._is_held:
            self._is_held = False
            for replica in self._live.values():
                replica.release()
        return self._next()

    def collect(self) -> StepOutput:
        """The outputs still to be reported. No replica launches another step until `step` is called."""
        if not self._is_held:
            self._is_held = True
            for replica in self._live.values():
                replica.hold()
        return self._next()

    @property
    def has_step_in_flight(self) -> bool:
        """See `EngineVerbs`."""
        if not self._is_held or not all(r.has_done_all for r in self._live.values()):
            return True
        return bool(self._restarted) or not self._reports.empty()

    def has_unfinished_requests(self) -> bool:
        """See `EngineVerbs`."""
        if self._assignments or self._restarted:
            return True
        # In this order: an idle replica has already reported everything.
        return not all(r.is_idle for r in self._live.values()) or not self._reports.empty()

    @property
    def num_unfinished(self) -> int:
        """See `EngineVerbs`."""
        return len(self._assignments)

    @property
    def unfinished_ids(self) -> list[str]:
        """See `EngineVerbs`."""
        return list(self._assignments)

    def take_failed(self) -> list[str]:
        """See `EngineVerbs`."""
        failed, self._failed = self._failed, []
        return failed

    @property
    def death(self) -> str | None:
        """See `EngineVerbs`. The engine is alive as long as one replica is."""
        return None if self._live else f"all {len(self._all)} replicas have failed"

    def _next(self) -> StepOutput:
        while True:
            if self._restarted:
                restarted, self._restarted = self._restarted, []
                return StepOutput(restarted=restarted)
            try:
                report = self._reports.get(timeout=LONGEST_WAIT)
            except Empty:
                return StepOutput()
            if report.output is not None:
                return self._take(report.replica, report.output)
            if report.forgotten is not None:
                self._forgotten[report.replica] -= Counter([report.forgotten])
            elif report.is_last:
                self._remove(report.replica, report.error)
            elif report.error is not None:
                logger.error(
                    "a step of replica %d has failed", report.replica, exc_info=report.error
                )
                failed = [i for i in report.failed if self._is_assigned(report.replica, i)]
                self._reassign(failed, report.error)

    def _take(self, number: int, output: StepOutput) -> StepOutput:
        """Update the records of requests from an output of their replica, and drop what no longer concerns it."""
        self._all[number].take_one()
        forgotten = self._forgotten[number]
        places = (*output.scored, *output.captured)
        names = {*output.request_ids, *(name for name, *_ in places if name is not None)}
        stale = {name for name in names if name in forgotten or not self._is_assigned(number, name)}
        if stale:
            output = output.without(stale)
        for request_id in output.request_ids:
            assignment = self._assignments[request_id]
            if not assignment.has_answer:
                assignment.has_answer = True
                self._router.answered(request_id)
        for entry in output.ends:
            assignment = self._assignments.get(output.request_ids[entry])
            if assignment is None:  # all sequences have ended, this one earlier, at a stop string
                continue
            assignment.unfinished.discard(output.indices[entry])
            if not assignment.unfinished:
                # The replica may not know yet that a sequence ended at a stop string, and report more of it.
                if assignment.has_text_end:
                    self._forget(assignment)
                else:
                    self._end(assignment.request.request_id)
        return output

    def _is_assigned(self, number: int, request_id: str) -> bool:
        assignment = self._assignments.get(request_id)
        return assignment is not None and assignment.replica == number

    def _remove(self, number: int, error: BaseException | None) -> None:
        """Remove a replica whose thread has ended."""
        del self._live[number]
        self._forgotten[number].clear()
        if error is None:  # it was stopped on purpose
            return
        logger.error(
            "replica %d has failed and is taken out; %d of %d are left",
            number,
            len(self._live),
            len(self._all),
            exc_info=error,
        )
        failed = StepFailedError(f"replica {number} has failed and was taken out: {error!r}")
        self._reassign([i for i in self._assignments if self._is_assigned(number, i)], failed)

    def _reassign(self, request_ids: list[str], error: BaseException) -> None:
        """Restart requests on other replicas. Raises the error if that fails for any of them, or no replica is left."""
        lost = []
        for request_id in request_ids:
            assignment = self._assignments[request_id]
            able: list[int] = []
            if assignment.may_be_reassigned:
                untried = [i for i in self._live if i not in assignment.tried]
                able, _ = self._able(assignment.request, untried)
            self._router.ended(request_id)
            if able:
                restart(assignment.request)
                self._assign(assignment, able)
                self._restarted.append(request_id)
            else:
                del self._assignments[request_id]
                lost.append(request_id)
        num_moved = len(request_ids) - len(lost)
        if num_moved:
            logger.warning("%d requests begin anew on other replicas", num_moved)
        self._failed += lost
        if lost or not self._live:
            raise error

    # The rest.

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """See `EngineVerbs`. Without `reset_running_requests`, returns False while any request is unfinished."""
        if self._assignments and not reset_running_requests:
            return False

        def reset(engine: Engine) -> bool:
            return engine.reset_prefix_cache(reset_running_requests=reset_running_requests)

        self._router.forget_prefixes()
        return all(self._on_each(reset))

    def save_prefix_cache(self) -> None:
        """See `EngineVerbs`. All replicas write to the same folder, where equal blocks have equal names."""
        self._on_each(Engine.save_prefix_cache)

    def with_schedulers(
        self, function: Callable[[Scheduler], T], replica: int | None = None
    ) -> dict[int, Future[T]]:
        """See `EngineVerbs`."""

        def of(engine: Engine) -> Callable[[], T]:
            return lambda: function(engine.scheduler)

        chosen = [r for r in self._live.values() if replica in (None, r.number)]
        return {r.number: r.call(of(r.engine)) for r in chosen}

    def stats(self) -> EngineStats:
        """The sum, and the counters of each replica. Thread-safe."""
        parts = [of_failed(r.engine.stats()) if r.error else r.engine.stats() for r in self._all]
        return total(parts)

    def programs(self) -> list[Any]:
        """The programs of each replica, one after another. Thread-safe."""
        return [
            replace(record, replica=replica.number)
            for replica in self._all
            for record in replica.engine.programs()
        ]

    def keep_pace(self) -> None:
        """See `EngineVerbs`."""
        self._on_each(Engine.keep_pace)

    def sleep_until_due(self) -> None:
        """No effect here: each engine does so in its own thread."""

    def wait_until_warm(self) -> None:
        """See `EngineVerbs`."""
        for replica in self._all:
            replica.engine.wait_until_warm()

    def close(self) -> None:
        """See `EngineVerbs`."""
        self._finalizer()

    def _on_each(self, function: Callable[[Engine], T]) -> list[T]:
        """Call a function with each live engine between two of its steps. Returns the results."""

        def of(engine: Engine) -> Callable[[], T]:
            return lambda: function(engine)

        futures = [replica.call(of(replica.engine)) for replica in self._live.values()]
        errors = [future.exception() for future in futures]
        for error in errors:
            # A replica that has just failed is about to be removed.
            if error is not None and not isinstance(error, EngineDeadError):
                raise error
        return [f.result() for f, error in zip(futures, errors, strict=True) if error is None]


def _stop(replicas: list[Replica]) -> None:
    for replica in replicas:
        replica.stop()
    for replica in replicas:
        replica.join()
