"""From the result of a step to what its sequences gained."""

from __future__ import annotations

import time
from typing import NamedTuple

from jaxpage.engine import beam_scheduling
from jaxpage.engine.kv_cache import KVCache
from jaxpage.engine.scheduled_step import ScheduledStep
from jaxpage.engine.sequences import append_tokens
from jaxpage.plan import StepResult
from jaxpage.request import Request, Sequence


class Collected(NamedTuple):
    """What a step changed."""

    touched: list[Request]  # gained tokens or ended, each once
    ended: list[Sequence]  # still with slot and blocks
    num_tokens: int  # gained


def collect(kv: KVCache, step: ScheduledStep, result: StepResult) -> Collected:
    """Append what a step sampled to its sequences, and say which of them ended."""
    now = time.monotonic()
    num_steps, samples = step.plan.num_steps, step.plan.samples
    token_ids, num_sampled = result.token_ids.T.tolist(), result.num_sampled.tolist()
    touched: dict[Request, None] = {}
    ended = []
    num_appended = 0
    for row, sequence in enumerate(step.sequences):
        # Rows of sequences that ended after this step was planned: nobody waits for them.
        if sequence.finish_reason is not None or not samples[row]:
            continue
        sequence.num_in_flight -= num_steps
        request, sampled = sequence.request, token_ids[row][: num_sampled[row]]
        if request.beams is None:
            num_appended += append_tokens(sequence, sampled, result, row)
        else:
            num_appended += beam_scheduling.collect_beam(kv, sequence, result, row)
        if sequence.finish_reason is not None:
            ended += [sequence] if request.beams is None else request.sequences
        else:
            assert num_sampled[row] == num_steps, "only the device thinks it ended"
        if request.first_token_time is None:
            request.first_token_time = now
        request.last_token_time = now
        touched[request] = None
    return Collected(list(touched), ended, num_appended)
