"""The loop: schedule a step, launch it, collect it, update the requests.

Knows the order of these four calls, and what to do when one of them fails. Must not know what is scheduled (the
scheduler does), how a step runs (the runner does), or text and prompts (the user-facing layer does). It never imports
jax; any object with the members of `StepRunner` will do as a runner. New features do not touch this file.

Two loops stand side by side, the plain one first. The overlapped loop launches step n+1 before it collects step n, so
the device does not wait for the host. The price: a sequence that ends in step n may have a row in step n+1, whose
result is discarded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from jaxpage.engine.pace import Pace
from jaxpage.engine.scheduled_step import ScheduledStep
from jaxpage.engine.scheduler import Scheduler
from jaxpage.engine.stats import EngineStats, engine_stats
from jaxpage.engine.step_output import StepOutput, TextEnd
from jaxpage.plan import ParameterError, StepPlan, StepResult
from jaxpage.request import Request, WaitingFor

# Seconds for which an idle step waits for a mask. Short, because the caller may have new requests by then.
LONGEST_WAIT = 0.01
POLL_INTERVAL = 0.005  # seconds between two checks whether the step in flight is done
MAX_FAILURES = 3  # consecutive failed steps, after which the engine counts as dead

T = TypeVar("T")


class StepRunner(Protocol):
    """What the engine needs from a runner. Steps run, and are collected, in the order of their launches."""

    @property
    def num_recompiles(self) -> int: ...

    def launch(self, plan: StepPlan) -> Any:
        """Start a step and return a handle at once."""
        ...

    def is_done(self, launched: Any, /) -> bool:
        """Whether `collect` would not have to wait for the device."""
        ...

    def collect(self, launched: Any, /) -> StepResult:
        """Wait for a launched step."""
        ...

    def weights_changed(self) -> bool:
        """Whether a parameter was replaced since the last call."""
        ...

    def recover(self) -> bool:
        """Make the next step possible after one has failed. True if the KV pool was lost."""
        ...

    def wait_until_warm(self) -> None:
        """Wait until nothing is left to compile."""
        ...

    def store_blocks(
        self, device: list[tuple[int, bytes]], host: list[tuple[int, bytes]], /
    ) -> None:
        """Write the contents of blocks to disk: pairs of (device or host block, hash)."""
        ...


class Engine:
    """Answers requests, a step at a time. Not thread-safe: one thread calls it."""

    def __init__(self, scheduler: Scheduler, runner: StepRunner, *, overlap: bool):
        self.scheduler = scheduler
        self.runner = runner
        self.overlap = overlap
        # The overlapped loop's step in flight.
        self._launched: tuple[ScheduledStep, Any] | None = None
        self._failed: list[str] = []
        self._num_failures = 0  # consecutive steps that raised
        self._pace: Pace | None = None  # if new requests may come between steps

    def add(self, request: Request) -> None:
        """Queue a request, which the engine owns from here on. Raises ValueError for one that can never run."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request between two steps, with the tokens it has; None if it is unknown or has ended."""
        return self.scheduler.abort(request_id)

    def end_by_text(self, end: TextEnd) -> None:
        """End a sequence between two steps because of its text; no effect if it has already ended."""
        self.scheduler.end_by_text(end)

    def step(self) -> StepOutput:
        """Run one step. Returns what sequences gained, which may be nothing.

        If nothing can run until a mask arrives, it waits for at most LONGEST_WAIT and returns. Sequences whose masks
        will never come end in the step after the one that asked for them.

        If a launch or a collection raises, the requests of that step end as aborted, all others continue with the next
        call, and the exception propagates; `take_failed` returns the ids of the failed requests. If scheduling raises,
        these are all requests.
        """
        return self._counting_failures(self._step)

    def collect(self) -> StepOutput:
        """Collect the step in flight, if there is one, without launching another. Returns and raises like `step`."""
        return self._counting_failures(self._collect_launched)

    @property
    def has_step_in_flight(self) -> bool:
        """Whether `collect` has something to collect."""
        return self._launched is not None

    @property
    def death(self) -> str | None:
        """Why no further step is likely to succeed; None while the engine is alive."""
        if self._num_failures < MAX_FAILURES:
            return None
        return f"{self._num_failures} steps failed in a row"

    def take_failed(self) -> list[str]:
        """Ids of the requests that failed steps have ended since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def notice_weight_changes(self, *, keep_cache: bool = False) -> int:
        """Notice replaced parameters, as each step does. Returns how often they have been replaced.

        `keep_cache`: KV that the old parameters computed stays in the prefix cache.
        """
        if self.runner.weights_changed():
            self.scheduler.begin_weight_epoch(keep_cache=keep_cache)
        return self.scheduler.counters.num_weight_changes

    def _counting_failures(self, move_on: Callable[[], StepOutput]) -> StepOutput:
        try:
            output = move_on()
        except ParameterError:  # not counted: the trainer may still replace the parameter
            raise
        except Exception:
            self._num_failures += 1
            raise
        if output.result is not None:  # the overlapped loop collects nothing at first
            self._num_failures = 0
        return output

    def _step(self) -> StepOutput:
        self.notice_weight_changes()
        if self.scheduler.failed:
            return self.scheduler.end_failed()
        return self._step_overlapped() if self.overlap else self._step_plain()

    def _collect_launched(self) -> StepOutput:
        previous, self._launched = self._launched, None
        return StepOutput() if previous is None else self._collect(*previous)

    def _step_plain(self) -> StepOutput:
        step = self._schedule()
        if step is None:
            self._wait()
            return StepOutput()
        return self._collect(step, self._launch(step))

    def _step_overlapped(self) -> StepOutput:
        step = self._schedule()
        if step is None and self._launched is None:
            self._wait()
        # A launch that raises leaves the step in flight to be collected by the next call.
        launched = None if step is None else (step, self._launch(step))
        previous, self._launched = self._launched, launched
        return StepOutput() if previous is None else self._collect(*previous)

    def has_unfinished_requests(self) -> bool:
        """Whether to call `step` again: a request is unfinished, or a step has not been collected."""
        return bool(self.scheduler.requests) or self._launched is not None

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self.scheduler.requests)

    @property
    def unfinished_ids(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return list(self.scheduler.requests)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Empty the prefix cache of device and host. Returns False and does nothing while any request holds blocks.

        With `reset_running_requests`, running requests are preempted first and recomputed when they resume. Blocks on
        disk stay: other processes have them too, and they are for these weights.
        """
        if reset_running_requests:
            self.scheduler.preempt_all()
        kv = self.scheduler.kv
        if not kv.pool.reset_prefix_cache():
            return False
        if kv.tier is not None:
            kv.tier.forget_cached()
        if kv.states is not None:
            kv.states.forget_all()
        return True

    def save_prefix_cache(self) -> None:
        """Write all cached blocks of device and host to `kv_offload_dir`; no effect without that option."""
        pool, tier = self.scheduler.kv.pool, self.scheduler.kv.tier
        if tier is not None and tier.store is not None:
            self.runner.store_blocks(pool.registered(), tier.pool.registered())

    def stats(self) -> EngineStats:
        """The counters as of now."""
        return engine_stats(self.scheduler, self.runner.num_recompiles)

    def with_schedulers(
        self, function: Callable[[Scheduler], T], replica: int | None = None
    ) -> dict[int, Future[T]]:
        """See `EngineVerbs`. There is one scheduler, that of replica 0."""
        if replica not in (None, 0):
            return {}
        found: Future[T] = Future()
        found.set_result(function(self.scheduler))
        return {0: found}

    def programs(self) -> list[Any]:
        """A record of each program of the runner."""
        runner: Any = self.runner
        return runner.programs.records()

    def keep_pace(self) -> None:
        """See `EngineVerbs`."""
        self._pace = Pace(self.scheduler.decode_steps.most)

    def sleep_until_due(self) -> None:
        """See `EngineVerbs`."""
        if self._pace is None or self._launched is None:
            return
        step, launched = self._launched
        due = self._pace.next_launch(step.plan, step.launch_time)
        # A step may end long before it is expected to: a launch that waited for the compiler looked like a slow step.
        while (seconds := due - time.monotonic()) > 0 and not self.runner.is_done(launched):
            time.sleep(min(seconds, POLL_INTERVAL))
        self._pace.began_to_prepare(time.monotonic())

    def wait_until_warm(self) -> None:
        """Wait until the runner has nothing left to compile."""
        self.runner.wait_until_warm()

    def close(self) -> None:
        """No effect: it has no threads of its own."""

    def _schedule(self) -> ScheduledStep | None:
        try:
            return self.scheduler.schedule()
        except BaseException:
            self._failed += [request.request_id for request in self.scheduler.abort_all()]
            raise

    def _wait(self) -> None:
        """Wait for a mask, if any sequence needs one, because there is nothing else to do."""
        if self.scheduler.failed:
            return
        for sequence in self.scheduler.running:
            source = sequence.request.mask_source
            if sequence.waiting_for is WaitingFor.MASK and source is not None:
                source.wait(LONGEST_WAIT)
                return
        assert not self.scheduler.requests, "unfinished requests, but nothing to compute"

    def _launch(self, step: ScheduledStep) -> Any:
        step.launch_time = time.monotonic()
        try:
            launched = self.runner.launch(step.plan)
        except BaseException:
            self._abort_failed([step])
            raise
        if self._pace is not None:
            self._pace.launched(time.monotonic())
        return launched

    def _collect(self, step: ScheduledStep, handle: Any) -> StepOutput:
        try:
            result = self.runner.collect(handle)
        except BaseException:
            # The step launched after this one reads what this one wrote, so it fails too.
            failed = [step] if self._launched is None else [step, self._launched[0]]
            self._launched = None
            self._abort_failed(failed)
            raise
        try:
            output = self.scheduler.update(step, result)
        except BaseException:  # the result contradicts the plan
            self._abort_failed([step])
            raise
        if self._pace is not None:
            self._pace.collected(step.plan, step.launch_time, output.time)
            steps = self.scheduler.decode_steps._replace(while_open=self._pace.num_steps)
            self.scheduler.decode_steps = steps
        return output

    def _abort_failed(self, steps: list[ScheduledStep]) -> None:
        """End the requests of failed steps. If the pool was lost, all other requests are recomputed."""
        self._failed += [request.request_id for request in self.scheduler.abort_steps(steps)]
        if self.runner.recover():
            self.scheduler.preempt_all()
