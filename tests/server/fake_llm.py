"""An engine without a device behind the page: as much of `AsyncLLM` as the live view asks for."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from jaxpage.engine.scheduler import Scheduler
from jaxpage.engine.stats import EngineStats
from tests.engine.harness import make_engine
from tests.fakes import make_request

T = TypeVar("T")

PREFIX = [1 + i % 11 for i in range(160)]


def call_id(number: int) -> str:
    """The id of a call as the server makes them, but the same each time."""
    return f"{number * 0x9E3779B1 % 2**32:08x}{number:024x}"


@dataclasses.dataclass
class FakeProgram:
    name: str
    origin: str | None
    num_calls: int
    replica: int = 0


class FakeLLM:
    """Answers requests of its own, a few steps each time somebody looks: half of a prompt is common to all."""

    def __init__(self, *, num_blocks: int = 512, num_requests: int = 12, max_num_seqs: int = 8):
        self.engine = make_engine(
            num_blocks=num_blocks,
            block_size=16,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=256,
            max_model_len=2048,
        )
        self.num_looks = 0
        self.error: Exception | None = None
        self._num_requests = num_requests
        self._numbers = itertools.count()

    async def with_schedulers(self, function: Callable[[Scheduler], T]) -> dict[int, T]:
        self.num_looks += 1
        if self.error is not None:
            raise self.error
        while len(self.engine.scheduler.requests) < self._num_requests:
            self._add()
        for _ in range(5):
            self.engine.step()
        return {0: function(self.engine.scheduler)}

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def programs(self) -> list[Any]:
        steps = self.engine.stats().num_steps
        return [
            FakeProgram("decode R=2", "stored", steps // 5),
            FakeProgram("decode R=8", "compiled", steps),
            FakeProgram("forward T=256", "cached", steps // 3),
            FakeProgram("forward T=1024", None, 0),
        ]

    def _add(self) -> None:
        number = next(self._numbers)
        prompt = PREFIX + [1 + (number * 7 + i) % 11 for i in range(40 + 30 * (number % 5))]
        max_tokens = 60 + 40 * (number % 4)
        self.engine.add(
            make_request(
                f"{call_id(number)}-0-{number:08x}#{number}",
                prompt,
                max_tokens=max_tokens,
                ignore_eos=True,
            )
        )
