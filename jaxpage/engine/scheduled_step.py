"""A step as the scheduler builds it: the plan, and beside it the sequences whose rows it has.

The plan is values and goes to the runner. The sequences stay here until the result is in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jaxpage.captures import WantedCaptures
from jaxpage.engine.adapter_slots import AdapterSlots
from jaxpage.engine.kv_cache import KVCache
from jaxpage.engine.picture_cache import PictureCache
from jaxpage.engine.sequences import append_forced, next_mask
from jaxpage.pictures.prompt import PromptPictures
from jaxpage.plan import Admission, StepPlan
from jaxpage.request import Request, Sequence, WaitingFor


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """`sequences[i]` is the one of the plan's row i."""

    kv: KVCache
    pictures: PictureCache
    adapters: AdapterSlots
    # Tokens in flight are computed before the mask for what comes next is known, and sampled from later.
    samples_late: bool = True
    plan: StepPlan = field(default_factory=StepPlan)
    sequences: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # all their data goes up
    failed: list[Sequence] = field(default_factory=list)  # no mask will come for them
    # (request id, number of tokens, whole vocabulary) of the plan's `prompt_scores`
    scored: list[tuple[str, int, bool]] = field(default_factory=list)
    # (request id, index of the sequence, None: of all that the request will have; positions) of the plan's `captured`
    captured: list[tuple[str, int | None, list[int]]] = field(default_factory=list)
    captures_next: bool = False  # some row wants to capture what a later step computes
    has_beams: bool = False
    launch_time: float = 0.0  # seconds, monotonic
    _unsent: list[Sequence] = field(default_factory=list)  # have tokens that the device does not
    _late: list[tuple[Sequence, np.ndarray]] = field(default_factory=list)  # and their masks

    def add_decoding_rows(self, running: list[Sequence], first: int, budget: int) -> int:
        """Plan the last known token of as many sequences from `first` on as are plain and find room for it.

        What `add_row` does for each, in one loop almost without calls: a decode step of many rows spends its time here.
        Returns how many rows these are.
        """
        plan, kv, block_size = self.plan, self.kv, self.kv.block_size
        last = min(len(running), first + budget)
        starts, features, index = [], 0, first
        while index < last:
            sequence = running[index]
            request, seen = sequence.request, len(sequence.token_ids)
            start = sequence.num_computed_tokens
            end = start + 1
            if not request.is_plain or sequence.waiting_for is not None:
                break
            if end != seen + sequence.num_in_flight or end >= sequence.max_len:
                break
            if end > sequence.writable_len and not kv.grow(plan, sequence, end):
                break
            sequence.num_computed_tokens = end
            sequence.num_in_flight += 1
            num_hashed = end if end < seen else seen
            if num_hashed // block_size > sequence.num_registered_blocks:
                kv.register(sequence, num_hashed)
            features |= request.features
            starts.append(start)
            index += 1
        rows = running[first:index]
        self.sequences += rows
        plan.features |= features
        plan.slots += [sequence.slot for sequence in rows]
        plan.starts += starts
        plan.num_tokens += [1] * len(rows)
        plan.samples += [True] * len(rows)
        return len(rows)

    def add_row(self, sequence: Sequence, start: int, count: int, known: int) -> bool:
        """Plan `count` tokens from `start` of `known` ones, as good as computed from here on.

        A row that reaches the last known token samples, unless the mask for that is not there yet, for which the
        sequence waits then, or what comes next is forced. Returns whether it is the first of its request to get there,
        and has yet to be joined by others.
        """
        end, seen, kv = start + count, len(sequence.token_ids), self.kv
        sequence.num_computed_tokens = end
        # Blocks are registered when planned: later rows of the same step may already share them,
        # because in each layer all KV of a step is written before any is read. Only tokens whose
        # ids the host has seen have a hash.
        num_hashed = end if end < seen else seen
        if num_hashed // kv.block_size > sequence.num_registered_blocks:
            kv.register(sequence, num_hashed)
        plan, request = self.plan, sequence.request
        samples, is_first = end == known, False
        if not request.is_plain:
            samples, is_first = self._add_extras(sequence, start, end, samples)
        plan.features |= request.features
        self.sequences.append(sequence)
        plan.slots.append(sequence.slot)
        plan.starts.append(start)
        plan.num_tokens.append(count)
        plan.samples.append(samples)
        if samples:
            sequence.num_in_flight += 1
        return is_first

    def _add_extras(
        self, sequence: Sequence, start: int, end: int, is_last: bool
    ) -> tuple[bool, bool]:
        """What the row to come needs besides its tokens `start .. end`, the last known one perhaps among them.

        Returns whether it samples, and whether it is the first of its request to get there.
        """
        plan, request, samples = self.plan, sequence.request, is_last
        if request.beams is not None:
            self.has_beams = True
            sequence.waiting_for = WaitingFor.BEAMS if samples else None
        if request.prompt_embeds is not None and start < min(end, len(request.prompt_embeds)):
            plan.input_embeds.append((len(plan.slots), request.prompt_embeds[start:end]))
        if request.pictures is not None:
            self._place_pictures(request.pictures, start, end)
        if samples and request.mask_source is not None:
            if append_forced(sequence):
                samples = is_last = False
            elif (mask := self._mask(sequence)) is None:
                samples, sequence.waiting_for = False, WaitingFor.MASK
            else:
                plan.masks[len(plan.slots)] = mask
                sequence.waiting_for = None if self.samples_late else WaitingFor.TOKEN
        if sequence.num_unsent_tokens:
            self._unsent.append(sequence)
        if samples and request.wants_vocabulary:
            plan.vocabulary_rows.append(len(plan.slots))
        if request.scores_prompt:
            self._score(request, start, end)
        if request.captures is not None:
            self._capture(sequence, request.captures, start, end)
        return samples, is_last and request.params.n > len(request.sequences)

    def add_sibling(self, parent: Sequence, sibling: Sequence, slot: int) -> None:
        """A row of the request in the row before it, which has just computed the prompt's last token."""
        sibling.slot = slot
        self.kv.share(parent, sibling)
        self.admitted.append(sibling)
        known = len(sibling.token_ids)
        self.add_row(sibling, known, 0, known)

    def may_advance(self, sequence: Sequence) -> bool:
        """Whether a sequence that waits has tokens to compute now, because they are forced, or may be a picture's.

        If its mask is there instead, a row is planned that samples from what an earlier step computed.
        """
        if sequence.waiting_for is WaitingFor.PICTURE:
            sequence.waiting_for = None  # `reach` says whether it has to wait again
            return True
        if sequence.waiting_for is not WaitingFor.MASK:
            return False
        if append_forced(sequence):
            sequence.waiting_for = None
            return True
        mask = self._mask(sequence)
        if mask is not None:
            self._late.append((sequence, mask))  # it comes after all others
            sequence.waiting_for = None if self.samples_late else WaitingFor.TOKEN
            sequence.num_in_flight += 1
        return False

    def reach(self, sequence: Sequence, start: int, count: int) -> int:
        """How many of `count` tokens from `start` it may compute now; it waits for a picture if that is none."""
        if sequence.request.pictures is None:
            return count
        count = self.pictures.reach(self.plan, sequence, start, count)
        if not count:
            sequence.waiting_for = WaitingFor.PICTURE
        return count

    def append_late_rows(self) -> None:
        """Call it when all other rows are there."""
        plan = self.plan
        plan.num_late_rows = len(self._late)
        for sequence, mask in self._late:
            plan.masks[len(plan.slots)] = mask
            if sequence.request.wants_vocabulary:
                plan.vocabulary_rows.append(len(plan.slots))
            plan.features |= sequence.request.features
            self.sequences.append(sequence)
            plan.slots.append(sequence.slot)
            plan.starts.append(sequence.num_computed_tokens)
            plan.num_tokens.append(0)
            plan.samples.append(True)

    @property
    def may_repeat(self) -> bool:
        """Whether several decode steps may run in one launch: every row decodes, and the host has no part in it."""
        plan = self.plan
        return (
            plan.num_tokens.count(1) == plan.num_rows
            and not (self.admitted or self.has_beams or plan.masks or plan.input_embeds)
            and not (plan.vocabulary_rows or plan.picture_tokens or plan.positions)
            and not (plan.captured or self.captures_next)
            and all(plan.samples)
        )

    def repeat(self, num_steps: int) -> None:
        """Run so many decode steps in one launch, for which all rows have blocks."""
        self.plan.num_steps = num_steps
        for sequence in self.sequences:
            sequence.num_in_flight += num_steps - 1
            sequence.num_computed_tokens += num_steps - 1

    def close(self) -> StepPlan:
        """The plan, with what it says of the admitted sequences; they do not change any more."""
        self.plan.transfers = self.kv.take_transfers()
        self.plan.admissions = [self._admission(sequence) for sequence in self.admitted]
        for sequence in self.admitted:
            sequence.num_unsent_tokens = 0
        for sequence in self._unsent:
            if sequence.num_unsent_tokens:
                start = len(sequence.token_ids) - sequence.num_unsent_tokens
                self.plan.forced_tokens.append((sequence.slot, start, sequence.token_ids[start:]))
                sequence.num_unsent_tokens = 0
        return self.plan

    def _place_pictures(self, pictures: PromptPictures, start: int, end: int) -> None:
        """Have pictures stand for those of the tokens `start .. end` of the row to come that are theirs."""
        row = len(self.plan.slots)
        for picture, first, number in pictures.within(start, end):
            seen = self.pictures.rows(picture)[max(start - first, 0) : min(end - first, number)]
            self.plan.picture_tokens.append((row, max(first - start, 0), seen))
        if pictures.positions is not None and start < min(end, pictures.positions.shape[1]):
            self.plan.positions.append((row, pictures.positions[:, start:end]))

    def _score(self, request: Request, start: int, end: int) -> None:
        """Have the prompt's tokens scored that follow on `start .. end` of the row to come, and were not yet."""
        prompt = request.prompt_token_ids
        first = max(start, request.num_scored_tokens)
        next_ids = prompt[first + 1 : end + 1]
        if next_ids:
            request.num_scored_tokens = first + len(next_ids)
            whole = request.wants_prompt_vocabulary
            row = len(self.plan.slots)
            self.plan.prompt_scores.append((row, first - start, next_ids, whole))
            self.scored.append((request.request_id, len(next_ids), whole))

    def _capture(self, sequence: Sequence, captures: WantedCaptures, start: int, end: int) -> None:
        """Have captured what is wanted of the tokens `start .. end` of the row to come, and was not yet."""
        first = max(start, sequence.num_captured_tokens)
        positions = captures.within(first, end)
        sequence.num_captured_tokens = max(first, end)
        self.captures_next = self.captures_next or captures.wants_from(end)
        if positions:
            request, row = sequence.request, len(self.plan.slots)
            index = None if len(request.sequences) == 1 else sequence.index
            self.plan.captured.append((row, [position - start for position in positions]))
            self.captured.append((request.request_id, index, positions))

    def _mask(self, sequence: Sequence) -> np.ndarray | None:
        """What it may sample next; None if that is not known yet. If it never will be, the sequence has failed."""
        mask, source = next_mask(sequence), sequence.request.mask_source
        if mask is None and source is not None and source.error(sequence.index) is not None:
            self.failed.append(sequence)
        return mask

    def _admission(self, sequence: Sequence) -> Admission:
        request = sequence.request
        return Admission(
            slot=sequence.slot,
            sequence_index=sequence.index,
            token_ids=list(sequence.token_ids),
            block_tables=[list(table) for table in sequence.block_tables],
            prompt_len=len(request.prompt_token_ids),
            max_len=sequence.max_len,
            fields=request.slot_fields,
            adapter_slot=self.adapters.slot_of(request),
        )
