"""`AsyncPooler` around an engine that computes when the test lets it."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpage.engine.errors import EngineDeadError
from jaxpage.pooling import async_pooler
from jaxpage.pooling.async_pooler import AsyncPooler
from jaxpage.pooling.engine import Text
from jaxpage.pooling.pooler import Work


class SlowEngine:
    """It says when it has begun to compute, and ends when it may."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.num_runs = 0

    def run(self, texts: list[Text], *, per_token: bool) -> list[Any]:
        self.num_runs += 1
        self.begun.set()
        assert self.may_end.wait(10)
        return [len(text.token_ids) for text in texts]


def work(per_token: bool = False) -> Work:
    return Work(texts=[Text(token_ids=[5, 6], type_ids=None)], per_token=per_token, finish=list)


@pytest.mark.parametrize("kinds", [[False] * 3, [True, False, True]], ids=["alike", "mixed"])
def test_calls_that_wait_at_a_shutdown_are_not_computed(monkeypatch, kinds):
    """With a long queue, a server that computed all of it would not end in time."""
    monkeypatch.setattr(async_pooler, "_MAX_BATCH_TOKENS", 4)
    engine = SlowEngine()
    built: Any = SimpleNamespace(config=None, engine=engine, pooler=None)
    pooler = AsyncPooler.from_built(built)

    async def main() -> list[Any]:
        first = asyncio.ensure_future(pooler.compute(work(per_token=True)))
        await asyncio.to_thread(engine.begun.wait, 10)
        waiting = [asyncio.ensure_future(pooler.compute(work(kind))) for kind in kinds]
        is_read = threading.Event()
        read = asyncio.ensure_future(pooler.read(lambda _: is_read.wait(10)))  # the reader is busy
        unread = asyncio.ensure_future(pooler.read(lambda _: work()))
        await asyncio.sleep(0.01)
        ending = asyncio.ensure_future(asyncio.to_thread(pooler.shutdown))
        while not pooler.errored:
            await asyncio.sleep(0.01)
        is_read.set()
        engine.may_end.set()
        found = await asyncio.gather(first, *waiting, read, unread, return_exceptions=True)
        await ending
        return found

    first, *waiting, read, unread = asyncio.run(main())
    assert first == [2] and read is True and engine.num_runs == 1
    for error in (*waiting, unread):
        assert isinstance(error, EngineDeadError) and "shut down" in str(error)
