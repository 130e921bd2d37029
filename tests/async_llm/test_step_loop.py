"""The end of the engine's thread, with an engine that does nothing: nobody may wait forever."""

from __future__ import annotations

import threading

import pytest

from jaxpage.async_llm.step_loop import PauseMode, StepLoop
from jaxpage.engine.errors import EngineDeadError


class Engine:
    """Holds requests, and cannot abort one of them."""

    has_step_in_flight = False

    def __init__(self, *unfinished: str, broken: str = ""):
        self.unfinished_ids = list(unfinished)
        self._broken = broken

    def keep_pace(self) -> None: ...

    def sleep_until_due(self) -> None: ...

    def has_unfinished_requests(self) -> bool:
        return False

    def abort(self, request_id: str) -> None:
        if request_id == self._broken:
            raise AssertionError("block 3 was freed twice")
        self.unfinished_ids.remove(request_id)


class Sink:
    def __init__(self) -> None:
        self.errors: list[Exception] = []

    def fail_all(self, error: Exception) -> None:
        self.errors.append(error)


def make(engine: Engine) -> tuple[StepLoop, Sink]:
    sink = Sink()
    return StepLoop(engine, sink), sink  # pyright: ignore[reportArgumentType]


def test_an_abort_that_fails_is_the_end_and_all_requests_hear_of_it(caplog):
    engine = Engine("good", "bad", "late", broken="bad")
    loop, sink = make(engine)
    for request_id in ("bad", "bad", "late"):
        loop.post(lambda name=request_id: loop.abort([name]))
    settled = loop.call(lambda: loop.pause(PauseMode.KEEP))
    with pytest.raises(AssertionError, match="freed twice"):
        loop.run()
    assert engine.unfinished_ids == ["bad"]
    (error,) = sink.errors
    assert isinstance(error, EngineDeadError) and "freed twice" in str(error)
    assert settled.result(0).done()
    assert "request bad cannot be aborted" in caplog.text


def test_an_engine_that_cannot_name_its_requests_fails_them_too(monkeypatch, caplog):
    def unfinished_ids(_):
        raise RuntimeError("lost count")

    loop, sink = make(Engine())
    monkeypatch.setattr(Engine, "unfinished_ids", property(unfinished_ids), raising=False)
    loop.post(lambda: loop.stop(EngineDeadError("the engine was shut down")))
    with pytest.raises(RuntimeError, match="lost count"):
        loop.run()
    assert [str(e) for e in sink.errors] == ["the engine was shut down"] * 2
    assert "lost count" in caplog.text


def test_who_calls_while_the_thread_ends_is_answered_whatever_else_fails():
    loop, _ = make(Engine())
    answers = []

    def fail() -> None:
        raise AssertionError("block 3 was freed twice")

    def stop() -> None:
        loop.stop(EngineDeadError("the engine was shut down"))
        for _ in range(2):
            loop.post(fail)
            answers.append(loop.call(lambda: "answered"))

    loop.post(stop)
    with pytest.raises(AssertionError, match="freed twice"):
        loop.run()
    assert [answer.result(0) for answer in answers] == ["answered"] * 2


def test_who_pauses_while_the_thread_ends_does_not_wait():
    loop, _ = make(Engine())
    settled = []

    def stop() -> None:
        loop.stop(EngineDeadError("the engine was shut down"))
        settled.append(loop.call(lambda: loop.pause(PauseMode.KEEP)))  # as another thread may

    loop.post(stop)
    thread = threading.Thread(target=loop.run)
    thread.start()
    thread.join(5)
    assert settled[0].result(0).done()
