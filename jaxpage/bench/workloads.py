"""What `jaxpage bench offline` measures: requests drawn from a seed, and the figure they give."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from jaxpage.bench.engines import Options, Work

MAX_NUM_SEQS = 64
UNCACHED = "jaxpage-no-prefix-cache"  # the peer


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Something to measure. One round runs the list of works that `make` draws, one by one."""

    name: str
    unit: str
    make: Callable[[random.Random], list[Work]]
    value: Callable[[list[Work], list[float]], float]  # from the seconds of each work
    less_is_better: bool = False
    max_model_len: int = 1024
    prefix_caching: bool = False
    also: tuple[str, ...] = ()  # peers that are measured in this workload besides the chosen ones

    def options(self, threads: int) -> Options:
        return Options(
            threads=threads,
            max_model_len=self.max_model_len,
            max_num_seqs=MAX_NUM_SEQS,
            prefix_caching=self.prefix_caching,
        )

    def speedup(self, ours: float, theirs: float) -> float:
        """How many times as fast as theirs ours is."""
        return theirs / ours if self.less_is_better else ours / theirs


def workloads(vocab_size: int, scale: float) -> list[Workload]:
    """All workloads; `scale` multiplies lengths, steps and the number of requests, not batches.

    Those that need the same engine options stand together. Token ids below 3 are left to special tokens.
    """

    def scaled(number: int) -> int:
        return max(1, round(number * scale))

    def prompt(rng: random.Random, length: int) -> list[int]:
        return [rng.randrange(3, vocab_size) for _ in range(length)]

    def log_uniform(rng: random.Random, low: int, high: int) -> int:
        return scaled(round(math.exp(rng.uniform(math.log(low), math.log(high)))))

    def alike(rng: random.Random, batch: int, num_tokens: int) -> Work:
        prompts = [prompt(rng, scaled(256)) for _ in range(batch)]
        return Work(prompts=prompts, num_tokens=[num_tokens] * batch, static_batch=batch)

    def decode(batch: int) -> Workload:
        """The difference of two runs leaves the decode steps alone."""
        num_steps = max(2, scaled(32))
        return Workload(
            name=f"decode-{batch}",
            unit="ms/step",
            less_is_better=True,
            make=lambda rng: [alike(rng, batch, 1), alike(rng, batch, 1 + num_steps)],
            value=lambda works, seconds: (seconds[1] - seconds[0]) / num_steps * 1e3,
        )

    def mixed(rng: random.Random) -> list[Work]:
        number = scaled(64)
        prompts = [prompt(rng, log_uniform(rng, 16, 512)) for _ in range(number)]
        num_tokens = [log_uniform(rng, 8, 256) for _ in range(number)]
        return [Work(prompts=prompts, num_tokens=num_tokens, static_batch=8)]

    def questions(rng: random.Random) -> list[Work]:
        """All of them at once, on a table that no round has seen before."""
        number, the_table = scaled(32), prompt(rng, scaled(1500))
        prompts = [the_table + prompt(rng, scaled(15)) for _ in range(number)]
        return [Work(prompts=prompts, num_tokens=[scaled(16)] * number, static_batch=8)]

    def prompt_rate(works: list[Work], seconds: list[float]) -> float:
        return sum(map(len, works[0].prompts)) / seconds[0]

    def output_rate(works: list[Work], seconds: list[float]) -> float:
        return works[0].num_output_tokens / seconds[0]

    rate = {"unit": "output tokens/s", "value": output_rate}
    cached = {"max_model_len": 2048, "prefix_caching": True, "also": (UNCACHED,)}
    return [
        *(decode(batch) for batch in (1, 8, 32)),
        Workload(
            name="prefill-8",
            unit="prompt tokens/s",
            make=lambda rng: [alike(rng, 8, 1)],
            value=prompt_rate,
        ),
        Workload(name="mixed", make=mixed, **rate),
        Workload(name="questions", make=questions, **rate, **cached),
    ]
