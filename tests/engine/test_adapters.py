"""Adapters and their slots: who waits for one, what goes up, and what is told apart in the prefix cache."""

from __future__ import annotations

import pytest

from tests.engine.harness import assert_consistent, assert_expected, finish, make_engine, run
from tests.fakes import make_adapter, make_request

ONE, TWO, THREE = map(make_adapter, (1, 2, 3))
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def request(name, adapter=None, *, max_tokens=6, **options):
    options = {"ignore_eos": True, "max_tokens": max_tokens} | options
    return make_request(name, PROMPT, adapter=adapter, **options)


def loads(engine):
    """(slot, number) of the adapters that went up."""
    plans = engine.runner.plans
    return [(slot, int(number.item())) for plan in plans for slot, (number,) in plan.adapter_loads]


def running(engine):
    return [s.request.request_id for s in engine.scheduler.running]


@pytest.mark.parametrize("overlap", [False, True])
def test_adapters_mix_in_one_batch(overlap):
    engine = make_engine(num_adapters=2, overlap=overlap, decode_steps=4)
    requests = [request(str(i), a) for i, a in enumerate([None, ONE, TWO, ONE, None, TWO])]
    run(engine, *requests)
    assert_expected(engine, *requests)
    assert loads(engine) == [(1, 1), (2, 2)]
    assert max(plan.num_rows for plan in engine.runner.plans) == 6


def test_one_without_a_slot_waits_and_others_pass():
    engine = make_engine(num_adapters=1)
    requests = [
        request("a", ONE),
        request("b", TWO),
        request("base"),
        request("c", THREE),
        request("d", TWO),
    ]
    for each in requests:
        engine.add(each)
    engine.step()
    assert running(engine) == ["a", "base"]
    finish(engine)
    assert_expected(engine, *requests)
    # "d" does not run with "b": "c" was there before it.
    assert loads(engine) == [(1, 1), (1, 2), (1, 3), (1, 2)]


def test_one_that_waits_is_not_overtaken_for_ever():
    """New requests for the adapter whose slot it waits for run behind it."""
    engine = make_engine(num_adapters=2)
    for name, adapter in (("a", ONE), ("b", TWO), ("b2", TWO), ("waits", THREE), ("a2", ONE)):
        engine.add(request(name, adapter))
    engine.step()
    assert running(engine) == ["a", "b", "b2"]  # "waits" has claimed the slot of "a"
    engine.add(request("b3", TWO))
    engine.add(request("base"))
    engine.step()
    assert running(engine) == ["a", "b", "b2", "b3", "base"]
    for i in range(20):
        engine.add(request(f"more {i}", (ONE, TWO)[i % 2]))
        engine.step()
        assert_consistent(engine)
        if "waits" in running(engine):
            break
    assert "waits" in running(engine) and i < 8
    finish(engine)


def test_the_least_recently_used_adapter_gives_way():
    engine = make_engine(num_adapters=2)
    for i, adapter in enumerate([ONE, TWO, ONE, THREE, ONE, TWO]):
        each = request(str(i), adapter)
        run(engine, each)
        assert_expected(engine, each)
    assert loads(engine) == [(1, 1), (2, 2), (2, 3), (2, 2)]


def test_siblings_have_the_adapter_of_their_request():
    engine = make_engine(num_adapters=1)
    requests = [request("a", ONE, n=3), request("b", TWO, n=2)]
    run(engine, *requests)
    assert_expected(engine, *requests)


@pytest.mark.parametrize("preemption_mode", ["swap", "recompute"])
def test_preempted_ones_come_back_with_their_adapter(preemption_mode):
    engine = make_engine(
        num_adapters=2,
        num_blocks=11,
        num_host_blocks=20,
        preemption_mode=preemption_mode,
    )
    adapters = [ONE, TWO, None, THREE]
    requests = [request(str(i), a, max_tokens=14, seed=i) for i, a in enumerate(adapters)]
    run(engine, *requests)
    assert_expected(engine, *requests)
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("num_adapters", [1, 2])
def test_blocks_are_not_shared_between_adapters(num_adapters):
    """Nor do blocks of the model alone go because a slot has other contents."""
    engine = make_engine(num_adapters=num_adapters)
    for adapter, cached in ((None, 0), (ONE, 0), (TWO, 0), (ONE, 8), (None, 8)):
        each = request("again", adapter)
        run(engine, each)
        assert_expected(engine, each)
        assert each.num_cached_tokens == cached


@pytest.mark.parametrize("fails", [{"fail_launch": (1,)}, {"fail_collect": (1,)}])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_failed_step_was_to_load_goes_up_again(fails, overlap):
    engine = make_engine(num_adapters=2, overlap=overlap, **fails)
    engine.add(request("first", ONE))
    engine.step()
    engine.add(request("lost", TWO))
    with pytest.raises(RuntimeError, match="fails as told"):
        while engine.has_unfinished_requests():
            engine.step()
    finish(engine)
    each = [request("again", TWO), request("one", ONE)]
    run(engine, *each)
    assert_expected(engine, *each)


def test_an_adapter_of_a_step_whose_result_is_wrong_stays_for_its_other_users(monkeypatch):
    engine = make_engine(num_adapters=1, overlap=True)
    engine.add(request("lost", ONE))
    engine.step()
    other = request("other", ONE, seed=1)
    engine.add(other)  # its first step is launched before the result of the last one is looked at
    with monkeypatch.context() as patch:
        patch.setattr("jaxpage.engine.scheduler.collect", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert running(engine) == ["other"]
    assert_consistent(engine)
    last = request("last", TWO)
    engine.add(last)
    finish(engine)
    assert_expected(engine, other, last)
