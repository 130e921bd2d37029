"""The loops: progress, overlap, failures of the runner, counters."""

from __future__ import annotations

import pytest

from jaxpage.engine.engine import MAX_FAILURES, StepRunner
from jaxpage.plan import DeletedParameterError, ParameterError, UnfitParameterError
from jaxpage.request import FinishReason
from tests.engine.harness import (
    assert_consistent,
    assert_expected,
    assert_nothing_leaked,
    finish,
    make_engine,
    run,
)
from tests.fakes import FakeRunner, make_adapter, make_request


def test_the_fake_runner_has_all_members_of_a_runner():
    members = {name for name in vars(StepRunner) if not name.startswith("_")}
    assert len(members) == 8 and members <= set(vars(FakeRunner))


def make_requests(count: int, **options):
    return [
        make_request(str(i), [i % 4] * (3 + i % 7), seed=i, **({"max_tokens": 9} | options))
        for i in range(count)
    ]


def step_until_error(engine) -> None:
    with pytest.raises(RuntimeError, match="fails as told"):
        for _ in range(100):
            engine.step()
            assert_consistent(engine)


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("overlap", [False, True])
def test_64_concurrent_requests_get_the_tokens_of_the_plain_loop(overlap, decode_steps):
    requests = make_requests(64, stop_token_ids=[2])
    engine = make_engine(
        num_blocks=120, max_num_seqs=64, overlap=overlap, decode_steps=decode_steps
    )
    run(engine, *requests)
    assert_expected(engine, *requests)


def test_overlapped_loop_launches_before_it_collects():
    engine = make_engine(overlap=True)
    engine.add(make_request("a", [1, 2, 3], max_tokens=3))
    assert engine.step() == []
    (request,) = engine.step()
    assert len(engine.runner.plans) == 2
    assert request.sequences[0].num_output_tokens == 1


def test_overlapped_loop_does_not_launch_beyond_max_tokens():
    engine = make_engine(overlap=True)
    run(engine, make_request("a", [1, 2, 3], max_tokens=3))
    assert len(engine.runner.plans) == 3


def test_step_without_requests_does_nothing():
    for overlap in (False, True):
        engine = make_engine(overlap=overlap)
        assert engine.step() == [] and engine.runner.plans == []


def test_request_that_ended_on_the_host_is_not_touched_by_its_step_under_way():
    engine = make_engine(overlap=True)
    request = make_request("a", [1], max_tokens=20, stop=list("abcdefghijklm"))
    engine.add(request)
    engine.step()
    assert engine.step() == [request] and request.finished
    assert engine.has_unfinished_requests() and engine.num_unfinished == 0
    assert engine.step() == []
    assert_nothing_leaked(engine)
    assert request.sequences[0].num_output_tokens == 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["fail_launch", "fail_collect"])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_failed_step_ends_its_requests_and_spares_the_others(kind, number, overlap):
    engine = make_engine(max_num_seqs=4, overlap=overlap, **{kind: (number,)})
    requests = make_requests(10, n=2)
    for request in requests:
        engine.add(request)
    step_until_error(engine)
    assert_consistent(engine)
    aborted = [r for r in requests if r.finished]
    assert aborted and all(
        s.finish_reason is FinishReason.ABORT for r in aborted for s in r.sequences
    )
    assert len(aborted) < 10 and engine.num_unfinished == 10 - len(aborted)
    finish(engine)
    assert_expected(engine, *[r for r in requests if r not in aborted])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["fail_launch", "fail_collect"])
@pytest.mark.parametrize("number", range(0, 12, 2))
def test_failed_step_leaves_nothing_in_the_prefix_cache(kind, number, overlap):
    """Blocks it registered were perhaps never written. The runner finds out whoever reads them."""
    engine = make_engine(
        num_blocks=16, max_num_batched_tokens=7, overlap=overlap, **{kind: (number,)}
    )
    prompt = list(range(12)) * 2
    for i in range(5):
        engine.add(make_request(str(i), prompt + [i], max_tokens=6))
    step_until_error(engine)
    again = [make_request(f"again {i}", prompt + [i], max_tokens=6) for i in range(2)]
    run(engine, *again)
    assert_expected(engine, *again)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["kv.find", "kv.grow", "pictures.least", "counters.count_step"])
def test_a_plan_that_cannot_be_made_ends_all_requests_and_leaves_nothing(
    where, overlap, monkeypatch
):
    """Some of its rows count as computed already, which nobody will compute."""
    options = {"num_host_blocks": 20, "num_adapters": 2, "preemption_mode": "swap"}
    engine = make_engine(num_blocks=20, overlap=overlap, **options)
    adapters = [None, make_adapter(1), make_adapter(2)]
    prompt = [i % 5 for i in range(10)]
    for i, adapter in enumerate(adapters[:2]):
        engine.add(make_request(str(i), prompt, seed=i, n=2, adapter=adapter, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.add(make_request("2", prompt, adapter=adapters[2]))
    owner, name = where.split(".")
    with monkeypatch.context() as patch:
        patch.setattr(type(getattr(engine.scheduler, owner)), name, lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            for _ in range(8):
                engine.step()
    assert all(engine.outputs[str(i)].outputs[0].finish_reason == "abort" for i in range(3))
    assert not engine.scheduler.requests
    assert_consistent(engine)
    later = [make_request(f"later {i}", prompt, adapter=a) for i, a in enumerate(adapters)]
    run(engine, *later)
    assert_expected(engine, *later)


def test_request_preempted_by_a_step_that_failed_comes_back_with_its_tokens():
    """Its own last step is still in flight then; its tokens count when that is collected."""
    for number in range(2, 20):
        engine = make_engine(num_blocks=10, overlap=True, fail_launch=(number,))
        requests = make_requests(4, max_tokens=14)
        for request in requests:
            engine.add(request)
        step_until_error(engine)
        finish(engine)
        kept = [r for r in requests if r.sequences[0].finish_reason is not FinishReason.ABORT]
        assert_expected(engine, *kept)


def test_abort_between_steps_keeps_the_tokens_so_far():
    for overlap in (False, True):
        engine = make_engine(overlap=overlap)
        request, other = make_requests(2)
        engine.add(request)
        engine.add(other)
        for _ in range(4):
            engine.step()
        num_tokens = request.sequences[0].num_output_tokens
        assert engine.abort("0") is request and request.finished
        assert engine.abort("0") is None and engine.abort("unknown") is None
        finish(engine)
        assert request.sequences[0].num_output_tokens == num_tokens > 0
        assert_expected(engine, other)


def test_stats_count_tokens_hits_and_steps():
    engine = make_engine(block_size=4)
    first = make_request("a", list(range(10)), max_tokens=3)
    second = make_request("b", list(range(10)), max_tokens=3)
    run(engine, first)
    run(engine, second)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (20, 6)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (20, 8)
    assert (stats.num_steps, stats.num_requests_finished) == (6, 2)
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert (stats.num_preemptions, stats.num_recompiles, stats.num_block_copies) == (0, 0, 0)
    assert engine.runner.num_computed_tokens == 10 + 2 + 2 + 2
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)


def test_prefix_cache_is_reset_only_between_requests():
    engine = make_engine()
    prompt = list(range(12))
    engine.add(make_request("a", prompt, max_tokens=4))
    engine.step()
    assert not engine.reset_prefix_cache()
    finish(engine)
    assert engine.reset_prefix_cache()
    request = make_request("b", prompt, max_tokens=4)
    run(engine, request)
    assert request.num_cached_tokens == 0


def test_when_all_kv_is_lost_running_requests_are_computed_anew():
    engine = make_engine()
    requests = make_requests(4)
    for request in requests:
        engine.add(request)
    for _ in range(3):
        engine.step()
    engine.runner.forget_everything()
    engine.scheduler.preempt_all()
    assert_consistent(engine)
    finish(engine)
    assert_expected(engine, *requests)
    assert all(request.num_preemptions == 1 for request in requests)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_launch_asks_the_runner_whether_the_pool_was_lost(overlap):
    engine = make_engine(overlap=overlap, fail_launch=(3,), max_num_seqs=2)
    requests = make_requests(4)
    for request in requests:
        engine.add(request)

    def recover():
        engine.runner.forget_everything()
        return True

    engine.runner.recover = recover
    step_until_error(engine)
    finish(engine)
    assert [r.sequences[0].finish_reason is FinishReason.ABORT for r in requests] == [
        True, True, False, False
    ]  # fmt: skip
    assert_expected(engine, *requests[2:])


def test_replaced_weights_make_the_cache_stale():
    engine = make_engine()
    first, second, third = (make_request(str(i), [1] * 20, max_tokens=2) for i in range(3))
    run(engine, first)
    run(engine, second)
    assert second.num_cached_tokens == 16
    changes = iter([True])
    engine.runner.weights_changed = lambda: next(changes, False)
    engine.add(third)
    engine.step()
    assert third.num_cached_tokens == 0
    assert [s.weight_starts for s in (*second.sequences, *third.sequences)] == [
        [(0, 0)],
        [(0, 0), (1, 0)],
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_sequence_says_which_tokens_are_of_which_weights(overlap):
    engine = make_engine(overlap=overlap)
    request = make_request("0", [1] * 5, max_tokens=6, n=2)
    changes = iter([False, False, False, True, True])
    engine.runner.weights_changed = lambda: next(changes, False)
    run(engine, request)
    # The fourth step is the first with others, and samples the fourth token.
    for sequence in request.sequences:
        assert sequence.weight_starts == [(0, 0), (1, 3), (2, 4)]


def test_kv_is_kept_if_whoever_replaces_weights_says_so():
    engine = make_engine()
    first, second = (make_request(str(i), [1] * 20, max_tokens=2) for i in range(2))
    run(engine, first)
    changes = iter([True])
    engine.runner.weights_changed = lambda: next(changes, False)
    assert engine.notice_weight_changes(keep_cache=True) == 1
    run(engine, second)
    assert second.num_cached_tokens == 16
    assert second.sequences[0].weight_starts == [(1, 0)]


@pytest.mark.parametrize(
    "error",
    [DeletedParameterError(), UnfitParameterError("float32[4]", "bfloat16[4]")],
    ids=["deleted", "unfit"],
)
def test_parameters_to_be_replaced_do_not_count_as_failures_of_the_engine(error):
    engine = make_engine()

    def launch(plan):
        raise error

    works, engine.runner.launch = engine.runner.launch, launch
    for i in range(2 * MAX_FAILURES):
        engine.add(make_request(str(i), [1] * 5, max_tokens=2))
        with pytest.raises(ParameterError, match="a parameter of the model"):
            engine.step()
    assert engine.death is None
    engine.runner.launch = works
    last = make_request("last", [1] * 5, max_tokens=2)
    run(engine, last)
    assert_expected(engine, last)
