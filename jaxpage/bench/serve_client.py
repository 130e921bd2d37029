"""One request to an OpenAI-compatible server: streamed, and timed by the client's clock.

Uses aiohttp, because the client often shares its cores with the server, and httpx takes twice the processor time.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxpage.bench.results import error_summary

if TYPE_CHECKING:
    import aiohttp

# Fields of a delta with output of the model. The first two are names for the same thing.
OUTPUT_FIELDS = ("reasoning", "reasoning_content", "content", "tool_calls")
READ_TIMEOUT = 600.0  # seconds without a byte, after which a request has failed


@dataclass(kw_only=True, slots=True)
class Outcome:
    """The outcome of one request. Times are those of `time.perf_counter`, in seconds."""

    start: float  # when it was sent
    times: list[float] = field(default_factory=list)  # when each chunk with tokens arrived
    usage: tuple[int, int] | None = None  # the server's counts of prompt and output tokens
    pieces: list[str] = field(default_factory=list)
    has_ended: bool = False  # according to the protocol: with a finish reason or [DONE]
    error: str = ""  # why it failed

    @property
    def num_input(self) -> int:
        return self.usage[0] if self.usage else 0

    @property
    def num_output(self) -> int:
        """The server's count, or else the number of chunks."""
        return self.usage[1] if self.usage else len(self.times)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.start

    @property
    def latency(self) -> float:
        """Seconds to the last token."""
        return self.times[-1] - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None if there is only one."""
        return (self.latency - self.ttft) / (self.num_output - 1) if self.num_output > 1 else None

    @property
    def itls(self) -> list[float]:
        """Seconds between chunks."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    def take(self, data: bytes, now: float) -> None:
        """Read one event. Raises RuntimeError if it is an error, ValueError if it is not JSON."""
        if data == b"[DONE]":
            self.has_ended = True
            return
        event = json.loads(data)
        if error := event.get("error"):
            raise RuntimeError(
                str(error.get("message", error) if isinstance(error, dict) else error)
            )
        if usage := event.get("usage"):
            self.usage = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {"content": choice.get("text")}
            ends = choice.get("finish_reason") is not None
            # A token may have no text yet. A chunk that only has the role, or only the finish reason, has no token.
            if any(map(delta.get, OUTPUT_FIELDS)) or not (self.times if ends else "role" in delta):
                self.times.append(now)
            self.pieces.append(delta.get("content") or "")
            self.has_ended |= ends


async def ask(session: aiohttp.ClientSession, url: str, body: bytes) -> Outcome:
    """Send one request and read its stream. Errors are recorded in the outcome; nothing is raised."""
    outcome = Outcome(start=time.perf_counter())
    try:
        async with session.post(url, data=body) as response:
            if response.status != 200:
                said = await response.text(errors="replace")
                raise RuntimeError(f"status {response.status}: {' '.join(said.split())}")
            rest = b""
            async for data in response.content.iter_any():
                now = time.perf_counter()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        outcome.take(line[5:].strip(), now)
        if not outcome.has_ended or not outcome.times:
            raise RuntimeError(f"the stream broke off after {len(outcome.times)} chunks")
    except Exception as error:
        outcome.error = error_summary(error)
    return outcome


def open_session(api_key: str | None) -> aiohttp.ClientSession:
    """A client without a limit on connections. Raises ValueError without aiohttp."""
    try:
        import aiohttp
    except ModuleNotFoundError:
        raise ValueError("this needs aiohttp: pip install 'jaxpage[server]'") from None
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        # Shorter than servers keep idle connections, so that no connection is reused just as the server closes it.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=60, sock_read=READ_TIMEOUT),
        headers=headers,
    )


async def first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """The first model that the server names. Raises ValueError if there is none, or no server."""
    import aiohttp

    url = f"{base_url}/v1/models"
    try:
        async with session.get(url) as response:
            response.raise_for_status()
            return (await response.json())["data"][0]["id"]
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{url} names no model ({error_summary(error)}); start the server, give its address with "
            "--base-url, or name the model with --model"
        ) from error
