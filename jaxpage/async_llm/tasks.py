"""The three threads of an `AsyncLLM`, and how they are connected."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from jaxpage.async_llm.output_loop import EngineCalls, OutputLoop
from jaxpage.async_llm.step_loop import PauseMode, StepLoop
from jaxpage.async_llm.streams import LastOutput, Receiver
from jaxpage.engine.errors import EngineDeadError
from jaxpage.engine.step_output import StepOutput, TextEnd
from jaxpage.input_processor import InputProcessor
from jaxpage.output_processor import OutputProcessor, make_detokenizer
from jaxpage.outputs import RequestOutput
from jaxpage.request import Request

if TYPE_CHECKING:
    from jaxpage.build import Built

logger = logging.getLogger(__name__)

T = TypeVar("T")
Prepare = Callable[[InputProcessor], Sequence[Request]]


class Tasks:
    """Input processing, the engine's steps, output processing: a request goes through them in this order.

    Everything here may be called from any thread.
    """

    def __init__(self, built: Built):
        self.engine = built.engine
        # From callers' names of unfinished requests to the engine's ids: a caller may reuse a name while the engine
        # still has a step in flight for the request that had it before.
        self._ids: dict[str, str] = {}
        self._num_added = itertools.count()
        self.inputs = InputProcessor(built, ids_in_use=self._ids)
        self.steps = StepLoop(built.engine, _ToOutputs(self))
        detokenizers = functools.partial(make_detokenizer, built.tokenizer)
        processor = OutputProcessor(detokenizers, built.config.stream_interval)
        to_engine = EngineCalls(end_by_text=self._end_by_text, abort=self._abort)
        self.outputs = OutputLoop(processor, to_engine, self._ended)
        self._is_shut_down = False
        self._input_thread = ThreadPoolExecutor(1, "jaxpage-input")
        self._threads = [
            threading.Thread(target=self._run_steps, name="jaxpage-engine", daemon=True),
            threading.Thread(target=self._run_outputs, name="jaxpage-output", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        if built.hosts is not None:
            lose = self.steps.lose_hosts
            built.hosts.when_lost(lambda error: self.steps.post(lambda: lose(error)))

    def with_inputs(self, function: Callable[[InputProcessor], T]) -> Future[T]:
        """Call a function in the input thread, the only one that uses the input processor."""

        def call() -> T:
            if self._is_shut_down:
                raise self._death
            return function(self.inputs)

        try:
            return self._input_thread.submit(call)
        except RuntimeError:
            raise self._death from None

    def start(self, prepare: Prepare, receivers: Sequence[Receiver]) -> Future[list[Future[None]]]:
        """Make a request for each receiver and submit them; none is submitted if `prepare` raises, or makes another
        number of requests, which is a ValueError.

        An inner future is done when the engine has accepted or refused its request.
        """
        arrival_time, queued_time = time.time(), time.monotonic()

        def begin(inputs: InputProcessor) -> list[Future[None]]:
            requests = prepare(inputs)
            if len(requests) != len(receivers):
                raise ValueError(
                    f"{len(requests)} requests were made for {len(receivers)} prompts; give a list with one entry for "
                    "each prompt"
                )
            for request in requests:
                request.arrival_time, request.queued_time = arrival_time, queued_time
            return [self._add(*pair) for pair in zip(requests, receivers, strict=True)]

        return self.with_inputs(begin)

    def submit(self, prepare: Prepare, num_requests: int) -> list[Future[RequestOutput]]:
        """Futures of the final outputs of the `num_requests` requests that `prepare` makes.

        Cancelling a future aborts its request. All raise what `prepare` raises, and each the engine's error for it.
        """
        receivers = [LastOutput() for _ in range(num_requests)]

        def refused(future: Future[Any], refused: list[LastOutput]) -> None:
            error = self._death if future.cancelled() else future.exception()
            if isinstance(error, Exception):
                for receiver in refused:
                    receiver.receive(error)

        def made(future: Future[list[Future[None]]]) -> None:
            refused(future, receivers)
            if not future.cancelled() and future.exception() is None:
                for added, receiver in zip(future.result(), receivers, strict=True):
                    added.add_done_callback(functools.partial(refused, refused=[receiver]))

        self.start(prepare, receivers).add_done_callback(made)
        return [receiver.future for receiver in receivers]

    def abort(self, names: list[str]) -> None:
        """End requests with the tokens they have; their last outputs have the finish reason "abort".

        Those that still wait for the input thread end once it has prepared them. Unknown names are ignored.
        """
        self._abort_known(names)
        waiting = [name for name in names if name not in self._ids]
        if waiting:
            # The input thread keeps to the order of calls: what was started before this is then known.
            with contextlib.suppress(EngineDeadError):
                self.with_inputs(lambda _: self._abort_known(waiting))

    def abort_all(self) -> Future[None]:
        """`abort` all requests, also those that wait for the end of a pause.

        The future does not wait for those that the input thread has yet to prepare; they end after that.
        """
        aborted = self.steps.call(self._abort_all)
        with contextlib.suppress(EngineDeadError):
            # The input thread keeps to the order of calls: what was started before this is then known, and no more.
            self.with_inputs(lambda _: self.steps.post(self._abort_all))
        return aborted

    def pause(self, mode: PauseMode, check: Callable[[], object]) -> Future[Future[None]]:
        """The inner future is done when nothing runs on the device.

        `check` is called first, in the engine's thread, and may raise: then there is no pause.
        """

        def begin() -> Future[None]:
            check()
            if mode is PauseMode.ABORT:
                self._abort_all()
            return self.steps.pause(mode)

        return self.steps.call(begin)

    def shut_down(self) -> None:
        """Stop all threads. Unfinished requests get an EngineDeadError, also those that wait for the input thread.

        Returns once the threads have ended, unless a thread of this package calls it.
        """
        self._is_shut_down = True
        self._input_thread.shutdown(wait=False)
        self.steps.post(lambda: self.steps.stop(EngineDeadError("the engine was shut down")))
        if threading.current_thread().name.startswith("jaxpage-"):
            # The garbage collector may call this in any thread. One of ours must not wait for the engine's thread,
            # which may itself be waiting for it, if it is a replica's or one that compiles.
            threading.Thread(target=self._close, name="jaxpage-close", daemon=True).start()
        else:
            self._close()

    def _close(self) -> None:
        for thread in self._threads:
            thread.join()
        self.engine.close()

    @property
    def _death(self) -> EngineDeadError:
        """Why the engine no longer answers."""
        return self.steps.error or EngineDeadError("the engine was shut down")

    def _add(self, request: Request, receiver: Receiver) -> Future[None]:
        name = request.request_id
        request.request_id = f"{name}#{next(self._num_added)}"
        discard = functools.partial(self._discard, request.request_id)
        receiver.open(request, discard)
        self._ids[name] = request.request_id
        self.outputs.post(lambda: self.outputs.add(request, name, receiver))
        added = self.steps.call(lambda: self.steps.add(request))

        def check(added: Future[None]) -> None:
            # The output thread may have failed the request, and aborted it, before the engine had it.
            if added.cancelled() or added.exception() or self._ids.get(name) != request.request_id:
                discard()

        added.add_done_callback(check)
        if receiver.is_closed:
            discard()
        return added

    def _run_steps(self) -> None:
        try:
            self.steps.run()
        finally:
            self.outputs.post(self.outputs.stop)

    def _run_outputs(self) -> None:
        try:
            self.outputs.run()
        except Exception as error:  # a bug; without outputs the engine is useless
            logger.exception("the output thread has failed")
            dead = EngineDeadError(f"the output thread has failed: {error!r}")
            self.steps.post(lambda: self.steps.stop(dead))
            self.steps.read_all()
            self.outputs.run_failed(dead)

    def _abort_known(self, names: list[str]) -> None:
        ids = [i for name in names if (i := self._ids.get(name)) is not None]
        self.steps.post(lambda: self.steps.abort(ids))
        self.outputs.post(lambda: self.outputs.abort(ids))

    def _abort_all(self) -> None:
        """In the engine's thread."""
        aborted = self.steps.abort_all()
        self.outputs.post(lambda: self.outputs.abort(aborted))

    def _discard(self, request_id: str) -> None:
        """The caller no longer waits for a request."""
        self._abort([request_id])
        self.outputs.post(lambda: self.outputs.discard(request_id))

    def _abort(self, request_ids: list[str]) -> None:
        self.steps.post(lambda: self.steps.abort(request_ids))

    def _ended(self, name: str, request_id: str) -> None:
        """A request has ended; its caller may reuse its name."""
        if self._ids.get(name) == request_id:
            del self._ids[name]

    def _end_by_text(self, ends: list[TextEnd]) -> None:
        def end() -> None:
            for text_end in ends:
                self.engine.end_by_text(text_end)

        self.steps.post(end)


class _ToOutputs:
    """Passes what the engine's thread produces to the output thread."""

    def __init__(self, tasks: Tasks):
        self._tasks = tasks

    def take(self, step: StepOutput) -> None:
        """See `Sink`."""
        tasks = self._tasks

        def take() -> None:
            tasks.outputs.take(step)
            tasks.steps.read_one()

        tasks.outputs.post(take)

    def fail(self, request_ids: list[str], error: Exception) -> None:
        """See `Sink`."""
        self._tasks.outputs.post(lambda: self._tasks.outputs.fail(request_ids, error))

    def fail_all(self, error: Exception) -> None:
        """See `Sink`."""
        self._tasks.outputs.post(lambda: self._tasks.outputs.fail_all(error))
