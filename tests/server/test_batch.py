"""The calls that are being answered: how they enter and leave."""

from __future__ import annotations

import time

from jaxpage.server.batch import InFlight


def in_flight(max_requests: int = 10) -> InFlight:
    return InFlight(max_requests=max_requests, rejected=lambda: None)


def test_calls_of_one_name_leave_one_by_one():
    calls = in_flight()
    first, second = calls.enter("a", 2), calls.enter("a", 3)
    assert len({*first, *second}) == 5 and calls.num_requests == 5
    calls.leave("a", first)
    assert calls.engine_ids == {"a": second} and calls.num_requests == 3
    calls.leave("a", second)
    assert calls.engine_ids == {} and calls.num_requests == 0


def test_the_end_of_a_call_with_many_prompts_does_not_hold_up_the_loop():
    """Twenty thousand took 1.6 s, and the time grew with the square."""
    calls = in_flight()
    ids = calls.enter("a", 20_000)
    start = time.perf_counter()
    calls.leave("a", ids)
    assert time.perf_counter() - start < 0.3
    assert calls.engine_ids == {}
