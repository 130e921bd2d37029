"""An OpenAI-compatible server that answers what a test says, when it says so."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

# Seconds of silence, then bytes of the body; None breaks the connection. Or a status and a text.
Answer = Iterable[tuple[float, bytes | None]] | tuple[int, str]
DONE = b"data: [DONE]\n\n"


def event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(said: str, finish: str | None = None, **more: Any) -> bytes:
    """A chunk of a completion."""
    return event({"choices": [{"index": 0, "text": said, "finish_reason": finish}]} | more)


def delta(finish: str | None = None, **fields: Any) -> bytes:
    """A chunk of a chat."""
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


def usage(num_input: int, num_output: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": num_input, "completion_tokens": num_output}}


def count_to(number: int, *, seconds: float = 0.0) -> list[tuple[float, bytes | None]]:
    """A stream of so many tokens, each after so many seconds."""
    tokens = [
        (seconds, text(f" {i}", "length" if i == number - 1 else None)) for i in range(number)
    ]
    return [*tokens, (0.0, event({"choices": []} | usage(7, number))), (0.0, DONE)]


@dataclass
class Seen:
    """A request."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    at: float = field(default_factory=time.perf_counter)


class FakeOpenAI:
    """Listens on a free port of 127.0.0.1, in a thread of its own, while it is entered."""

    def __init__(self, answer: Callable[[dict[str, Any]], Answer]) -> None:
        self._answer = answer
        self.seen: list[Seen] = []
        self.num_running = self.most_running = 0
        self._listens = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> FakeOpenAI:
        self._thread.start()
        assert self._listens.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._connections: set[asyncio.Task] = set()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._listens.set()
        await self._stop.wait()
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer a request. False: the connection is broken off."""
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        _, path, _ = first.split()
        if path == "/v1/models":
            self._whole(writer, 200, json.dumps({"data": [{"id": "fake"}, {"id": "other"}]}))
            return True
        seen = Seen(path, headers, json.loads(data))
        self.seen.append(seen)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            return await self._streamed(writer, self._answer(seen.body))
        finally:
            self.num_running -= 1

    async def _streamed(self, writer: asyncio.StreamWriter, answer: Answer) -> bool:
        if isinstance(answer, tuple):
            self._whole(writer, *answer)
            return True
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        for seconds, data in answer:
            if seconds:
                await asyncio.sleep(seconds)
            if data is None:
                return False
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        return True

    def _whole(self, writer: asyncio.StreamWriter, status: int, said: str) -> None:
        head = (
            f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(said)}"
        )
        writer.write(f"{head}\r\n\r\n{said}".encode())
