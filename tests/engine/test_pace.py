"""How many decode steps a launch has, and when the next launch is due, while others may come."""

import time

import pytest

from jaxpage.engine.pace import LONGEST_LAUNCH, Pace
from jaxpage.engine.scheduler import DecodeSteps
from jaxpage.plan import StepPlan
from tests.engine.harness import make_engine
from tests.fakes import make_request


def steps(engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def decode(num_rows: int = 4, num_steps: int = 1) -> StepPlan:
    return StepPlan(slots=[1] * num_rows, num_tokens=[1] * num_rows, num_steps=num_steps)


def prompts(num_tokens: int) -> StepPlan:
    return StepPlan(slots=[1], num_tokens=[num_tokens])


def told(pace: Pace, plan: StepPlan, seconds: float, times: int = 10, now: float = 0.0) -> float:
    """Launches that follow one another without a gap; returns when the last one was collected."""
    for _ in range(times):
        now += seconds
        pace.collected(plan, now - 2 * seconds, now)
    return now


def test_slow_steps_are_launched_one_by_one_and_quick_ones_together():
    pace = Pace(8)
    assert pace.num_steps == 8
    now = told(pace, decode(), 2 * LONGEST_LAUNCH)
    assert pace.num_steps == 1
    now = told(pace, decode(), LONGEST_LAUNCH / 3.5, now=now)
    assert pace.num_steps == 3
    told(pace, decode(num_steps=4), LONGEST_LAUNCH / 10, now=now)
    assert pace.num_steps == 8


def test_prompts_and_pauses_say_nothing_of_decode_steps():
    pace = Pace(8)
    now = told(pace, decode(num_steps=8), 0.008)
    now = told(pace, prompts(2000), 5.0, now=now)
    assert pace.num_steps == 8
    pace.collected(decode(), now + 9.0, now + 9.001)  # nobody asked for anything for a while
    pace.collected(decode(), now + 9.001, now + 12.0)  # the machine paused
    assert pace.num_steps == 8


def test_a_launch_follows_shortly_before_the_end_of_the_last_one():
    pace = Pace(8)
    now = told(pace, decode(num_rows=4), 0.1)
    assert pace.next_launch(decode(num_rows=3), now - 0.01) == pytest.approx(now + 0.08)
    assert pace.next_launch(decode(num_rows=3), now + 1.0) == pytest.approx(now + 1.08)
    assert pace.next_launch(decode(num_rows=4, num_steps=2), now) == pytest.approx(now + 0.16)


def test_a_slow_host_has_the_time_that_it_takes():
    """What it does too late delays the device, and looks as if the device were slow: that must not go on."""
    pace, now = Pace(8), 0.0
    device, host = 0.01, 0.02  # seconds of a step
    pace.collected(decode(), now, now + 1.0)  # far from it
    now += 1.0
    for _ in range(60):
        launch_time, now = now, max(now, pace.next_launch(decode(), now))
        pace.began_to_prepare(now)
        now += host
        pace.launched(now)
        now = max(now, launch_time + device)
        pace.collected(decode(), launch_time, now)
    assert pace.next_launch(decode(), now) < now
    assert now - launch_time == pytest.approx(host)


def test_a_launch_follows_at_once_where_nothing_is_known_or_little_is_to_be_gained():
    pace = Pace(8)
    now = told(pace, decode(num_rows=4), 0.004)
    assert pace.next_launch(decode(num_rows=4), now) < now
    assert pace.next_launch(decode(num_rows=5), now) < now
    assert pace.next_launch(prompts(4), now) < now


def test_launches_are_short_only_while_others_could_join():
    engine = make_engine(decode_steps=8, max_num_seqs=2)
    engine.scheduler.decode_steps = DecodeSteps(8, while_open=2)
    for name, max_tokens in (("a", 40), ("b", 20)):
        engine.add(make_request(name, [1], max_tokens=max_tokens))
        steps(engine, 2)
    assert [plan.num_steps for plan in engine.runner.plans] == [1, 2, 1, 8]
    engine.add(make_request("c", [3], max_tokens=9))
    steps(engine, 2)
    # b has 1 + 8 + 8 tokens, so there is room for c after three more.
    assert [plan.num_steps for plan in engine.runner.plans[4:]] == [8, 3]
    steps(engine, 2)
    assert [plan.num_steps for plan in engine.runner.plans[6:]] == [1, 8]


def test_requests_that_come_while_the_device_computes_are_in_the_next_step():
    engine = make_engine(overlap=True)
    engine.keep_pace()
    engine.sleep_until_due()  # nothing is in flight
    engine.add(make_request("a", [1], max_tokens=20))
    steps(engine, 3)
    step = engine._launched[0]
    engine._pace._step_seconds = {(True, 0): 0.2}
    due = engine._pace.next_launch(step.plan, step.launch_time)
    assert due > time.monotonic()
    engine.sleep_until_due()
    assert time.monotonic() >= due
    engine.add(make_request("b", [2], max_tokens=20))
    engine.step()
    assert engine.runner.plans[-1].num_rows == 2


def test_a_step_that_is_done_is_followed_at_once_whatever_was_expected():
    """The first launch of a kind may have waited for its program to be compiled."""
    engine = make_engine(overlap=True)
    engine.keep_pace()
    engine.add(make_request("a", [1], max_tokens=20))
    steps(engine, 3)
    step = engine._launched[0]
    engine._pace._step_seconds = {(True, 0): 300.0}
    due = engine._pace.next_launch(step.plan, step.launch_time)
    engine.runner.steps_are_done = True
    engine.sleep_until_due()
    assert time.monotonic() < due
