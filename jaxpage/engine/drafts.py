"""Guesses at the next tokens of a sequence, which a step checks: by prompt lookup, or by a draft model on the device.

A step computes the drafts of a row after its last known token, and samples at each of these positions, as long as it
samples what was drafted. So a sequence has the tokens that it would have without drafts, and right ones save steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxpage.engine.scheduled_step import ScheduledStep
from jaxpage.request import Request, Sequence
from jaxpage.speculation import SpeculativeConfig


class OnDevice(NamedTuple):
    """A draft model or a head guesses on the device, as many tokens as it is asked for."""

    num_tokens: int  # most of a row in a step


class PromptLookup:
    """Drafts what followed the last tokens of a sequence where they occurred before."""

    def __init__(self, config: SpeculativeConfig):
        assert config.prompt_lookup_min is not None and config.prompt_lookup_max is not None
        self.num_tokens = config.num_speculative_tokens
        self._shortest, self._longest = config.prompt_lookup_min, config.prompt_lookup_max

    def drafts(self, sequence: Sequence, most: int) -> list[int]:
        """Up to `most` tokens, and no more than `num_tokens`; none if its last tokens are new."""
        most = min(most, self.num_tokens)
        if most < 1:
            return []
        tokens = _history(sequence)
        # Where occurrences of the last `length` tokens end, the last tokens themselves left out.
        ends, found = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1, None
        for length in range(1, self._longest + 1):
            if length > 1:
                ends = ends[ends >= length]
                ends = ends[tokens[ends - length] == tokens[-length]]
            if not ends.size:
                break
            if length >= self._shortest:
                found = ends
        if found is None:
            return []
        # The latest is most like what comes now, but has few tokens after it where the text repeats itself.
        whole = found[found <= len(tokens) - most]
        first = whole[-1] if whole.size else found[0]
        return tokens[first : first + most].tolist()


def drafter_of(config: SpeculativeConfig) -> PromptLookup | OnDevice:
    """What makes the drafts of an engine with this config."""
    if config.method == "ngram":
        return PromptLookup(config)
    return OnDevice(config.num_speculative_tokens)


def add_drafts(step: ScheduledStep, drafter: PromptLookup | OnDevice, budget: int) -> None:
    """Add drafts to the rows that decode, from the tokens and the blocks that all other rows leave.

    `collect` counts those that were right as computed.
    """
    plan = step.plan
    for row, sequence in enumerate(step.sequences):
        decodes = plan.samples[row] and plan.num_tokens[row] == 1 and sequence.num_output_tokens
        if not decodes or sequence in step.admitted:
            continue
        if not may_have_drafts(sequence.request):
            continue
        known = len(sequence.token_ids)
        # The last token is sampled, and its KV is never needed.
        most, drafts = min(budget, sequence.max_len - 1 - known, drafter.num_tokens), None
        if not isinstance(drafter, OnDevice):
            drafts = drafter.drafts(sequence, most)
        number = most if drafts is None else len(drafts)
        if number > 0:
            number = step.kv.lengthen(plan, sequence, known + number) - known
        if number < 1:
            continue
        plan.num_drafts[row] = number
        if drafts is not None:
            plan.drafts[row] = drafts[:number]
        plan.num_tokens[row] += number
        budget -= number


def may_have_drafts(request: Request) -> bool:
    """Whether rows of a request may sample several tokens in a step without a word from the host."""
    others = (request.beams, request.mask_source, request.captures)
    return not request.wants_vocabulary and all(x is None for x in others)


def _history(sequence: Sequence) -> np.ndarray:
    """int32[n]: the tokens of a sequence. Kept between steps, because converting a long list takes long."""
    known, length = sequence.history, len(sequence.token_ids)
    if known is None or len(known) < length:
        new = np.empty(2 * length, np.int32)
        new[:length] = sequence.token_ids
        sequence.history, sequence.num_in_history = new, length
        return new[:length]
    known[sequence.num_in_history : length] = sequence.token_ids[sequence.num_in_history :]
    sequence.num_in_history = length
    return known[:length]
