"""Workloads: requests drawn from a seed, the figure they measure, and interleaved rounds."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpage.bench.engines import Options, Work

MAX_NUM_SEQS = 64
UNCACHED = "jaxpage-no-prefix-cache"  # the peer


def random_prompt(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    """Random token ids from 3 up: lower ones are special tokens."""
    return [rng.randrange(3, vocab_size) for _ in range(length)]


def equal_requests(
    rng: random.Random, batch: int, length: int, num_tokens: int, vocab_size: int
) -> Work:
    """`batch` requests of random prompts, each of `length` tokens."""
    prompts = [random_prompt(rng, length, vocab_size) for _ in range(batch)]
    return Work(prompts=prompts, num_tokens=[num_tokens] * batch, static_batch=batch)


def run_interleaved(
    runners: Mapping[str, Callable[[Work], float]],
    rounds: Sequence[list[Work]],
    *,
    time_limit: float = math.inf,
) -> dict[str, list[list[float]]]:
    """By runner: seconds of each work in each round. Within a round all run the same work, new in each round.

    Round 0 is a warm-up and does not count. After `time_limit` seconds no further round begins, if one has counted.
    """
    seconds: dict[str, list[list[float]]] = {name: [] for name in runners}
    for number, works in enumerate(rounds):
        if number == 1:
            start = time.perf_counter()
        elif number > 1 and time.perf_counter() - start > time_limit:
            break
        # Every other round runs in reverse order, because each runner leaves caches warm for the next.
        for name in list(runners)[:: 1 if number % 2 else -1]:
            seconds[name].append([runners[name](work) for work in works])
    return {name: taken[1:] for name, taken in seconds.items()}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Something to measure. A round runs the works that `make` draws, one by one."""

    name: str
    unit: str
    make: Callable[[random.Random], list[Work]]
    value: Callable[[list[Work], list[float]], float]  # from the seconds of each work
    less_is_better: bool = False
    options: Options = Options(
        max_model_len=1024, max_num_seqs=MAX_NUM_SEQS, enable_prefix_caching=False
    )
    also: tuple[str, ...] = ()  # peers to measure in this workload in addition to the chosen ones

    def speedup(self, ours: float, theirs: float) -> float:
        """How many times as fast ours is as theirs."""
        return theirs / ours if self.less_is_better else ours / theirs


def workloads(vocab_size: int, scale: float) -> dict[str, Workload]:
    """All workloads by name; `scale` multiplies lengths, steps and the number of requests, not batches.

    Those with the same engine options are adjacent.
    """

    def scaled(number: int) -> int:
        return max(1, round(number * scale))

    def prompt(rng: random.Random, length: int) -> list[int]:
        return random_prompt(rng, length, vocab_size)

    def log_uniform(rng: random.Random, low: int, high: int) -> int:
        return scaled(round(math.exp(rng.uniform(math.log(low), math.log(high)))))

    def batch_of(rng: random.Random, batch: int, num_tokens: int) -> list[Work]:
        return [equal_requests(rng, batch, scaled(256), num_tokens, vocab_size)]

    def decode(batch: int) -> Workload:
        """The difference of two runs is the time of the decode steps."""
        num_steps = max(2, scaled(32))
        return Workload(
            name=f"decode-{batch}",
            unit="ms/step",
            less_is_better=True,
            make=lambda rng: batch_of(rng, batch, 1) + batch_of(rng, batch, 1 + num_steps),
            value=lambda works, seconds: (seconds[1] - seconds[0]) / num_steps * 1e3,
        )

    def mixed(rng: random.Random) -> list[Work]:
        number = scaled(64)
        prompts = [prompt(rng, log_uniform(rng, 16, 512)) for _ in range(number)]
        num_tokens = [log_uniform(rng, 8, 256) for _ in range(number)]
        return [Work(prompts=prompts, num_tokens=num_tokens, static_batch=8)]

    def questions(rng: random.Random) -> list[Work]:
        """All questions at once, about a table that is new in each round."""
        number, the_table = scaled(32), prompt(rng, scaled(1500))
        prompts = [the_table + prompt(rng, scaled(15)) for _ in range(number)]
        return [Work(prompts=prompts, num_tokens=[scaled(16)] * number, static_batch=8)]

    prompt_rate: dict[str, Any] = {
        "unit": "prompt tokens/s",
        "value": lambda works, seconds: sum(map(len, works[0].prompts)) / seconds[0],
    }
    rate: dict[str, Any] = {
        "unit": "output tokens/s",
        "value": lambda works, seconds: works[0].num_output_tokens / seconds[0],
    }
    cached = Options(max_model_len=2048, max_num_seqs=MAX_NUM_SEQS, enable_prefix_caching=True)
    found = [
        *(decode(batch) for batch in (1, 8, 32)),
        Workload(name="prefill-8", make=lambda rng: batch_of(rng, 8, 1), **prompt_rate),
        Workload(name="mixed", make=mixed, **rate),
        Workload(name="questions", make=questions, options=cached, also=(UNCACHED,), **rate),
    ]
    return {workload.name: workload for workload in found}
