"""An engine without a device: the real scheduler, and a runner that answers each plan immediately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxpage.bench.engines import Work
from jaxpage.engine.engine import Engine
from jaxpage.engine.kv_cache import KVCache
from jaxpage.engine.scheduler import Scheduler
from jaxpage.kv_groups import Windows
from jaxpage.plan import StepPlan, StepResult
from jaxpage.request import Request
from jaxpage.sampling_params import SamplingParams


class InstantRunner:
    """Samples token 300 for every row; the `num_top` tokens from 300 on are the top logprobs.

    `look` is called with each plan when it is launched.
    """

    num_recompiles = 0

    def __init__(
        self, look: Callable[[StepPlan], object] = lambda plan: None, *, num_top: int = 0
    ) -> None:
        self.look, self._top = look, np.arange(300, 300 + num_top, dtype=np.int32)

    def launch(self, plan: StepPlan) -> StepResult:
        self.look(plan)
        steps, rows = plan.num_steps, plan.num_rows
        top = np.tile(self._top, (steps, rows, 1))
        return StepResult(
            token_ids=np.full((steps, rows), 300, np.int32),
            num_sampled=np.where(plan.samples, steps, 0).astype(np.int32),
            logprobs=np.zeros((steps, rows), np.float32),
            ranks=np.ones((steps, rows), np.int32),
            top_token_ids=top,
            top_logprobs=np.zeros(top.shape, np.float32),
        )

    def is_done(self, launched: StepResult, /) -> bool:
        return True

    def collect(self, launched: StepResult, /) -> StepResult:
        return launched

    def weights_changed(self) -> bool:
        return False

    def recover(self) -> bool:
        return False

    def wait_until_warm(self) -> None: ...

    def store_blocks(self, device: list[tuple[int, bytes]], host: list[tuple[int, bytes]]) -> None:
        raise NotImplementedError("there is no disk")


def make_scheduler(
    num_blocks: int,
    block_size: int,
    *,
    enable_prefix_caching: bool = True,
    windows: Windows = (None,),
    **limits: Any,
) -> Scheduler:
    """A scheduler whose pool has `num_blocks` blocks in addition to the null block. `limits` are the scheduler's."""
    caching = {"enable_prefix_caching": enable_prefix_caching, "windows": windows}
    return Scheduler(KVCache(1 + num_blocks, block_size, **caching), **limits)


def run(
    scheduler: Scheduler, work: Work, look: Callable[[StepPlan], object] = lambda plan: None
) -> Engine:
    """Run all of the work, greedily; `look` is called with each plan. Returns the engine, which is then idle."""
    engine = Engine(scheduler, InstantRunner(look), overlap=False)
    for number, (prompt, count) in enumerate(zip(work.prompts, work.num_tokens, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt, params=params, seed=0))
    while engine.has_unfinished_requests():
        engine.step()
    return engine
