"""Decides what each step computes: tokens for sequences, blocks for tokens, slots for sequences.

What this file knows: sequences, blocks and slots as numbers. What it must never learn: what a token
means to the model, how a step is packed or run. A feature arrives as a field of the plan or the
request, never as a branch here.

There are no phases. A sequence knows `num_known_tokens` and has KV for `num_computed_tokens` of
them; a step moves the second towards the first. Prefill, chunked prefill, cache hits, decoding and
recomputation are that subtraction. The last known token has no KV yet when it is scheduled; a row
that reaches it samples the next.

Nothing is rolled back. `running` is sorted by the order of service; rows are planned from its
front, victims of a lack of blocks are taken from its end, so a victim was never planned in the same
step.
"""

from __future__ import annotations

import time
from bisect import insort

from jaxpage.engine import lockstep
from jaxpage.engine.admission import (
    find_blocks,
    num_computed,
    num_taken,
    table_lengths,
    take_blocks,
)
from jaxpage.engine.block_pool import BlockPool
from jaxpage.engine.growth import extend, grow, leave_behind
from jaxpage.engine.host_tier import HostTier
from jaxpage.engine.prefix_cache import NEVER, register_blocks
from jaxpage.engine.scheduled_step import ScheduledStep
from jaxpage.engine.sequences import append_tokens, check_runnable, new_sequence
from jaxpage.engine.stats import Counters, count_first_scheduling
from jaxpage.engine.step_output import SequenceEnd, StepOutput, TextEnd
from jaxpage.plan import StepResult
from jaxpage.request import FinishReason, Request, Sequence


class Scheduler:
    """Requests from `add` to their end: `schedule` plans a step, `update` takes its result.

    What is planned counts as launched. One more step may be planned before the result of the last
    one is in: tokens that one samples count as known (the device has them), only their ids are not.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: str = "fcfs",
        decode_steps: int = 1,
        tier: HostTier | None = None,
    ):
        """Raises ValueError for limits below 1."""
        limits = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len - 1,  # a token of prompt, a token of answer
            "decode_steps": decode_steps,
        }
        if min(limits.values()) < 1:
            raise ValueError(f"too small: {[name for name, limit in limits.items() if limit < 1]}")
        if policy not in ("fcfs", "priority"):
            raise ValueError(f"policy {policy!r} is neither 'fcfs' nor 'priority'")
        self.pool = pool
        self.tier = tier
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.decode_steps = decode_steps
        self.requests: dict[str, Request] = {}  # the unfinished ones
        self.running: list[Sequence] = []  # hold a request slot; sorted by `_order`
        self.waiting: list[Sequence] = []  # hold neither slot nor blocks; sorted by `_order`
        self.counters = Counters()
        self.weight_epoch = 0
        self._by_priority = policy == "priority"
        self._free_slots = list(range(max_num_seqs, 0, -1))  # slot 0 is the null slot
        self._num_arrivals = 0

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError, before anything changes, for what can never run."""
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        check_runnable(
            request,
            max_model_len=self.max_model_len,
            pool=self.pool,
            max_query_len=self.max_num_batched_tokens,
        )
        sequences = lockstep.first_sequences(
            request,
            self._new_sequence,
            self.pool,
            num_slots=len(self._free_slots) + len(self.running),
            max_query_len=self.max_num_batched_tokens,
        )
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        request.sequences = sequences
        self.requests[request.request_id] = request
        for sequence in sequences:
            insort(self.waiting, sequence, key=self._order)

    def abort(self, request_id: str) -> Request | None:
        """End a request now, with what it has; None if there is no such unfinished request."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        for sequence in request.sequences:
            if not sequence.finished:
                sequence.finish_reason = FinishReason.ABORT
        self._remove(request.sequences)  # all: one may have ended in an update that then failed
        return request

    def abort_steps(self, steps: list[ScheduledStep]) -> list[Request]:
        """End the requests of steps that failed. Nothing they wrote, or failed to, is reused."""
        requests = dict.fromkeys(s.request.request_id for step in steps for s in step.sequences)
        ended = [self.abort(request_id) for request_id in requests]
        self._distrust_kv()  # last, since sequences that end leave their blocks in the cache
        return [request for request in ended if request is not None]

    def preempt_all(self) -> None:
        """All KV is lost: every running sequence is to be computed anew."""
        while self.running:
            self._preempt(self.running[-1], swap=False)
        self._distrust_kv()

    def _distrust_kv(self) -> None:
        """No block is what its hash says. What was swapped out is computed anew."""
        self.pool.forget_all()
        for sequence in self.waiting:
            if sequence.host_tables:
                self._drop_host_blocks(sequence)
                sequence.num_computed_tokens = 0
        if self.tier is not None:
            self.tier.distrust()

    def _drop_host_blocks(self, sequence: Sequence) -> None:
        assert self.tier is not None
        self.tier.release(sequence.host_tables)
        sequence.host_tables = []

    def begin_weight_epoch(self) -> None:
        """The weights change now: KV of before is not for sequences admitted from here on."""
        self.weight_epoch += 1
        for sequence in self.waiting:
            sequence.block_hashes.clear()
        swapped = [s for s in self.waiting if s.host_tables]
        for sequence in (*self.running, *swapped):  # their KV is, or will be, a mixture
            sequence.block_hashes.clear()
            sequence.num_registered_blocks = NEVER
        if self.tier is not None:
            self.tier.store = None  # epochs are numbered anew in every process

    def schedule(self) -> ScheduledStep | None:
        """Plan a step for the caller to launch; None if there is nothing to do before `update`."""
        step = ScheduledStep()
        plan = step.plan
        if self.tier is not None:
            self.tier.begin_plan()
        num_preemptions = self.counters.num_preemptions
        budget = self._plan_running(step)
        if self.counters.num_preemptions == num_preemptions:
            self._admit(step, budget)
        for sequence in step.admitted:
            insort(self.running, sequence, key=self._order)
        if not step.sequences:
            return None
        has_beams = False
        for sequence in step.sequences:
            request = sequence.request
            plan.features |= request.features
            has_beams = has_beams or request.beams is not None
        if has_beams:
            lockstep.renew(step, self.pool)
        only_decodes = not step.admitted and plan.num_tokens.count(1) == plan.num_rows
        if self.decode_steps > 1 and only_decodes and all(plan.samples):
            extend(self.pool, step, self.decode_steps)
        self.counters.num_steps += 1
        self.counters.num_block_copies += len(plan.block_copies)
        if self.tier is not None:
            plan.transfers = (
                self.tier.take_transfers()
            )  # last: it knows what all of the above evicted
        self.counters.count_slots(self.pool, self.running, step)
        step.close()
        return step

    def update(self, step: ScheduledStep, result: StepResult) -> StepOutput:
        """Append what a step sampled. Returns what each sequence gained, and which of them ended."""
        output = StepOutput(time=time.monotonic(), result=result)
        num_steps, samples = step.plan.num_steps, step.plan.samples
        token_ids, num_sampled = result.token_ids.T.tolist(), result.num_sampled.tolist()
        ended = []
        num_appended = 0
        for row, sequence in enumerate(step.sequences):
            # Rows of sequences that ended after this step was planned: nobody waits for them.
            if sequence.finish_reason is not None or not samples[row]:
                continue
            sequence.num_in_flight -= num_steps
            request, sampled = sequence.request, token_ids[row]
            if request.beams is None:
                if num_sampled[row] < num_steps:
                    sampled = sampled[: num_sampled[row]]
                sampled = append_tokens(sequence, sampled)
                num_appended += len(sampled)
            else:
                num_appended += lockstep.report(self.pool, sequence, result, row)
                sampled = []
            if sequence.finish_reason is not None:
                ended += [sequence] if request.beams is None else request.sequences
                end = SequenceEnd(sequence.finish_reason, sequence.stop_reason)
                output.ends[len(output.rows)] = end
            else:
                assert num_sampled[row] == num_steps, "only the device thinks it ended"
                if request.beams is not None:
                    continue  # there is nothing to say before the search is over
            output.request_ids.append(request.request_id)
            output.indices.append(0 if request.beams is not None else sequence.index)
            output.token_ids.append(sampled)
            output.rows.append(row)
        self.counters.generation_tokens += num_appended
        if ended:
            self._remove(ended)
        return output

    def end_by_text(self, end: TextEnd) -> None:
        """End a sequence with fewer tokens than it may have: its text met a stop string."""
        self.counters.generation_tokens -= end.num_dropped
        request = self.requests.get(end.request_id)
        if request is None:
            return
        sequence = request.sequences[end.index]
        if sequence.finish_reason is None:
            del sequence.token_ids[len(request.prompt_token_ids) + end.num_tokens :]
            sequence.finish_reason = FinishReason.STOP
            self._remove([sequence])

    def _order(self, sequence: Sequence) -> tuple[int, int, int]:
        request = sequence.request
        return (request.priority if self._by_priority else 0, request.arrival, sequence.index)

    def _new_sequence(self, request: Request, index: int) -> Sequence:
        return new_sequence(request, index, self.max_model_len)

    def _plan_running(self, step: ScheduledStep) -> int:
        """Rows for the running sequences, front first; returns what is left of the token budget."""
        budget = self.max_num_batched_tokens
        running, refs, block_size = self.running, self.pool.refs, self.pool.block_size
        windowed = any(self.pool.windows)
        index = 0
        while budget > 0 and index < len(running):  # victims leave at the end
            sequence = running[index]
            index += 1
            known = len(sequence.token_ids) + sequence.num_in_flight
            if known >= sequence.max_len:
                continue  # ends when it is collected
            if windowed:
                leave_behind(self.pool, sequence)
            # The first table is the shortest; of its last block all groups are the same owners.
            start, table = sequence.num_computed_tokens, sequence.block_tables[0]
            count = known - start
            if count > budget:
                count = budget
            if (
                start + count > len(table) * block_size
                or (start % block_size and refs[table[start // block_size]] > 1)
                or sequence.request.beams is not None
            ) and not self._make_room(step, sequence, start + count):
                break  # it gave way itself, so it was the last
            self._add_row(step, sequence, start, count, known)
            budget -= count
        return budget

    def _make_room(self, step: ScheduledStep, sequence: Sequence, end: int) -> bool:
        """Blocks for a running sequence up to token `end`; a copy of a shared one it will write to.

        Victims give way while there are too few. False if the sequence itself had to.
        """
        # Asked anew after each victim: it may have been the other owner of the shared block.
        while lockstep.num_missing_blocks(self.pool, sequence, end) > self.pool.num_free:
            self._preempt(self.running[-1])
            if not sequence.slot:
                return False
        grow(self.pool, step.plan, sequence, end)
        return True

    def _preempt(self, victim: Sequence, *, swap: bool = True) -> None:
        """Back to waiting, with its tokens. Its KV is recomputed, or still found in the cache.

        Or it is swapped out, and comes back. Tokens it has in flight count when they are collected;
        it may even end then, while waiting.
        """
        popped = self.running.pop()
        assert popped is victim
        num_registered = victim.num_registered_blocks
        beams = victim.request.beams
        if swap and beams is None and self.tier is not None and self.tier.keeps(victim):
            count = -(-victim.num_computed_tokens // self.pool.block_size)
            victim.host_tables = self.tier.swap_out([t[:count] for t in victim.block_tables])
        self._release(victim, min(victim.num_computed_tokens, len(victim.token_ids)))
        if not victim.host_tables:
            victim.num_computed_tokens = 0
        elif num_registered == NEVER:
            victim.num_registered_blocks = NEVER
        insort(self.waiting, victim, key=self._order)
        victim.request.num_preemptions += 1
        self.counters.num_preemptions += 1
        if beams is not None:
            lockstep.give_way(victim)
            if self.running and self.running[-1].request is victim.request:
                self._preempt(self.running[-1])  # together

    def _admit(self, step: ScheduledStep, budget: int) -> None:
        """Rows for waiting sequences, in order, until one does not fit."""
        pool, max_query_len = self.pool, self.max_num_batched_tokens
        while self.waiting and self._free_slots and budget > 0:
            sequence = self.waiting[0]
            if not lockstep.may_enter(pool, sequence, len(self._free_slots), max_query_len):
                break
            known = len(sequence.token_ids)
            found = find_blocks(pool, self.tier, sequence, self.weight_epoch)
            start = num_computed(pool, sequence, found)
            lengths = table_lengths(pool, known, start, max_query_len)
            if num_taken(pool, found, lengths) > pool.num_free:
                break
            del self.waiting[0]
            take_blocks(pool, self.tier, sequence, found, lengths)
            sequence.slot = self._free_slots.pop()
            for sibling in lockstep.siblings(sequence):
                self.waiting.remove(sibling)
                sibling.slot = self._free_slots.pop()
                insort(self.running, sibling, key=self._order)
            count_first_scheduling(self.counters, pool, sequence.request, start)
            step.admitted.append(sequence)
            count = min(known - start, budget)
            self._add_row(step, sequence, start, count, known)
            budget -= count

    def _add_row(
        self, step: ScheduledStep, sequence: Sequence, start: int, count: int, known: int
    ) -> None:
        """Plan `count` tokens from `start`, as good as computed from here on."""
        end = start + count
        samples = end == known
        step.add_row(sequence, start, count, samples)
        sequence.num_computed_tokens = end
        # Blocks are registered when planned: later rows of the same step may already share them,
        # because in each layer all KV of a step is written before any is read. Only tokens whose
        # ids the host has seen have a hash.
        seen = len(sequence.token_ids)
        if (end if end < seen else seen) // self.pool.block_size > sequence.num_registered_blocks:
            register_blocks(self.pool, sequence, min(end, seen), self.weight_epoch)
        if samples:
            sequence.num_in_flight += 1
            request = sequence.request
            if request.params.n > len(request.sequences):
                self._fork(step, sequence)

    def _fork(self, step: ScheduledStep, parent: Sequence) -> None:
        """The prompt is about to be answered: create the other sequences, which share its blocks.

        A sequence that finds no slot waits like any other and later finds the prompt in the cache,
        or computes it.
        """
        request, prompt_len = parent.request, parent.num_computed_tokens
        children = [self._new_sequence(request, index) for index in range(1, request.params.n)]
        request.sequences += children
        for child in children:
            if not self._free_slots:
                insort(self.waiting, child, key=self._order)
                continue
            child.slot = self._free_slots.pop()
            child.block_tables = [list(table) for table in parent.block_tables]
            child.num_unseen_blocks = parent.num_unseen_blocks
            for table in child.block_tables:
                self.pool.fork(table)
            child.block_hashes = list(parent.block_hashes)
            child.num_registered_blocks = parent.num_registered_blocks
            step.admitted.append(child)
            self._add_row(step, child, prompt_len, 0, prompt_len)

    def _remove(self, ended: list[Sequence]) -> None:
        """Take sequences that ended out of the queues."""
        for sequence in ended:
            sequence.num_in_flight = 0  # what it still has under way is thrown away
            if sequence.host_tables:
                self._drop_host_blocks(sequence)
            if sequence.slot:
                self._release(
                    sequence, min(sequence.num_computed_tokens, len(sequence.token_ids) - 1)
                )
            request = sequence.request
            if request.finished and self.requests.pop(request.request_id, None) is not None:
                self.counters.num_requests_finished += 1
        self.running = [s for s in self.running if s.finish_reason is None]
        self.waiting = [s for s in self.waiting if s.finish_reason is None]

    def _release(self, sequence: Sequence, num_valid: int) -> None:
        """Give back slot and blocks; the KV of the first `num_valid` tokens can still be found.

        At once, even with a step of this sequence under way: steps run on the device in the order
        of their launches, so whoever gets the slot or the blocks next writes after that step has
        read and written them.
        """
        register_blocks(self.pool, sequence, num_valid, self.weight_epoch)
        for table in sequence.block_tables:
            self.pool.free(table)
        sequence.block_tables = []
        sequence.num_unseen_blocks = 0
        sequence.num_registered_blocks = 0
        self._free_slots.append(sequence.slot)
        sequence.slot = 0
