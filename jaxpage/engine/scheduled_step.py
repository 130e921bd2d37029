"""A step as the scheduler builds it: the plan, and the sequences of its rows.

The plan consists of plain values and goes to the runner. The sequences stay here until the result is in.
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
    """`sequences[i]` belongs to row i of the plan."""

    kv: KVCache
    pictures: PictureCache
    adapters: AdapterSlots
    # Tokens in flight are computed before the mask for the next token is known; sampling happens in a later step.
    samples_late: bool = True
    plan: StepPlan = field(default_factory=StepPlan)
    sequences: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # all their data is uploaded
    failed: list[Sequence] = field(default_factory=list)  # no mask will come for them
    # (request id, number of tokens, whole vocabulary) of the plan's `prompt_scores`
    scored: list[tuple[str, int, bool]] = field(default_factory=list)
    # (request id, index of the sequence or None for all of the request, positions) of the plan's `captured`
    captured: list[tuple[str, int | None, list[int]]] = field(default_factory=list)
    captures_next: bool = False  # some row will have values captured in a later step
    has_beams: bool = False
    launch_time: float = 0.0  # seconds, monotonic
    _unsent: list[Sequence] = field(default_factory=list)  # have tokens that the device lacks
    _late: list[tuple[Sequence, np.ndarray]] = field(default_factory=list)  # late rows, with masks

    def add_decoding_rows(self, running: list[Sequence], first: int, budget: int) -> int:
        """Plan the last known token of consecutive sequences from `first` on, while they are plain and find blocks.

        Does what `add_row` does, in one loop with few calls, because a large decode step spends its time here. Returns
        the number of rows.
        """
        plan, kv, block_size = self.plan, self.kv, self.kv.block_size
        last = min(len(running), first + budget)
        starts, features, index = [], 0, first
        while index < last:
            sequence = running[index]
            request, num_host_tokens = sequence.request, len(sequence.token_ids)
            start = sequence.num_computed_tokens
            end = start + 1
            if not request.is_plain or sequence.waiting_for is not None:
                break
            if end != num_host_tokens + sequence.num_in_flight or end >= sequence.max_len:
                break
            if end > sequence.writable_len and not kv.grow(plan, sequence, end):
                break
            sequence.num_computed_tokens = end
            sequence.num_in_flight += 1
            num_hashed = end if end < num_host_tokens else num_host_tokens
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
        """Plan `count` tokens from `start` of `known` ones; they count as computed from here on.

        A row that reaches the last known token samples, unless the next token is forced or its mask has not arrived;
        then the sequence waits. Returns whether it is the first sequence of its request to get there, so that its
        siblings must be created.
        """
        end, num_host_tokens, kv = start + count, len(sequence.token_ids), self.kv
        sequence.num_computed_tokens = end
        # Blocks enter the prefix cache when planned: later rows of the same step may already share them, because each
        # layer writes all KV of a step before it reads any. Only tokens whose ids the host knows can be hashed.
        num_hashed = end if end < num_host_tokens else num_host_tokens
        if num_hashed // kv.block_size > sequence.num_registered_blocks:
            kv.register(sequence, num_hashed)
        samples, is_first = end == known, False
        if not sequence.request.is_plain:
            samples, is_first = self._add_extras(sequence, start, end, samples)
        self._append(sequence, start, count, samples)
        if samples:
            sequence.num_in_flight += 1
        if end in sequence.state_borders:
            kv.keep_state(self.plan, sequence)
        return is_first

    def _add_extras(
        self, sequence: Sequence, start: int, end: int, is_last: bool
    ) -> tuple[bool, bool]:
        """Add what the next row needs besides its tokens `start .. end`; `is_last`: they include the last known one.

        Returns whether the row samples, and whether it is the first of its request to get there.
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
        """Add a sibling row after the row that computes the last token of the prompt."""
        sibling.slot = slot
        self.kv.share(parent, sibling)
        self.admitted.append(sibling)
        known = len(sibling.token_ids)
        self.add_row(sibling, known, 0, known)

    def resume(self, sequence: Sequence) -> bool:
        """End the wait of a sequence if it can. Returns whether it has tokens to compute now: forced ones, or those of
        a picture.

        If its mask has arrived instead, this plans a late row, which samples from what an earlier step computed.
        """
        if sequence.waiting_for is WaitingFor.PICTURE:
            sequence.waiting_for = None  # `reach` decides whether it must wait again
            return True
        if sequence.waiting_for is not WaitingFor.MASK:
            return False
        if append_forced(sequence):
            sequence.waiting_for = None
            return True
        mask = self._mask(sequence)
        if mask is not None:
            self._late.append((sequence, mask))  # late rows come after all others
            sequence.waiting_for = None if self.samples_late else WaitingFor.TOKEN
            sequence.num_in_flight += 1
        return False

    def reach(self, sequence: Sequence, start: int, count: int) -> int:
        """How many of `count` tokens from `start` it may compute now; if none, it waits for a picture."""
        # A row ends where the sequence's recurrent state will be kept.
        ends = (border - start for border in sequence.state_borders if border > start)
        count = min(next(ends, count), count)
        count = self.pictures.reach(self.plan, sequence, start, count)
        if not count:
            sequence.waiting_for = WaitingFor.PICTURE
        return count

    def append_late_rows(self) -> None:
        """Add the late rows. Call it when all other rows have been added."""
        plan = self.plan
        plan.num_late_rows = len(self._late)
        for sequence, mask in self._late:
            plan.masks[len(plan.slots)] = mask
            if sequence.request.wants_vocabulary:
                plan.vocabulary_rows.append(len(plan.slots))
            self._append(sequence, sequence.num_computed_tokens, 0, samples=True)

    @property
    def may_repeat(self) -> bool:
        """Whether one launch may run several decode steps: every row decodes and needs nothing from the host."""
        plan = self.plan
        return (
            plan.num_tokens.count(1) == plan.num_rows
            and not (self.admitted or self.has_beams or plan.masks or plan.input_embeds)
            and not (plan.vocabulary_rows or plan.picture_tokens or plan.positions)
            and not (plan.captured or self.captures_next)
            and all(plan.samples)
        )

    def repeat(self, num_steps: int) -> None:
        """Run `num_steps` decode steps in one launch; all rows must have blocks for them."""
        self.plan.num_steps = num_steps
        for sequence in self.sequences:
            sequence.num_in_flight += num_steps - 1
            sequence.num_computed_tokens += num_steps - 1

    def close(self) -> StepPlan:
        """Complete the plan with transfers, admissions and forced tokens, and return it."""
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

    def _append(self, sequence: Sequence, start: int, count: int, samples: bool) -> None:
        """Append a row of `count` tokens from `start` to the plan."""
        plan = self.plan
        plan.features |= sequence.request.features
        self.sequences.append(sequence)
        plan.slots.append(sequence.slot)
        plan.starts.append(start)
        plan.num_tokens.append(count)
        plan.samples.append(samples)

    def _place_pictures(self, pictures: PromptPictures, start: int, end: int) -> None:
        """Let picture embeddings replace their placeholders among tokens `start .. end` of the next row."""
        row = len(self.plan.slots)
        for picture, first, number in pictures.within(start, end):
            rows = self.pictures.rows(picture)[max(start - first, 0) : min(end - first, number)]
            self.plan.picture_tokens.append((row, max(first - start, 0), rows))
        if pictures.positions is not None and start < min(end, pictures.positions.shape[1]):
            self.plan.positions.append((row, pictures.positions[:, start:end]))

    def _score(self, request: Request, start: int, end: int) -> None:
        """Score the prompt tokens that follow tokens `start .. end` of the next row, if they were not scored yet."""
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
        """Capture the requested values of tokens `start .. end` of the next row that were not captured yet."""
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
        """The mask for its next token; None if that is not known yet. If it never will be, the sequence has failed."""
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
            state_slot=sequence.state_slot,
        )
