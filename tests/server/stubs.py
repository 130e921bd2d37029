"""What metrics observe, made by hand: an LLM that says what it is told to, requests, steps, outputs."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from jaxpage.engine.stats import EngineStats
from jaxpage.engine.step_output import StepOutput
from jaxpage.outputs import CompletionOutput, RequestOutput, RequestStateStats
from jaxpage.plan import StepResult
from jaxpage.request import Request
from jaxpage.runner.programs import ProgramRecord
from jaxpage.sampling_params import SamplingParams

NO_STATS = EngineStats(
    **{field.name: 0 for field in fields(EngineStats) if field.name != "replicas"}
)


class StubLLM:
    """As much of an `AsyncLLM` as metrics and the log ask for."""

    errored = False

    def __init__(self, *, max_model_len: int = 100, num_drafts: int = 0):
        self.config = SimpleNamespace(
            num_drafts=num_drafts,
            max_model_len=max_model_len,
            block_size=16,
            kv_cache_dtype="bfloat16",
            enable_prefix_caching=True,
            gpu_memory_utilization=0.92,
            kv_cache_memory_bytes=None,
            num_gpu_blocks_override=None,
            swap_space=0.0,
        )
        self.records: list[ProgramRecord] = []
        self._stats = NO_STATS

    def tell(self, **numbers: Any) -> None:
        """What `stats` says from now on."""
        self._stats = replace(self._stats, **numbers)

    def stats(self) -> EngineStats:
        return self._stats

    def programs(self) -> list[ProgramRecord]:
        return self.records


def make_request(
    request_id: str = "r#0", prompt_len: int = 5, *, queued: float = 10.0, **params: Any
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=[1] * prompt_len,
        params=SamplingParams(**params),
        seed=0,
        queued_time=queued,
        arrival_time=1e9,
    )


def make_step(
    time: float,
    gained: dict[tuple[str, int], int],
    *,
    launched: float = 0.0,
    num_tokens: int = 0,
    program: str = "decode R=2",
    fill: float = 0.0,
) -> StepOutput:
    """A step that gave the sequences `gained`, by request id and index, so many tokens each."""
    nothing = np.zeros((1, 0), np.int32)
    result = StepResult(
        token_ids=nothing,
        num_sampled=nothing[0],
        logprobs=nothing,
        ranks=nothing,
        top_token_ids=nothing,
        top_logprobs=nothing,
        program=program,
        fill=fill,
    )
    return StepOutput(
        time=time,
        launch_time=launched,
        num_tokens=num_tokens,
        request_ids=[request_id for request_id, _ in gained],
        indices=[index for _, index in gained],
        token_ids=[[7] * count for count in gained.values()],
        rows=list(range(len(gained))),
        result=result,
    )


def make_output(
    request: Request,
    lengths: tuple[int, ...] = (3,),
    *,
    reason: str = "stop",
    seconds: tuple[float, float, float] | None = (1.0, 2.0, 4.0),
    num_cached: int = 0,
    num_preemptions: int = 0,
) -> RequestOutput:
    """The last output of a request, by `seconds` from its arrival to first scheduling, first and last token."""
    times = [0.0] * 3 if seconds is None else [request.queued_time + s for s in seconds]
    return RequestOutput(
        request_id="caller's name",
        prompt=None,
        prompt_token_ids=request.prompt_token_ids,
        prompt_logprobs=None,
        outputs=[
            CompletionOutput(
                index=index,
                text="",
                token_ids=[7] * length,
                cumulative_logprob=None,
                logprobs=None,
                finish_reason=reason,
            )
            for index, length in enumerate(lengths)
        ],
        finished=True,
        num_cached_tokens=num_cached,
        metrics=RequestStateStats(
            num_generation_tokens=sum(lengths),
            max_num_generation_tokens=max(lengths),
            num_preemptions=num_preemptions,
            arrival_time=request.arrival_time,
            queued_ts=request.queued_time,
            scheduled_ts=times[0],
            first_token_ts=times[1],
            last_token_ts=times[2],
            first_token_latency=seconds[1] if seconds else 0.0,
        ),
    )


def now() -> float:
    return time.monotonic()


class Scrape:
    """The samples of a rendered text: `scrape["vllm:x_total", "reason=abort"]`."""

    def __init__(self, text: bytes):
        self.families = {f.name: f for f in text_string_to_metric_families(text.decode())}
        self.samples = [s for f in self.families.values() for s in f.samples]
        self.names = {sample.name for sample in self.samples}

    def __getitem__(self, key: str | tuple[str, ...]) -> float:
        """The value of the only sample of this name that has these labels."""
        name, *labels = [key] if isinstance(key, str) else key
        wanted = dict(label.split("=", 1) for label in labels).items()
        (found,) = [s for s in self.samples if s.name == name and wanted <= s.labels.items()]
        return found.value

    def label_values(self, name: str, label: str) -> list[str]:
        return [s.labels[label] for s in self.samples if s.name == name]
