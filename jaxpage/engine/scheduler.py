"""Decides what each step computes: which tokens of which sequences, with which blocks and request slots.

Knows sequences and slots as numbers, and the four methods of the KV cache. Must not know what a token means to the
model, how a step is packed or run, or where KV is stored. A feature arrives as a field of the plan or the request,
never as a branch here.

There are no phases. A sequence knows `num_known_tokens` and has KV for `num_computed_tokens` of them; a step moves the
second number towards the first. Prefill, chunked prefill, cache hits, decoding and recomputation are that subtraction.
The last known token has no KV yet when it is scheduled; a row that reaches it samples the next one.

Nothing is rolled back. `running` is sorted by the order of service. Rows are planned from its front, and when blocks
run out, sequences are preempted from its end, so a victim never has a row in the same step.
"""

from __future__ import annotations

from bisect import insort
from functools import partial
from typing import NamedTuple

from jaxpage.engine import beam_scheduling, sequences
from jaxpage.engine.adapter_slots import AdapterSlots
from jaxpage.engine.collect import collect, collect_failed
from jaxpage.engine.counters import Counters, count_first_scheduling
from jaxpage.engine.drafts import add_drafts, drafter_of
from jaxpage.engine.kv_cache import KVCache
from jaxpage.engine.padding import NO_PADDING, Padding
from jaxpage.engine.picture_cache import PictureCache
from jaxpage.engine.scheduled_step import ScheduledStep
from jaxpage.engine.step_output import StepOutput, TextEnd
from jaxpage.plan import StepResult
from jaxpage.request import FinishReason, Request, Sequence
from jaxpage.speculation import SpeculativeConfig


class DecodeSteps(NamedTuple):
    """How many decode steps one launch may run."""

    most: int  # if no request could join before a row ends
    while_open: int  # if a new request could join the next launch


class Scheduler:
    """Holds requests from `add` to their end: `schedule` plans a step, `update` takes its result.

    A planned step counts as launched. One more step may be planned before the result of the last one is in: the tokens
    which that one samples count as known, because the device has them; the host does not know their ids yet.
    """

    def __init__(
        self,
        kv: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: str = "fcfs",
        decode_steps: int = 1,
        samples_late: bool = True,
        padding: Padding = NO_PADDING,
        num_adapters: int = 0,
        pictures: PictureCache | None = None,
        speculative: SpeculativeConfig | None = None,
    ):
        """`speculative`: rows that decode have drafts. Then collect each step before the next is planned.

        Raises ValueError for limits below 1, or if there is no room for one prompt token and one output token.
        """
        limits = (max_num_seqs, max_num_batched_tokens, max_model_len, decode_steps)
        sequences.check_limits(*limits, policy)
        self.kv, self.adapters, self.max_model_len = kv, AdapterSlots(num_adapters), max_model_len
        self.pictures = pictures or PictureCache(1, budget=0)  # empty, for models without vision
        self.max_num_batched_tokens = max_num_batched_tokens
        self.decode_steps = DecodeSteps(decode_steps, decode_steps)
        self.samples_late, self.padding = samples_late, padding
        self.drafter = None if speculative is None else drafter_of(speculative)
        self.requests: dict[str, Request] = {}  # the unfinished ones
        self.running: list[Sequence] = []  # hold a request slot; sorted by `_order`
        self.waiting: list[Sequence] = []  # hold neither slot nor blocks; sorted by `_order`
        self.failed: list[Sequence] = []  # `end_failed` ends them
        self.counters = Counters()
        self._by_priority = policy == "priority"
        self._num_slots = max_num_seqs
        self._free_slots = list(range(max_num_seqs, 0, -1))  # slot 0 is the null slot
        self._num_arrivals = 0

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError, before anything changes, for one that can never run."""
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        request.sequences = self.first_sequences(request)
        request.is_plain = sequences.is_plain(request)
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self.requests[request.request_id] = request
        self.pictures.add(request)
        for sequence in request.sequences:
            sequences.note_weights(sequence, self.counters.num_weight_changes)
            insort(self.waiting, sequence, key=self._order)

    def first_sequences(self, request: Request) -> list[Sequence]:
        """The sequences with which a request begins. Thread-safe. Raises ValueError if they can never run."""
        sequences.check_runnable(
            request, self.max_model_len, self.kv.pool, self.max_num_batched_tokens
        )
        self.pictures.check(request)
        make = partial(sequences.new_sequence, max_model_len=self.max_model_len)
        return beam_scheduling.first_sequences(
            request, make, self.kv, self._num_slots, self.max_num_batched_tokens
        )

    def schedule(self) -> ScheduledStep | None:
        """Plan a step for the caller to launch; None if there is nothing to do before `update`."""
        step = ScheduledStep(self.kv, self.pictures, self.adapters, self.samples_late)
        self.kv.begin_plan()
        self.pictures.begin_plan()
        self._admit(step, self._plan_running(step))
        for sequence in step.admitted:
            insort(self.running, sequence, key=self._order)
        step.append_late_rows()
        self.failed += step.failed
        if not step.sequences:
            self.pictures.discard(step.plan)
            return None
        if self.drafter is not None:
            add_drafts(step, self.drafter, self.max_num_batched_tokens - step.plan.total_tokens)
        if step.has_beams:
            beam_scheduling.upload_beams(step, self.kv)
        if self.decode_steps.most > 1 and step.may_repeat:
            num_steps = self._num_steps(step)
            step.repeat(self.kv.grow_ahead(step.plan, step.sequences, num_steps))
        self.counters.count_step(self.kv.pool, self.running, step.close(), step.sequences)
        return step

    def update(self, step: ScheduledStep, result: StepResult) -> StepOutput:
        """Append the sampled tokens of a step. Returns what each sequence gained, and which of them ended."""
        collected = collect(self.kv, step, result)
        self.counters.count_result(step.plan, result, collected.num_tokens)
        if collected.ended:
            self._remove(collected.ended)
        return collected.output

    def end_by_text(self, end: TextEnd) -> None:
        """End a sequence at a stop string in its text, which may drop some of its last tokens."""
        self.counters.generation_tokens -= end.num_dropped
        request = self.requests.get(end.request_id)
        if request is not None and not request.sequences[end.index].finished:
            sequence = request.sequences[end.index]
            sequences.cut_output(sequence, end.num_tokens)
            self._remove([sequence])

    def end_failed(self) -> StepOutput:
        """End the sequences for which no mask will ever come."""
        collected, self.failed = collect_failed(self.failed), []
        self._remove(collected.ended)
        return collected.output

    def abort(self, request_id: str) -> Request | None:
        """End a request now, with the tokens it has; None if it is unknown or has ended."""
        request = self.requests.get(request_id)
        if request is not None:
            for sequence in request.sequences:
                sequence.finish_reason = sequence.finish_reason or FinishReason.ABORT
            self._remove(request.sequences)  # all: one may have ended in an update that then failed
        return request

    def abort_steps(self, steps: list[ScheduledStep]) -> list[Request]:
        """End the requests of failed steps. Nothing that these steps wrote, or should have written, is reused."""
        requests = dict.fromkeys(s.request.request_id for step in steps for s in step.sequences)
        ended = [request for i in requests if (request := self.abort(i)) is not None]
        self.kv.invalidate(self.waiting)  # last: `abort` leaves blocks in the prefix cache
        self.pictures.forget_all()
        self.adapters.forget_loads((step.plan for step in steps), self.running)
        return ended

    def abort_all(self) -> list[Request]:
        """End all requests after `schedule` has raised: tokens and adapters of the plan that it began count as being on
        the device, but will never get there.
        """
        ended = [request for i in list(self.requests) if (request := self.abort(i)) is not None]
        self.kv.invalidate(self.waiting)
        self.pictures.forget_all()
        self.adapters = AdapterSlots(self.adapters.num_slots)
        return ended

    def preempt_all(self) -> None:
        """Preempt every running sequence because all KV is lost; they are recomputed."""
        while self.running:
            self._preempt_last(swap=False)
        self.kv.invalidate(self.waiting)
        self.pictures.forget_all()

    def begin_weight_epoch(self, *, keep_cache: bool = False) -> None:
        """The weights change now: sequences admitted from here on do not reuse older KV, unless `keep_cache`."""
        self.counters.num_weight_changes += 1
        for sequence in (*self.running, *self.waiting):
            sequences.note_weights(sequence, self.counters.num_weight_changes)
        self.kv.leave_store()
        if keep_cache:
            return
        self.kv.begin_weight_epoch((*self.running, *self.waiting))
        self.pictures.forget_all()

    def _order(self, sequence: Sequence) -> tuple[int, int, int]:
        request = sequence.request
        return (request.priority if self._by_priority else 0, request.arrival, sequence.index)

    def _plan_running(self, step: ScheduledStep) -> int:
        """Plan rows for the running sequences, front first. Returns the tokens left for waiting ones; 0 after a
        preemption.
        """
        budget, running, index = self.max_num_batched_tokens, self.running, 0
        num_preemptions = self.counters.num_preemptions
        while index < len(running):  # preemption shortens the list from its end
            num_rows = step.add_decoding_rows(running, index, budget)
            index, budget = index + num_rows, budget - num_rows
            if index == len(running):
                break
            sequence, index = running[index], index + 1
            if sequence.waiting_for is not None and not step.resume(sequence):
                continue
            known = len(sequence.token_ids) + sequence.num_in_flight
            if known >= sequence.max_len or not budget:
                continue  # a sequence at `max_len` ends when its step is collected
            start = sequence.num_computed_tokens
            count = known - start if known - start < budget else budget
            if sequence.state_borders or not sequence.request.is_plain:
                # Before it grows: tables change only as far as a row computes.
                count = step.reach(sequence, start, count)
                if not count:
                    continue
            end = start + count
            if end > sequence.writable_len and not self._make_room(step, sequence, end):
                break  # it was preempted itself, so it was the last one
            if step.add_row(sequence, start, count, known):
                self._fork(step, sequence)
            budget -= count
        return budget if self.counters.num_preemptions == num_preemptions else 0

    def _make_room(self, step: ScheduledStep, sequence: Sequence, end: int) -> bool:
        """Grow a running sequence, preempting others until it can. False if it was preempted itself."""
        # Recomputed after each preemption: the victim may have been the other owner of a shared block.
        reserved = partial(beam_scheduling.num_reserved_blocks, self.kv, sequence)
        while not self.kv.grow(step.plan, sequence, end, reserve=reserved()):
            self._preempt_last()
            if not sequence.slot:
                return False
        return True

    def _preempt_last(self, *, swap: bool = True) -> None:
        """Move the last running sequence back to `waiting`. Its KV is swapped out, found in the prefix cache later, or
        recomputed. Tokens in flight are still appended when they are collected; it may even end then, while waiting.
        """
        victim = self.running.pop()
        if not (swap and self.kv.swap_out(victim)):
            self.kv.release(victim)
        self.pictures.release(victim)
        self._free_slot(victim)
        victim.waiting_for = None
        insort(self.waiting, victim, key=self._order)
        victim.request.num_preemptions += 1
        self.counters.num_preemptions += 1
        if victim.request.beams is not None:
            beam_scheduling.preempt(victim)
            if self.running and self.running[-1].request is victim.request:
                self._preempt_last()  # beams are preempted together

    def _admit(self, step: ScheduledStep, budget: int) -> None:
        """Plan rows for waiting sequences, in order, until one does not fit. Sequences without a slot for their adapter
        are skipped.
        """
        waiting = (len(sequence.token_ids) for sequence in self.waiting[: len(self._free_slots)])
        most = budget
        budget = self.padding.budget(self.max_num_batched_tokens - most, most, waiting)
        spare = most - budget  # used only for a picture that must be computed whole
        claims, num_passed = self.adapters.claims(self.running), 0
        while num_passed < len(self.waiting) and self._free_slots and budget > 0:
            sequence = self.waiting[num_passed]
            if not claims.may_start(sequence.request):
                num_passed += 1
                continue
            if not beam_scheduling.may_start(
                self.kv, sequence, len(self._free_slots), self.max_num_batched_tokens
            ):
                break
            found = self.kv.find(sequence)
            if not self.pictures.may_begin(sequence, found.num_tokens):
                num_passed += 1  # the picture of its next token cannot be encoded in this step
                continue
            least = self.pictures.least(sequence, found.num_tokens)
            if least > budget + spare:
                break
            if not self.kv.admit(sequence, found, self.max_num_batched_tokens):
                break
            claims.start(step.plan, sequence.request)
            del self.waiting[num_passed]
            sequence.slot = self._free_slots.pop()
            for sibling in beam_scheduling.siblings(sequence):
                self.waiting.remove(sibling)
                sibling.slot = self._free_slots.pop()
                insort(self.running, sibling, key=self._order)
            start, known = sequence.num_computed_tokens, len(sequence.token_ids)
            count_first_scheduling(self.counters, self.kv.pool, sequence.request, start)
            step.admitted.append(sequence)
            count = step.reach(sequence, start, min(known - start, max(budget, least)))
            if step.add_row(sequence, start, count, known):
                self._fork(step, sequence)
            budget -= count

    def _num_steps(self, step: ScheduledStep) -> int:
        """How many decode steps to launch. No request could start before a row ends, unless slots are free."""
        most, few = self.decode_steps
        if few == most or (self._free_slots and not self.waiting):
            return few
        pairs = zip(step.sequences, step.plan.starts, strict=True)
        first_end = min(sequence.max_len - 1 - start for sequence, start in pairs)
        return max(few, min(most, first_end))

    def _fork(self, step: ScheduledStep, parent: Sequence) -> None:
        """The prompt is computed in this step: create the other sequences of the request, which share its blocks.

        A sibling without a free slot waits like any other sequence, and later finds the prompt in the prefix cache or
        computes it.
        """
        siblings = [sequences.new_sibling(parent, i) for i in range(1, parent.request.params.n)]
        parent.request.sequences += siblings
        for sibling in siblings:
            if self._free_slots:
                step.add_sibling(parent, sibling, self._free_slots.pop())
            else:
                insort(self.waiting, sibling, key=self._order)

    def _remove(self, ended: list[Sequence]) -> None:
        """Remove ended sequences from the queues, and free what they hold."""
        for sequence in ended:
            sequence.num_in_flight = 0  # its tokens in flight are discarded
            self.kv.release(sequence)
            self.pictures.release(sequence)
            self._free_slot(sequence)
            request = sequence.request
            if request.finished and self.requests.pop(request.request_id, None) is not None:
                self.pictures.remove(request)
                self.counters.num_requests_finished += 1
        self.running = [s for s in self.running if s.finish_reason is None]
        self.waiting = [s for s in self.waiting if s.finish_reason is None]

    def _free_slot(self, sequence: Sequence) -> None:
        if sequence.slot:
            self._free_slots.append(sequence.slot)
        sequence.slot = 0
