"""`AsyncPooler`: one pooling model for many asyncio tasks. Waiting calls are computed together.

Prompts are tokenised in one thread and computed in another. Knows the pooler and the engine. Must not know HTTP.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxpage.config import EngineConfig, ResolvedConfig
from jaxpage.engine.errors import EngineDeadError
from jaxpage.pooling.build import BuiltPooler, build_pooler
from jaxpage.pooling.engine import PoolingStats
from jaxpage.pooling.inputs import PoolingInputs
from jaxpage.pooling.pooler import ModelInfo, Pooler, Work
from jaxpage.runner.programs import ProgramRecord

T = TypeVar("T")

# How many tokens of calls are computed together: enough to fill launches, few enough that no call waits long.
_MAX_BATCH_TOKENS = 16384


@dataclass(frozen=True)
class _Call:
    work: Work
    future: Future[list[Any]]


class AsyncPooler:
    """The counterpart of `AsyncLLM` for a pooling model. Methods may be called from any thread."""

    def __init__(self, options: EngineConfig):
        """Raises ValueError or TypeError for invalid or unsupported options."""
        self._start(build_pooler(options))

    @classmethod
    def from_built(cls, built: BuiltPooler) -> AsyncPooler:
        """An AsyncPooler around a model that was built elsewhere."""
        pooler = cls.__new__(cls)
        pooler._start(built)
        return pooler

    def _start(self, built: BuiltPooler) -> None:
        self.config: ResolvedConfig = built.config
        self._built = built
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="jaxpage-inputs")
        self._shut_down = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=_compute,
            args=(built, self._calls, self._shut_down),
            name="jaxpage-pooling",
            daemon=True,
        )
        self._thread.start()

    @property
    def info(self) -> ModelInfo:
        return self._built.pooler.info

    async def read(self, prepare: Callable[[Pooler], Work]) -> Work:
        """The work of a call. `prepare` runs in the tokenizer's thread, and may raise."""
        return await self._read(lambda: prepare(self._built.pooler))

    async def compute(self, work: Work) -> list[Any]:
        """The outputs of a call. If it is cancelled before it starts, it is not computed. Raises EngineDeadError."""
        future: Future[list[Any]] = Future()
        with self._lock:
            if self._shut_down.is_set():
                raise _was_shut_down()
            self._calls.put(_Call(work, future))
        return work.finish(await asyncio.wrap_future(future))

    async def with_inputs(self, function: Callable[[PoolingInputs], T]) -> T:
        """Call a function in the tokenizer's thread."""
        return await self._read(lambda: function(self._built.pooler.inputs))

    async def _read(self, function: Callable[[], T]) -> T:
        def read() -> T:
            if self._shut_down.is_set():
                raise _was_shut_down()
            return function()

        try:
            future = self._reader.submit(read)
        except RuntimeError:  # the executor was shut down
            raise _was_shut_down() from None
        return await asyncio.wrap_future(future)

    async def wait_until_warm(self) -> None:
        """Wait until every program is compiled. Raises what the compiler raised."""
        await asyncio.to_thread(self._built.engine.wait_until_warm)

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine was shut down."""
        if self.errored:
            raise _was_shut_down()

    @property
    def errored(self) -> bool:
        return self._shut_down.is_set() or not self._thread.is_alive()

    def stats(self) -> PoolingStats:
        return self._built.engine.stats()

    def programs(self) -> list[ProgramRecord]:
        """The compiled programs, and the names of those that are not compiled yet."""
        return self._built.engine.programs()

    def shutdown(self) -> None:
        """Stop the threads. Idempotent. What is being computed is answered; calls that wait get an EngineDeadError.

        Returns once the threads have ended, unless a thread of this package calls it.
        """
        with self._lock:
            if not self._shut_down.is_set():
                self._shut_down.set()
                self._calls.put(None)
        # The garbage collector may call this in any thread, and none can wait for itself.
        waits = not threading.current_thread().name.startswith("jaxpage-")
        self._reader.shutdown(wait=waits)
        if waits:
            self._thread.join()


def _was_shut_down() -> EngineDeadError:
    return EngineDeadError("the engine was shut down")


def _compute(
    built: BuiltPooler, calls: queue.SimpleQueue[_Call | None], shut_down: threading.Event
) -> None:
    """The compute thread: take the calls that wait, and compute them together, until they are refused."""
    held: _Call | None = None
    while True:
        first = held or calls.get()
        held = None
        if first is None:
            return
        batch, num_tokens = [first], first.work.num_tokens
        ends = False
        while num_tokens < _MAX_BATCH_TOKENS:
            try:
                call = calls.get_nowait()
            except queue.Empty:
                break
            if call is None:
                ends = True
                break
            if call.work.per_token != first.work.per_token:
                held = call
                break
            batch.append(call)
            num_tokens += call.work.num_tokens
        # Calls that were cancelled in the meantime are skipped.
        wanted = [call for call in batch if call.future.set_running_or_notify_cancel()]
        if shut_down.is_set():
            _fail(wanted, _was_shut_down())
        elif wanted:
            _answer(built, wanted)
        if ends:
            return


def _answer(built: BuiltPooler, calls: list[_Call]) -> None:
    texts = [text for call in calls for text in call.work.texts]
    try:
        results = built.engine.run(texts, per_token=calls[0].work.per_token)
    except BaseException as error:
        _fail(calls, error)
        return
    start = 0
    for call in calls:
        stop = start + len(call.work.texts)
        call.future.set_result(results[start:stop])
        start = stop


def _fail(calls: list[_Call], error: BaseException) -> None:
    for call in calls:
        call.future.set_exception(error)
