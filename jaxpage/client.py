"""A running server in the terminal: `jaxpage chat --url` and `jaxpage complete --url`.

Knows OpenAI's API, from outside. Must not know engines: it loads no model, and imports no jax.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rich.console import Console

from jaxpage.terminal import long_lines

if TYPE_CHECKING:
    import aiohttp

HELP = "/reset begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer"
PATIENCE = 600.0  # seconds without a byte
CHECK_SECONDS = 10.0  # for an answer that takes no computing


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A server, and what every request to it says."""

    url: str  # with or without /v1 at its end
    api_key: str | None = None
    model: str | None = None  # None: the first one it serves
    options: dict[str, Any] = field(default_factory=dict)  # fields of the requests

    def __post_init__(self) -> None:
        """Raise ValueError if the URL is not that of an HTTP server."""
        try:
            parts = urlsplit(self.url)
            is_whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # of a port that is no number, or is above 65535
            is_whole = False
        if not is_whole:
            raise ValueError(
                f"{self.url!r} is not the URL of a server; write it like http://127.0.0.1:8000"
            )
        url = self.url.rstrip("/").removesuffix("/v1").rstrip("/")
        object.__setattr__(self, "url", url)

    async def check(self) -> None:
        """Raise ValueError if there is no such server, or it does not take the key. If a model is named, /v1/models may
        be missing.
        """
        async with self._open(CHECK_SECONDS) as session:
            if not self.model:
                await self._first_model(session)
                return
            async with session.get(f"{self.url}/v1/models") as response:
                if response.status in (401, 403):
                    text = await response.text(errors="replace")
                    raise ValueError(self._message(response.status, text))

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of an answer. Raises ValueError with what the server says is wrong."""
        async with self._open() as session:
            model = self.model or await self._first_model(session)
            asked = {"model": model, "stream": True, **self.options, **body}
            async with session.post(f"{self.url}{path}", json=asked) as response:
                if response.status != 200:
                    text = await response.text(errors="replace")
                    raise ValueError(self._message(response.status, text))
                async for line in response.content:
                    data = line.removeprefix(b"data:").strip()
                    if not line.startswith(b"data:") or data == b"[DONE]":
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise ValueError(self._message(response.status, data.decode()))
                    yield event

    async def _first_model(self, session: aiohttp.ClientSession) -> str:
        async with session.get(f"{self.url}/v1/models") as response:
            text = await response.text(errors="replace")
        if response.status == 200:
            with contextlib.suppress(ValueError, LookupError, TypeError):
                return json.loads(text)["data"][0]["id"]
        raise ValueError(self._message(response.status, text, of_models=True))

    @contextlib.asynccontextmanager
    async def _open(self, seconds: float | None = None) -> AsyncIterator[aiohttp.ClientSession]:
        """For requests that take at most so long, if this is given. Raises ValueError if no server answers."""
        try:
            import aiohttp
        except ModuleNotFoundError:
            raise ValueError("this needs aiohttp: pip install 'jaxpage[server]'") from None
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=30, sock_read=PATIENCE)
        try:
            async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
                yield session
        except (aiohttp.ClientError, TimeoutError) as error:
            # aiohttp's own text repeats the address, and has Python's names of TLS settings.
            cause = getattr(error, "os_error", None)
            reason = getattr(cause, "strerror", None) or str(error) or type(error).__name__
            if isinstance(cause, ConnectionRefusedError):
                reason = "nothing listens on this port"
            elif isinstance(error, TimeoutError) and seconds is not None:
                reason = f"nothing came in {seconds:g} s"
            raise ValueError(f"{self.url} does not answer: {reason}") from error

    def _message(self, status: int, text: str, *, of_models: bool = False) -> str:
        """What the server says, if it is in OpenAI's format; else its status and text, or for /v1/models that the
        answer is not in that format.
        """
        fields = None
        with contextlib.suppress(ValueError):
            fields = json.loads(text)
        fields = fields if isinstance(fields, dict) else {}
        error = fields.get("error")
        said = error.get("message") if isinstance(error, dict) else error
        if isinstance(said, str) and said:
            return said
        if of_models and status in (200, 404):
            said = " ".join(text[:100].split())
            return (
                f"{self.url} is not a server of OpenAI's API: /v1/models answers {status}, {said!r}"
            )
        others = [fields.get("message"), fields.get("detail"), " ".join(text[:300].split())]
        said = next((each for each in others if isinstance(each, str) and each), "nothing")
        return f"{self.url} answers {status}: {said}"


def complete(remote: Remote, prompts: tuple[str, ...], write: Callable[[str], None]) -> None:
    """Continue prompts, one after the other. Raises ValueError.

    A prompt is written when its answer begins, so one that the server refuses is not.
    """

    async def run(prompt: str) -> None:
        begun = False
        try:
            async for event in remote.stream("/v1/completions", {"prompt": prompt}):
                if not begun:
                    write(prompt)
                    begun = True
                for choice in event.get("choices") or ():
                    write(choice.get("text") or "")
        finally:
            if begun:
                write("\n")

    for prompt in prompts:
        asyncio.run(run(prompt))


def converse(
    remote: Remote,
    console: Console,
    read: Callable[[], str],
    *,
    system: str | None = None,
) -> list[dict[str, str]]:
    """Read lines, answer each, until /exit or the end of the input; returns what was said since the last /reset.

    Raises ValueError if there is no such server.
    """
    first = [{"role": "system", "content": system}] if system is not None else []
    turns = list(first)
    asyncio.run(remote.check())
    console.print(HELP, style="dim", highlight=False)
    with long_lines():
        while True:
            try:
                line = read().strip()
                if line == "/exit":
                    return turns
                if line == "/reset":
                    turns = list(first)
                    console.print("the conversation begins anew", style="dim")
                elif line.startswith("/"):
                    console.print(f"{line.split()[0]} is not a command: {HELP}", style="dim")
                elif line:
                    turns = _answer(remote, console, turns, line)
            except EOFError:
                return turns
            except KeyboardInterrupt:  # not while an answer was being written
                console.print(f"\n{HELP}", style="dim", highlight=False)


def _answer(
    remote: Remote, console: Console, turns: list[dict[str, str]], question: str
) -> list[dict[str, str]]:
    """Print an answer; returns the conversation with it, or without the question if there is none."""
    asked = [*turns, {"role": "user", "content": question}]
    pieces: list[str] = []
    try:
        asyncio.run(_print_answer(remote, console, asked, pieces))
    except KeyboardInterrupt:
        console.print("\nstopped", style="dim")
    except ValueError as error:
        console.print(str(error), style="yellow", markup=False)
    answer = "".join(pieces)
    return [*asked, {"role": "assistant", "content": answer}] if answer else turns


async def _print_answer(
    remote: Remote, console: Console, messages: list[dict[str, str]], pieces: list[str]
) -> None:
    """Reasoning and calls are shown too, but are no part of what is said next."""
    async for event in remote.stream("/v1/chat/completions", {"messages": messages}):
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if reasoning := delta.get("reasoning"):
                console.print(reasoning, style="dim", end="", markup=False, highlight=False)
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                shown = f"{function.get('name') or ''}{function.get('arguments') or ''}"
                console.print(shown, style="cyan", end="", markup=False, highlight=False)
            if content := delta.get("content"):
                pieces.append(content)
                console.out(content, end="", highlight=False)
    console.print()
