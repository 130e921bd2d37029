"""Applies the result of a step to its sequences."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from jaxpage.engine import beam_scheduling
from jaxpage.engine.kv_cache import KVCache
from jaxpage.engine.scheduled_step import ScheduledStep
from jaxpage.engine.sequences import append_forced, append_tokens
from jaxpage.engine.step_output import SequenceEnd, StepOutput
from jaxpage.plan import StepResult
from jaxpage.request import FinishReason, Sequence, WaitingFor


@dataclass(slots=True, eq=False)
class Collected:
    """`output` is for the caller; `ended` are sequences that still hold their blocks."""

    output: StepOutput
    ended: list[Sequence] = field(default_factory=list)
    num_tokens: int = 0


def collect(kv: KVCache, step: ScheduledStep, result: StepResult) -> Collected:
    """Append what a step sampled to its sequences, and report which of them ended."""
    num_steps, samples = step.plan.num_steps, step.plan.samples
    token_ids, num_sampled = result.token_ids.T.tolist(), result.num_sampled.tolist()
    output = StepOutput(
        time=time.monotonic(),
        launch_time=step.launch_time,
        # In a launch of several decode steps, each one computes the token that the previous one sampled.
        num_tokens=step.plan.total_tokens if num_steps == 1 else sum(num_sampled),
        result=result,
        scored=step.scored,
        captured=step.captured,
        vocabulary_rows=step.plan.vocabulary_rows,
    )
    collected = Collected(output)
    for row, sequence in enumerate(step.sequences):
        # The sequence may have ended after this step was planned; its row is discarded.
        if sequence.finish_reason is not None or not samples[row]:
            continue
        sequence.num_in_flight -= num_steps
        request, sampled = sequence.request, token_ids[row]
        if request.beams is None:
            if num_sampled[row] < len(sampled):
                sampled = sampled[: num_sampled[row]]
            if row in step.plan.num_drafts:
                sequence.num_computed_tokens += len(sampled) - 1  # the right drafts
            sampled = append_tokens(sequence, sampled)
            if request.mask_source is not None:
                sampled = _with_forced(sequence)
            collected.num_tokens += len(sampled)
        else:
            collected.num_tokens += beam_scheduling.collect_beam(kv, sequence, result, row)
            sampled = []
        if sequence.finish_reason is not None:
            collected.ended += [sequence] if request.beams is None else request.sequences
            end = SequenceEnd(sequence.finish_reason, sequence.stop_reason)
            output.ends[len(output.rows)] = end
        else:
            least = 1 if row in step.plan.num_drafts else num_steps
            assert num_sampled[row] >= least, "only the device thinks it ended"
            if request.beams is not None:
                continue  # a beam search reports nothing before its end
        output.request_ids.append(request.request_id)
        output.indices.append(0 if request.beams is not None else sequence.index)
        output.token_ids.append(sampled)
        output.rows.append(row)
    return collected


def collect_failed(failed: list[Sequence]) -> Collected:
    """End sequences for which there will be no more masks, with the tokens they have. Skips those already ended."""
    output = StepOutput(time=time.monotonic())
    ended = [sequence for sequence in failed if sequence.finish_reason is None]
    for sequence in ended:
        source = sequence.request.mask_source
        assert source is not None
        sequence.finish_reason = FinishReason.ERROR
        sequence.stop_reason = source.error(sequence.index)
        output.ends[len(output.rows)] = SequenceEnd(sequence.finish_reason, sequence.stop_reason)
        output.request_ids.append(sequence.request.request_id)
        output.indices.append(sequence.index)
        output.token_ids.append(_unreported(sequence))
        output.rows.append(-1)  # none: it sampled nothing
    return Collected(output, ended)


def _with_forced(sequence: Sequence) -> list[int]:
    """What it gained: sampled tokens, and the forced tokens around them."""
    is_forced = sequence.finish_reason is None and append_forced(sequence)
    if is_forced or sequence.waiting_for is WaitingFor.TOKEN:
        sequence.waiting_for = None
    return _unreported(sequence)


def _unreported(sequence: Sequence) -> list[int]:
    gained = sequence.token_ids[sequence.num_reported_tokens :]
    sequence.num_reported_tokens = len(sequence.token_ids)
    return gained
