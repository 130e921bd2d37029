"""`jaxpage bench serve`: a load test of any OpenAI-compatible server, with vLLM's report.

All times are measured by the client.
"""

from __future__ import annotations

import asyncio
import json
import math
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tqdm import tqdm

from jaxpage.bench import results
from jaxpage.bench.flags import check_least, flag_of
from jaxpage.bench.serve_client import Outcome, ask, first_model, open_session
from jaxpage.bench.serve_data import Call, Dataset, arrivals, draw
from jaxpage.bench.serve_report import Report, parse_limits

if TYPE_CHECKING:
    import aiohttp

CHAT = "/v1/chat/completions"


@dataclass(frozen=True, kw_only=True)
class ServeBench:
    """Send requests to an OpenAI-compatible server, and report throughput and latencies as `vllm bench serve` does."""

    base_url: str = "http://127.0.0.1:8000"  # of the server
    endpoint: Literal["/v1/completions", "/v1/chat/completions"] = "/v1/completions"
    model: str | None = None  # none: the first that the server names
    api_key: str | None = field(default=None, repr=False)
    num_prompts: int = 1000  # requests
    request_rate: float = math.inf  # requests a second; inf: all at once
    # of arrivals: 1 is a Poisson process, less is bursty, more is regular
    burstiness: float = 1.0
    # requests in flight at once; others wait, and their waiting time does not count
    max_concurrency: int | None = None
    num_warmups: int = 0  # requests before those that count
    ignore_eos: bool = False  # generate all tokens; not every server supports it
    temperature: float | None = None  # none: the server's own; 0: greedy
    goodput: tuple[str, ...] = ()  # limits in ms, such as ttft:500 tpot:50 e2el:9000
    seed: int = 0
    json: Path | None = None  # figures, and times and texts of each request, go to this file
    data: Dataset = field(default_factory=Dataset)

    def __post_init__(self) -> None:
        check_least(self, num_prompts=1, max_concurrency=1, num_warmups=0)
        for name in ("request_rate", "burstiness"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{flag_of(name)} must be positive, got {getattr(self, name)}")
        if self.data.dataset_name == "trace" and not math.isinf(self.request_rate):
            raise ValueError("a trace determines when requests are sent; leave --request-rate out")


def main(bench: ServeBench) -> int:
    """Measure and print the report. 130 if Ctrl-C stopped it, 1 if no request was answered."""
    report = run(bench)
    results.publish(report.as_dict(), bench.json, str(report))
    return 130 if report.was_stopped else int(not report.answered)


def run(bench: ServeBench) -> Report:
    """Run a load test. Ctrl-C ends it, and the report covers the requests so far.

    Raises ValueError for data that cannot be read, and if the server does not name its model. A request that fails is
    counted, and the report has its error.
    """
    load = _Load(bench)
    try:
        with asyncio.Runner(loop_factory=_new_loop()) as runner:
            runner.run(load.run())
    except KeyboardInterrupt:
        if load.begin is None:
            raise
    return load.report()


def _new_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The cheapest event loop, because the client often shares its cores with the server; None: asyncio's own."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


class _Load:
    """Requests and their outcomes, which are available even if the test is stopped."""

    def __init__(self, bench: ServeBench) -> None:
        self.bench, self.limits = bench, parse_limits(bench.goodput)
        self.calls = draw(bench.data, bench.num_prompts, (bench.seed, 0))
        self.warmups = (
            draw(bench.data, bench.num_warmups, (bench.seed, 1)) if bench.num_warmups else []
        )
        self.at = arrivals(self.calls, bench.request_rate, bench.burstiness, (bench.seed, 2))
        if bench.endpoint == CHAT and any(not isinstance(c.prompt, str) for c in self.calls):
            raise ValueError(f"{CHAT} takes texts; name the model's --tokenizer, a folder")
        self.base_url = bench.base_url.rstrip("/").removesuffix("/v1")
        self.model = bench.model
        self.num_sent = 0
        self.outcomes: list[Outcome] = []
        self.begin: float | None = None
        self.cpu = self.end = 0.0

    async def run(self) -> None:
        """Run until all requests have ended."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection is an open file
        async with open_session(self.bench.api_key) as session:
            self.model = self.model or await first_model(session, self.base_url)
            await self._send(
                session, list(map(self._body, self.warmups)), [0.0] * len(self.warmups)
            )
            bodies = list(map(self._body, self.calls))  # before the clock starts
            self.outcomes.clear()
            self.num_sent, self.cpu = 0, -time.process_time()
            self.begin = time.perf_counter()
            try:
                await self._send(session, bodies, self.at)
            finally:
                self.end = time.perf_counter()
                self.cpu += time.process_time()

    async def _send(
        self, session: aiohttp.ClientSession, bodies: list[bytes], at: list[float]
    ) -> None:
        url = self.base_url + self.bench.endpoint
        slots = asyncio.Semaphore(self.bench.max_concurrency or len(bodies))

        async def send(body: bytes) -> None:
            async with slots:
                self.num_sent += 1
                self.outcomes.append(await ask(session, url, body))
            shown.update()

        begin = time.perf_counter()
        # Progress is shown only on a terminal.
        with tqdm(total=len(bodies), disable=None, unit="req") as shown:
            async with asyncio.TaskGroup() as group:
                for body, seconds in zip(bodies, at, strict=True):
                    if (delay := begin + seconds - time.perf_counter()) > 0:
                        await asyncio.sleep(delay)
                    group.create_task(send(body))

    def _body(self, call: Call) -> bytes:
        bench = self.bench
        fields: dict[str, Any] = {"model": self.model, "stream": True}
        fields["stream_options"] = {"include_usage": True}
        if bench.endpoint == CHAT:
            fields["messages"] = [{"role": "user", "content": call.prompt}]
            fields["max_completion_tokens"] = call.max_tokens
        else:
            fields |= {"prompt": call.prompt, "max_tokens": call.max_tokens}
        if bench.ignore_eos:
            fields["ignore_eos"] = True
        if bench.temperature is not None:
            fields["temperature"] = bench.temperature
        return json.dumps(fields).encode()

    def report(self) -> Report:
        """The report so far."""
        assert self.begin is not None
        options = asdict(self.bench) | {"model": self.model}
        del options["api_key"]
        date = datetime.now(UTC).isoformat(timespec="seconds")
        return Report(
            # JSON has no infinity.
            settings={
                "date": date,
                "options": json.loads(json.dumps(options, default=str), parse_constant=str),
            },
            outcomes=sorted(self.outcomes, key=lambda outcome: outcome.start),
            duration=self.end - self.begin,
            limits=self.limits,
            num_unfinished=self.num_sent - len(self.outcomes),
            num_unsent=len(self.calls) - self.num_sent,
            client_cpu=self.cpu,
        )
