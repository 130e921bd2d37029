"""The requests of one call, a prompt each, from their admission to their end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jaxpage.async_llm import AsyncLLM, Stream
from jaxpage.input_processor import InputProcessor
from jaxpage.lora.request import LoRARequest
from jaxpage.outputs import RequestOutput
from jaxpage.prompts import Prompt
from jaxpage.sampling_params import SamplingParams
from jaxpage.server.errors import ApiError


@dataclass(kw_only=True)
class InFlight:
    """The calls that are being answered."""

    max_requests: int
    rejected: Callable[[], None]  # hears of each call that is refused because there are too many
    num_requests: int = 0  # prompts
    is_draining: bool = False
    # Request ids of the engine by the id that the client knows.
    engine_ids: dict[str, list[str]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def enter(self, call_id: str, num_prompts: int) -> list[str]:
        """Ids for the engine. Raises ApiError 503 if there are too many, or the server shuts down."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", headers={"Retry-After": "5"})
        if self.num_requests and self.num_requests + num_prompts > self.max_requests:
            self.rejected()
            raise ApiError(
                503,
                f"{self.num_requests} requests are being answered or wait, which is the limit; try again later",
                headers={"Retry-After": "1"},
            )
        self.num_requests += num_prompts
        # Clients may use an id twice; the engine's are unique.
        ids = [f"{call_id}-{i}-{next(self._numbers)}" for i in range(num_prompts)]
        self.engine_ids.setdefault(call_id, []).extend(ids)
        return ids

    def leave(self, call_id: str, ids: Sequence[str]) -> None:
        """They have ended."""
        self.num_requests -= len(ids)
        gone = set(ids)
        left = [i for i in self.engine_ids.get(call_id, ()) if i not in gone]
        if left:
            self.engine_ids[call_id] = left
        else:
            self.engine_ids.pop(call_id, None)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a call wants of the engine: all its prompts are answered with the same parameters."""

    prompts: Sequence[Prompt]
    params: SamplingParams


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who asks: the call's id, and the W3C trace context it belongs to."""

    id: str
    trace_headers: Mapping[str, str] | None = None


class Batch:
    """The streams of one call. It must be closed."""

    def __init__(self, in_flight: InFlight, call_id: str, ids: list[str]):
        self.streams: list[Stream] = []
        self._in_flight = in_flight
        self._call_id = call_id
        self._ids = ids

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The engine's names of its requests."""
        return tuple(self._ids)

    @classmethod
    async def start(
        cls,
        llm: AsyncLLM,
        in_flight: InFlight,
        caller: Caller,
        read: Callable[[InputProcessor], Asked],
        num_prompts: int = 1,
        priority: int = 0,
        adapter: LoRARequest | None = None,
    ) -> Batch:
        """Have all prompts answered, or none. Raises ApiError and what `AsyncLLM.start_all` raises.

        `read` is called in the thread of the input processor.
        """
        ids = in_flight.enter(caller.id, num_prompts)
        batch = cls(in_flight, caller.id, ids)

        def read_all(inputs: InputProcessor) -> tuple[Sequence[Prompt], SamplingParams]:
            asked = read(inputs)
            return asked.prompts, asked.params

        try:
            batch.streams = await llm.start_all(
                read_all,
                ids,
                lora_request=adapter,
                trace_headers=caller.trace_headers,
                priority=priority,
            )
        except BaseException:
            batch.close()
            raise
        return batch

    async def last_outputs(self) -> list[RequestOutput]:
        """The last output of each prompt."""
        outputs = []
        for stream in self.streams:
            output = await anext(stream)
            while not output.finished:
                output = await anext(stream)
            outputs.append(output)
        return outputs

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(index of the prompt, an output), as they come."""
        if len(self.streams) == 1:
            async for output in self.streams[0]:
                yield 0, output
            return
        waiting = {asyncio.ensure_future(anext(s)): i for i, s in enumerate(self.streams)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = waiting.pop(task)
                    output = task.result()
                    yield index, output
                    if not output.finished:
                        waiting[asyncio.ensure_future(anext(self.streams[index]))] = index
        finally:
            for task in waiting:
                task.cancel()

    def close(self) -> None:
        """Abort what has not ended, and make room for others."""
        for stream in self.streams:
            stream.close()
        self._in_flight.leave(self._call_id, self._ids)
        self._ids = []
