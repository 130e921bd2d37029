"""From the result of a step to what its sequences gained."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from jaxpage.engine import beam_scheduling
from jaxpage.engine.kv_cache import KVCache
from jaxpage.engine.scheduled_step import ScheduledStep
from jaxpage.engine.sequences import append_tokens
from jaxpage.plan import StepResult
from jaxpage.request import Request, Sequence


@dataclass(slots=True, eq=False)
class Collected:
    touched: dict[Request, None] = field(default_factory=dict)  # gained tokens or ended
    ended: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0


def collect(kv: KVCache, step: ScheduledStep, result: StepResult) -> Collected:
    """Append what a step sampled to its sequences, and say which of them ended; they still have their blocks."""
    now = time.monotonic()
    collected = Collected()
    num_steps, samples = step.plan.num_steps, step.plan.samples
    token_ids, num_sampled = result.token_ids.T.tolist(), result.num_sampled.tolist()
    for row, sequence in enumerate(step.sequences):
        # Rows of sequences that ended after this step was planned: nobody waits for them.
        if sequence.finish_reason is not None or not samples[row]:
            continue
        sequence.num_in_flight -= num_steps
        request, sampled = sequence.request, token_ids[row][: num_sampled[row]]
        if request.beams is None:
            collected.num_tokens += append_tokens(sequence, sampled, result, row)
        else:
            collected.num_tokens += beam_scheduling.collect_beam(kv, sequence, result, row)
        if sequence.finish_reason is not None:
            collected.ended += [sequence] if request.beams is None else request.sequences
        else:
            assert num_sampled[row] == num_steps, "only the device thinks it ended"
        if request.first_token_time is None:
            request.first_token_time = now
        request.last_token_time = now
        collected.touched[request] = None
    return collected
