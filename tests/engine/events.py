"""Plays a workload on an engine: requests come and are aborted, weights change, steps fail."""

from __future__ import annotations

from hypothesis import strategies as st

from jaxpage.engine.engine import Engine
from jaxpage.request import FinishReason, Request
from tests.engine.harness import assert_consistent, assert_nothing_leaked

FAILURES = {"launch fails", "collect fails"}
LAST_ARRIVAL = 6

# What happens besides requests, by step: new weights, the prefix cache emptied, a step that fails.
events = st.dictionaries(
    st.integers(0, 30), st.sampled_from(["new weights", "reset", "launch fails", "collect fails"])
)

# Of a request: the step of its arrival, and steps until it is aborted (None: never).
arrivals = st.integers(0, LAST_ARRIVAL)
aborts = st.one_of(st.none(), st.none(), st.integers(0, 8))


def play(
    engine: Engine, todo: list[tuple[Request, int, int | None]], events: dict[int, str]
) -> list[Request]:
    """Step until nothing is left, checking the invariants between any two steps, and that nothing leaked.

    `todo` has (request, arrival, abort). Returns the requests that must be answered in full: nobody aborted them, nor
    did a step fail that they were in.
    """
    ended: set[str] = set()
    for now in range(6000):
        for request, arrival, abort in todo:
            if now == arrival:
                engine.add(request)
            if abort is not None and now == arrival + abort:
                engine.abort(request.request_id)
                assert_consistent(engine)
        if now > LAST_ARRIVAL and not engine.has_unfinished_requests():
            break
        _happen(engine, events.get(now))
        try:
            touched = engine.step()
        except RuntimeError as error:
            assert "as told" in str(error)
            touched = []
        assert_consistent(engine)
        assert len(set(touched)) == len(touched)
        assert not ended & {r.request_id for r in touched}, "touched after its end"
        ended |= {r.request_id for r in touched if r.finished}
    assert_nothing_leaked(engine)
    may_fail = bool(FAILURES & set(events.values()))
    return [
        request
        for request, _, abort in todo
        if abort is None and not (may_fail and _was_aborted(request))
    ]


def _happen(engine: Engine, event: str | None) -> None:
    runner = engine.runner
    if event == "new weights":
        engine.scheduler.begin_weight_epoch()
    elif event == "reset":
        engine.reset_prefix_cache()
    elif event == "launch fails":
        runner.fail_launch = (runner.num_launches,)
    elif event == "collect fails":
        runner.fail_collect = (*runner.fail_collect, runner.num_launches)


def _was_aborted(request: Request) -> bool:
    return any(s.finish_reason is FinishReason.ABORT for s in request.sequences)
