"""Builds an engine on a `FakeRunner` and checks what must hold of it between any two steps."""

from __future__ import annotations

from collections import Counter
from typing import Any

from jaxpage.engine.drafts import OnDevice
from jaxpage.engine.engine import Engine
from jaxpage.engine.kv_cache import KVCache
from jaxpage.engine.picture_cache import PictureCache
from jaxpage.engine.scheduled_step import ScheduledStep
from jaxpage.engine.scheduler import Scheduler
from jaxpage.engine.state_cache import StateCache
from jaxpage.output_processor import OutputProcessor
from jaxpage.outputs import RequestOutput
from jaxpage.plan import NULL_BLOCK
from jaxpage.request import FinishReason, Request, Sequence
from tests.fakes import FakeDetokenizer, FakeDrafts, FakeRunner, FakeStore, expected_output


class WatchedEngine(Engine):
    """Keeps its steps, and checks that a row's slot is its sequence's."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.steps: list[ScheduledStep] = []
        self._owners: dict[int, Sequence] = {}

    def _launch(self, step: ScheduledStep) -> int:
        handle = super()._launch(step)
        self.steps.append(step)
        self._owners |= {sequence.slot: sequence for sequence in step.admitted}
        owners = [self._owners[slot] for slot in step.plan.slots]
        assert list(map(id, owners)) == list(map(id, step.sequences))
        first_late = step.plan.num_rows - step.plan.num_late_rows
        for row, count in enumerate(step.plan.num_tokens[:first_late]):
            assert count or owners[row - 1].request is owners[row].request
        return handle


class TextEngine(WatchedEngine):
    """An engine whose steps go through an output processor, which ends sequences in their text.

    `outputs` has the latest output of each request.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.processor = OutputProcessor(FakeDetokenizer)
        self.outputs: dict[str, RequestOutput] = {}
        self.errors: dict[str, Exception] = {}
        self._added: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        super().add(request)
        self.processor.add(request)
        self._added[request.request_id] = request

    def abort(self, request_id: str) -> Request | None:
        self.processor.abort([request_id])
        self._take()
        return super().abort(request_id)

    def step(self) -> list[Request]:
        """The requests that gained tokens or ended."""
        try:
            step = super().step()
        except BaseException:
            self.processor.abort(self.take_failed())
            self._take()
            raise
        processed = self.processor.process(step)
        self.errors |= processed.errors
        for request_id in processed.errors:
            super().abort(request_id)
        for end in processed.text_ends:
            self.end_by_text(end)
            # The engine may have ended it already, and forgotten it, for another reason and with more tokens.
            request = self._added[end.request_id]
            sequence = request.sequences[end.index]
            del sequence.token_ids[len(request.prompt_token_ids) + end.num_tokens :]
            sequence.finish_reason = FinishReason.STOP
        return self._take()

    def _take(self) -> list[Request]:
        outputs = {output.request_id: output for output in self.processor.take()}
        self.outputs |= outputs
        return [self._added[request_id] for request_id in outputs]


def make_engine(
    *,
    num_blocks: int = 100,
    block_size: int = 4,
    enable_prefix_caching: bool = True,
    overlap: bool = False,
    fail_launch: tuple[int, ...] = (),
    fail_collect: tuple[int, ...] = (),
    num_host_blocks: int = 0,
    preemption_mode: str | None = None,
    store: FakeStore | None = None,
    windows: tuple[int | None, ...] = (None,),
    sends_plans: bool = False,
    picture_rows: int = 0,
    whole_pictures: bool = False,
    num_drafts: int = 0,
    has_draft_model: bool = False,
    num_cached_states: int | None = None,
    least_tokens: int = 1,
    kind: type[Engine] = TextEngine,
    **options,
) -> Any:
    """An engine of a `kind`. `options` are the scheduler's; sizes are generous unless told. `num_cached_states`,
    `least_tokens`: of a model with a recurrent state.
    """
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 1000, "max_model_len": 64}
    options = limits | options
    num_states = 1 + options["max_num_seqs"]
    cached_states = range(num_states, num_states + (num_cached_states or 0))
    kv = KVCache(
        num_blocks,
        block_size,
        enable_prefix_caching=enable_prefix_caching,
        windows=windows,
        num_host_blocks=num_host_blocks,
        preemption_mode=preemption_mode,
        store=store,
        states=StateCache(cached_states, block_size, least_tokens=least_tokens)
        if num_cached_states
        else None,
    )
    budget = options["max_num_batched_tokens"]
    pictures = PictureCache(picture_rows + 1, budget=budget, whole=whole_pictures)
    scheduler = Scheduler(kv, pictures=pictures, **options)
    if num_drafts:
        scheduler.drafter = FakeDrafts(num_drafts, options["max_model_len"])
    if has_draft_model:
        scheduler.drafter = OnDevice(num_drafts)
    runner = FakeRunner(
        num_blocks,
        block_size,
        fail_launch=fail_launch,
        fail_collect=fail_collect,
        store=store,
        windows=windows,
        sends_plans=sends_plans,
        whole_pictures=whole_pictures,
        num_states=0 if num_cached_states is None else cached_states.stop,
    )
    return kind(scheduler, runner, overlap=overlap)


def finish(engine: Engine) -> None:
    """Step until nothing is left to do, checking the invariants after each step."""
    for _ in range(3000):
        if not engine.has_unfinished_requests():
            break
        engine.step()
        assert_consistent(engine)
    assert_nothing_leaked(engine)


def run(engine: Engine, *requests: Request) -> None:
    for request in requests:
        engine.add(request)
    finish(engine)


def assert_expected(engine: TextEngine, *requests: Request) -> None:
    """Each request ended with the tokens and reasons of the plain loop."""
    for request in requests:
        assert [s.index for s in request.sequences] == list(range(request.params.n))
        outputs = engine.outputs[request.request_id].outputs
        for s, c in zip(request.sequences, outputs, strict=True):
            wanted = expected_output(request, s.index, engine.scheduler.max_model_len)
            assert (c.token_ids, c.finish_reason, c.stop_reason) == wanted
            assert (s.output_token_ids, s.finish_reason) == wanted[:2]


def assert_consistent(engine: Engine) -> None:
    """Blocks are free or owned, never both; slots too; the queues are in order."""
    scheduler, pool = engine.scheduler, engine.scheduler.kv.pool
    holders = count_blocks(s.block_tables for s in scheduler.running)
    assert pool.refs == [holders[block_id] for block_id in range(pool.num_blocks)]
    usable = range(NULL_BLOCK + 1, pool.num_blocks)
    assert sorted(pool.eviction_order()) == [b for b in usable if not holders[b]]
    assert holders[NULL_BLOCK] == 0
    slots = [s.slot for s in scheduler.running]
    assert 0 not in slots and len(set(slots)) == len(slots)
    assert not any(s.slot or s.block_tables for s in scheduler.waiting)
    for s in scheduler.running:
        assert s.num_unseen_blocks == sum(table.count(NULL_BLOCK) for table in s.block_tables)
    adapters = scheduler.adapters
    used = {s.request.adapter.key for s in scheduler.running if s.request.adapter is not None}
    assert used <= set(adapters.slots) and len(set(adapters.slots.values())) == len(adapters.slots)
    assert all(1 <= slot <= adapters.num_slots for slot in adapters.slots.values())
    swapped = [s for s in scheduler.waiting if s.host_tables]
    assert not any(s.num_computed_tokens for s in scheduler.waiting if not s.host_tables)
    assert_tier_consistent(scheduler, swapped)
    assert_pictures_consistent(scheduler)
    assert_states_consistent(scheduler)
    for queue in (scheduler.running, scheduler.waiting):
        assert not any(s.finished for s in queue)
        assert queue == sorted(queue, key=scheduler._order)


def assert_states_consistent(scheduler: Scheduler) -> None:
    """Each slot of the cached states is free or one state's."""
    states = scheduler.kv.states
    if states is not None:
        taken = [*states._slots.values(), *states._new.values()]
        assert sorted(taken + states._free) == list(states.slots)


def assert_pictures_consistent(scheduler: Scheduler) -> None:
    """Each row of the picture cache is free or one picture's; only running sequences are halfway through one."""
    cache = scheduler.pictures
    taken = [row for rows in cache._rows.values() for row in rows.tolist()]
    assert sorted(taken + cache._free) == list(range(1, cache.num_rows + 1))
    assert set(cache._halfway) <= set(scheduler.running)
    assert set(cache._halfway.values()) <= set(cache._rows)
    requests = [r for r in scheduler.requests.values() if r.pictures is not None]
    assert cache._wanted == Counter(h for r in requests for h in r.pictures.content_hashes)


def count_blocks(tables_of_sequences) -> Counter[int]:
    """How often each block stands in their tables, the null block apart."""
    tables = (table for tables in tables_of_sequences for table in tables)
    return Counter(block_id for table in tables for block_id in table if block_id != NULL_BLOCK)


def assert_tier_consistent(scheduler: Scheduler, swapped: list[Sequence]) -> None:
    """Host blocks are held by swapped sequences or by transfers; a swapped sequence has all its KV."""
    tier = scheduler.kv.tier
    if tier is None:
        assert not swapped
        return
    holders = count_blocks(s.host_tables for s in swapped)
    holders.update(tier._held + tier._launched)
    assert tier.pool.refs == [holders[block_id] for block_id in range(tier.pool.num_blocks)]
    for s in swapped:
        length = -(-s.num_computed_tokens // tier.pool.block_size)
        assert all(len(table) == length for table in s.host_tables)


def assert_nothing_leaked(engine: Engine) -> None:
    scheduler, pool = engine.scheduler, engine.scheduler.kv.pool
    assert not engine.has_unfinished_requests() and engine.num_unfinished == 0
    assert not scheduler.running and not scheduler.waiting
    assert pool.num_free == pool.num_usable and not any(pool.refs)
    assert engine.stats().kv_cache_usage == 0
    if scheduler.kv.tier is not None:
        assert_tier_consistent(scheduler, [])
    num_slots = len(scheduler._free_slots)
    assert sorted(scheduler._free_slots) == list(range(1, num_slots + 1))
