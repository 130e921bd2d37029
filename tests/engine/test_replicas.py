"""Several engines behind one, on fake devices that fail at any time: no request is lost or answered twice."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpage.engine.engine import Engine
from jaxpage.engine.errors import EngineDeadError
from jaxpage.engine.replicas import MAX_TRIES, Replicas
from jaxpage.output_processor import OutputProcessor
from jaxpage.outputs import RequestOutput
from jaxpage.request import Request
from jaxpage.sampling_params import RequestOutputKind
from tests.engine.harness import assert_nothing_leaked, make_engine
from tests.fakes import (
    FakeDetokenizer,
    FakeMaskSource,
    expected_beams,
    expected_output,
    make_beam_request,
    make_request,
)

KINDS = list(RequestOutputKind)
FINAL_ONLY = RequestOutputKind.FINAL_ONLY


class Killed(BaseException):
    """Ends a thread."""


def make_one(*, failures: dict[int, str] | None = None, step_seconds: float = 0.0, **options):
    """An engine whose n-th launches fail as `failures` says: "launch", "collect" or "kill"."""
    failures = failures or {}
    engine = make_engine(
        kind=Engine,
        fail_launch=tuple(n for n, how in failures.items() if how == "launch"),
        fail_collect=tuple(n for n, how in failures.items() if how == "collect"),
        **options,
    )
    collect = engine.runner.collect

    def collect_or_kill(handle):
        time.sleep(step_seconds)
        if failures.get(handle) == "kill":
            raise Killed(f"in step {handle}")
        return collect(handle)

    engine.runner.collect = collect_or_kill
    return engine


@dataclass
class Caller:
    """Does with replicas what `LLM` does, and keeps what it is shown."""

    replicas: Replicas
    outputs: OutputProcessor = field(default_factory=lambda: OutputProcessor(FakeDetokenizer))
    requests: dict[str, Request] = field(default_factory=dict)
    shown: dict[str, list[RequestOutput]] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    errors: list[Exception] = field(default_factory=list)

    def add(self, request: Request) -> None:
        self.replicas.add(request)
        self.outputs.add(request)
        self.requests[request.request_id] = request
        self.shown[request.request_id] = []

    def abort(self, request_id: str) -> None:
        self.outputs.discard(request_id)
        self.replicas.abort(request_id)
        del self.requests[request_id], self.shown[request_id]

    def step(self) -> None:
        try:
            step = self.replicas.step()
        except Exception as error:
            self.errors.append(error)
            failed = self.replicas.take_failed()
            assert failed or self.replicas.death
            assert not self.lost.intersection(failed)
            self.lost |= set(failed)
            for request_id in failed:
                assert self.outputs.discard(request_id)
            return
        processed = self.outputs.process(step)
        assert not processed.errors and not processed.unwanted
        for end in processed.text_ends:
            self.replicas.end_by_text(end)
        for output in self.outputs.take():
            # As of now: an output of a sequence that goes on copies its tokens when somebody looks.
            assert all(completion.token_ids is not None for completion in output.outputs)
            self.shown[output.request_id].append(output)

    def finish(self) -> None:
        deadline = time.monotonic() + 20
        while self.replicas.has_unfinished_requests():
            self.step()
            assert time.monotonic() < deadline, "it hangs"
        assert self.outputs.num_unfinished == self.replicas.num_unfinished == 0

    def answer(self, request_id: str) -> list[list[int]]:
        (*before, last) = self.shown[request_id]
        assert last.finished and not any(output.finished for output in before)
        if last.outputs and self.requests[request_id].params.output_kind == KINDS[1]:
            pieces: dict[int, list[int]] = {}
            for output in self.shown[request_id]:
                for c in output.outputs:
                    pieces.setdefault(c.index, []).extend(c.token_ids)
            return [pieces[index] for index in sorted(pieces)]
        return [c.token_ids for c in last.outputs]

    def assert_answered(self, request_id: str) -> None:
        request = self.requests[request_id]
        wanted = [expected_output(request, i, 64)[0] for i in range(request.params.n)]
        assert self.answer(request_id) == wanted


@pytest.fixture
def make():
    callers = []

    def make(*engines: Engine) -> Caller:
        callers.append(Caller(Replicas(engines)))
        return callers[-1]

    yield make
    for caller in callers:
        caller.replicas.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("jaxpage-replica")]


def some_requests(count: int, **options) -> list[Request]:
    options = {"max_tokens": 12, "output_kind": FINAL_ONLY} | options
    return [make_request(str(i), [i % 7, 3, 1 + i], seed=i, **options) for i in range(count)]


@pytest.mark.parametrize("overlap", [False, True])
def test_all_are_answered_as_by_one_engine_and_both_work(make, overlap):
    engines = [make_one(overlap=overlap) for _ in range(2)]
    caller = make(*engines)
    for i, kind in enumerate(KINDS * 10):
        stop = ["e", "jk"] if i % 2 else None
        caller.add(make_request(str(i), [i % 7] * (1 + i), n=1 + i % 3, seed=i, max_tokens=20,
                                stop=stop, output_kind=kind))  # fmt: skip
    caller.add(make_beam_request("beams", [3, 1], width=3, max_tokens=6))
    caller.add(make_request("mask", [5, 2], mask_source=FakeMaskSource(3, (2,)), max_tokens=9))
    caller.finish()
    for request_id in set(caller.requests) - {"beams"}:
        caller.assert_answered(request_id)
    beams = caller.requests["beams"]
    found = [[b.token_id for b in h.beam.path()] for h in beams.beams.ended]
    assert found == [tokens for _, tokens in expected_beams(beams)]
    stats = caller.replicas.stats()
    assert stats.num_requests_finished == 32 and stats.num_failed_replicas == 0
    assert stats.num_steps == sum(part.num_steps for part in stats.replicas)
    assert all(part.num_requests_finished > 5 for part in stats.replicas)
    assert stats.num_blocks == 2 * stats.replicas[0].num_blocks
    for engine in engines:
        assert_nothing_leaked(engine)


def test_requests_with_one_beginning_meet_again(make):
    caller = make(*(make_one() for _ in range(3)))
    for turn in range(4):
        for chat in range(3):
            prompt = [chat] * 8 + [turn, chat, turn, 1] * turn
            caller.add(make_request(f"{turn} {chat}", prompt, max_tokens=4))
        caller.finish()
    cached = [caller.shown[f"{turn} {chat}"][-1].num_cached_tokens
              for turn in range(1, 4) for chat in range(3)]  # fmt: skip
    assert all(cached) and caller.replicas.stats().prefix_cache_hits == sum(cached)
    assert caller.replicas.reset_prefix_cache()
    caller.add(make_request("again", [1] * 8, max_tokens=4))
    assert not caller.replicas.reset_prefix_cache()
    caller.finish()
    assert caller.shown["again"][-1].num_cached_tokens == 0


def test_what_can_never_run_is_refused_at_once(make):
    caller = make(make_one(num_blocks=4), make_one(num_blocks=4))
    with pytest.raises(ValueError, match="the pool has 3"):
        caller.add(make_request("a", [1] * 20))
    with pytest.raises(ValueError, match="beam width of 9"):
        caller.add(make_beam_request("b", [1], width=9, max_tokens=3))
    caller.add(make_request("c", [1], max_tokens=3))
    with pytest.raises(ValueError, match="'c' is in use"):
        caller.add(make_request("c", [1], max_tokens=3))
    caller.finish()
    caller.assert_answered("c")


def test_one_goes_to_the_replica_that_has_room_for_it(make):
    caller = make(make_one(num_blocks=4), make_one(num_blocks=40))
    for i in range(4):
        caller.add(make_request(str(i), [i] * 20, max_tokens=5))
    caller.finish()
    assert [part.num_requests_finished for part in caller.replicas.stats().replicas] == [0, 4]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", ["launch", "collect", "kill"])
def test_a_step_that_fails_is_made_up_for_elsewhere(make, how, overlap, caplog):
    engines = [make_one(failures={3: how}, overlap=overlap), make_one(overlap=overlap)]
    caller = make(*engines)
    for request in some_requests(24, n=2):
        caller.add(request)
    caller.add(make_beam_request("beams", [3, 1], width=3, max_tokens=6))
    caller.finish()
    assert not caller.lost and not caller.errors
    for i in range(24):
        caller.assert_answered(str(i))
    assert caller.replicas.stats().num_failed_replicas == (how == "kill")
    assert "begin anew on other replicas" in caplog.text
    assert ("replica 0 has failed and is taken out; 1 of 2 are left" in caplog.text) == (
        how == "kill"
    )
    assert caller.replicas.death is None


class ReadingMasks(FakeMaskSource):
    """As a grammar, it is asked for longer and longer outputs."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self._num_read = 0

    def mask(self, index, output_token_ids):
        assert len(output_token_ids) >= self._num_read
        self._num_read = len(output_token_ids)
        return super().mask(index, output_token_ids)

    def restart(self) -> None:
        super().restart()
        self._num_read = 0


def test_a_search_and_a_grammar_begin_anew(make):
    caller = make(make_one(failures={5: "kill"}), make_one())
    caller.add(make_beam_request("beams", [3, 1, 3, 1], width=3, max_tokens=12))
    source = ReadingMasks(3)
    # Where the search is: its prompt is that of the search and more.
    caller.add(make_request("mask", [3, 1, 3, 1, 5], mask_source=source, max_tokens=9,
                            output_kind=FINAL_ONLY))  # fmt: skip
    caller.finish()
    assert caller.replicas.stats().num_failed_replicas == 1 and not caller.lost
    found = [[b.token_id for b in h.beam.path()] for h in caller.requests["beams"].beams.ended]
    assert found == [tokens for _, tokens in expected_beams(caller.requests["beams"])]
    caller.assert_answered("mask")


def test_three_failures_in_a_row_take_a_replica_out(make):
    failing = make_one(failures=dict.fromkeys(range(2, 99), "collect"))
    caller = make(failing, make_one())
    for request in some_requests(12):
        caller.add(request)
    for _ in range(20):  # more work comes while it fails
        caller.finish()
        for request in some_requests(4):
            caller.add(request)
    caller.finish()
    stats = caller.replicas.stats()
    assert not caller.lost and stats.num_failed_replicas == 1
    failed = stats.replicas[0]
    assert failed.num_failed_replicas == 1 and failed.num_blocks == failed.num_running == 0
    assert caller.replicas.with_schedulers(lambda scheduler: scheduler.max_model_len).keys() == {1}
    assert stats.num_blocks == stats.replicas[1].num_blocks
    assert stats.generation_tokens == sum(part.generation_tokens for part in stats.replicas)


def test_what_somebody_has_seen_ends_with_an_error_and_the_rest_goes_on(make):
    # The first replica is slow, so that its first tokens are shown before it dies.
    caller = make(make_one(failures={4: "kill"}, step_seconds=0.01), make_one())
    for i in range(8):
        kind = RequestOutputKind.DELTA if i < 4 else FINAL_ONLY
        caller.add(make_request(str(i), [i], max_tokens=20, seed=i, output_kind=kind))
    caller.finish()
    assert caller.lost and caller.lost <= {"0", "1", "2", "3"}
    (error,) = caller.errors
    assert "replica 0 has failed and was taken out: Killed" in str(error)
    for i in range(8):
        if str(i) not in caller.lost:
            caller.assert_answered(str(i))
        else:
            assert caller.shown[str(i)]


def test_without_a_replica_there_is_no_engine(make):
    caller = make(make_one(failures={2: "kill"}), make_one(failures={2: "kill"}))
    for request in some_requests(6):
        caller.add(request)
    caller.finish()
    assert caller.lost == {str(i) for i in range(6)}
    assert caller.replicas.death == "all 2 replicas have failed"
    assert caller.replicas.stats().num_failed_replicas == 2
    with pytest.raises(EngineDeadError, match="all 2 replicas"):
        caller.add(make_request("late", [1]))
    assert not caller.replicas.has_unfinished_requests()


def test_a_request_is_not_tried_everywhere(make):
    """It may be what makes steps fail."""
    engines = [make_one(failures={0: "collect"}) for _ in range(MAX_TRIES + 2)]
    caller = make(*engines)
    (request,) = some_requests(1)
    caller.add(request)
    caller.finish()
    assert caller.lost == {"0"}
    assert sum(engine.runner.num_launches > 0 for engine in engines) == MAX_TRIES


def test_an_aborted_name_may_be_used_again_at_once(make):
    caller = make(make_one(step_seconds=0.001, overlap=True), make_one(overlap=True))
    for turn in range(30):
        for name in "abc":
            if name in caller.requests and not any(o.finished for o in caller.shown[name]):
                caller.abort(name)
            caller.add(make_request(name, [turn, ord(name)], max_tokens=30, seed=turn, stop=["c"]))
        for _ in range(turn % 4):
            caller.step()
    caller.finish()
    for name in "abc":
        caller.assert_answered(name)


def test_a_name_may_be_used_again_when_one_continuation_ended_by_its_text_before(make):
    caller = make(make_one())
    end_by_text = caller.replicas.end_by_text

    def end_late(end):
        time.sleep(0.002)  # in which the replica goes a step further
        end_by_text(end)

    caller.replicas.end_by_text = end_late
    for turn in range(60):
        request = make_request("a", [turn % 7, 2], n=2, seed=turn, max_tokens=20, stop=["c", "h"],
                               eos=(4,), output_kind=FINAL_ONLY)  # fmt: skip
        caller.add(request)
        while not caller.shown["a"]:
            caller.step()
        caller.assert_answered("a")
    caller.finish()


def test_held_replicas_compute_nothing_and_go_on(make):
    engines = [make_one(step_seconds=0.002, overlap=True) for _ in range(2)]
    caller = make(*engines)
    for request in some_requests(8, max_tokens=40):
        caller.add(request)
    caller.step()
    while caller.replicas.has_step_in_flight:
        processed = caller.outputs.process(caller.replicas.collect())
        assert not processed.finished
    launches = [engine.runner.num_launches for engine in engines]
    assert not any(engine.has_step_in_flight for engine in engines)
    time.sleep(0.02)
    assert launches == [engine.runner.num_launches for engine in engines]
    assert caller.replicas.reset_prefix_cache(reset_running_requests=True)
    caller.finish()
    for i in range(8):
        caller.assert_answered(str(i))


def test_an_engine_runs_no_further_ahead_than_its_outputs_are_taken(make):
    caller = make(make_one(), make_one())
    for request in some_requests(2, max_tokens=40):
        caller.add(request)
    time.sleep(0.05)
    assert caller.replicas.stats().num_steps <= 4
    caller.finish()


def test_closing_ends_the_threads_whatever_is_under_way(make):
    caller = make(make_one(step_seconds=0.002), make_one(step_seconds=0.002))
    for request in some_requests(6, max_tokens=40):
        caller.add(request)
    caller.step()
    caller.replicas.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("jaxpage-replica")]
    assert caller.replicas.reset_prefix_cache(reset_running_requests=True)


PLANS = st.dictionaries(
    st.integers(0, 12), st.sampled_from(["launch", "collect", "kill"]), max_size=3
)
REQUESTS = st.lists(
    st.builds(
        dict,
        prompt=st.lists(st.integers(0, 3), min_size=1, max_size=12),
        n=st.integers(1, 3),
        max_tokens=st.integers(1, 25),
        kind=st.sampled_from(KINDS),
        stop=st.sampled_from([None, ["c"], ["ab", "h"]]),
        masked=st.booleans(),
    ),
    min_size=1,
    max_size=16,
)


def check_any_failures(plans, works, overlap, num_first):
    engines = [
        make_one(failures=plan, overlap=overlap, num_blocks=30, max_num_seqs=4, decode_steps=3)
        for plan in plans
    ]
    caller = Caller(Replicas(engines))
    logging.disable()  # each failure is told with its traceback
    try:
        for i, work in enumerate(works):
            source = FakeMaskSource(i, (0, 1), forces=work["n"] == 1) if work["masked"] else None
            request = make_request(
                str(i), work["prompt"], n=work["n"], max_tokens=work["max_tokens"], seed=i,
                stop=work["stop"], output_kind=work["kind"], mask_source=source,
            )  # fmt: skip
            try:
                caller.add(request)
            except EngineDeadError:
                break
            if i >= num_first:
                caller.step()
        caller.finish()
        for request_id in caller.requests:
            if request_id not in caller.lost:
                caller.assert_answered(request_id)
                continue
            shown = caller.shown[request_id]
            assert not any(output.finished for output in shown)
            # If a replica never fails, only what was shown is lost.
            assert any(c.token_ids for o in shown for c in o.outputs) or all(plans)
        for engine, part in zip(engines, caller.replicas.stats().replicas, strict=True):
            if not part.num_failed_replicas:
                assert_nothing_leaked(engine)
        assert [caller.replicas._router.load(i) for i in range(len(engines))] == [0] * len(engines)
        assert not caller.replicas._assignments
    finally:
        logging.disable(logging.NOTSET)
        caller.replicas.close()


ANY_FAILURES = given(
    plans=st.lists(PLANS, min_size=1, max_size=3),
    works=REQUESTS,
    overlap=st.booleans(),
    num_first=st.integers(0, 16),
)
SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=12, **SETTINGS)
@ANY_FAILURES
def test_no_request_is_lost_or_answered_twice(plans, works, overlap, num_first):
    check_any_failures(plans, works, overlap, num_first)


@pytest.mark.slow
@settings(max_examples=150, **SETTINGS)
@ANY_FAILURES
def test_no_request_is_lost_or_answered_twice_in_depth(plans, works, overlap, num_first):
    check_any_failures(plans, works, overlap, num_first)
