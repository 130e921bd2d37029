"""Steps become text, stop strings and outputs of each kind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpage.engine.step_output import SequenceEnd, StepOutput, TextEnd
from jaxpage.output_processor import OutputProcessor, Processed
from jaxpage.outputs import Logprob
from jaxpage.request import FinishReason
from jaxpage.sampling_params import RequestOutputKind
from tests.engine.harness import (
    TextEngine,
    assert_consistent,
    assert_expected,
    assert_nothing_leaked,
    finish,
    make_engine,
    run,
)
from tests.fakes import FakeDetokenizer, expected_output, make_request

EOS = (4,)


def collect(engine: TextEngine, *requests) -> dict[str, list]:
    """Every output of each request, in order, by id."""
    outputs: dict[str, list] = {request.request_id: [] for request in requests}
    take = engine.processor.take

    def take_and_keep():
        taken = take()
        for output in taken:
            outputs[output.request_id].append(output)
        return taken

    engine.processor.take = take_and_keep
    run(engine, *requests)
    return outputs


def whole(outputs: list) -> dict[int, tuple]:
    """The deltas of each sequence joined: (text, ids, logprobs, finish reason, stop reason)."""
    joined: dict[int, tuple] = {}
    for output in outputs:
        for c in output.outputs:
            text, ids, logprobs, reason, _ = joined.get(c.index, ("", [], [], None, None))
            assert reason is None, "something came after the end"
            joined[c.index] = (
                text + c.text,
                ids + c.token_ids,
                logprobs + (c.logprobs or []),
                c.finish_reason,
                c.stop_reason,
            )
    return dict(sorted(joined.items()))


options = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 20),
        "n": st.integers(1, 4),
        "min_tokens": st.sampled_from([0, 0, 1]),
        "seed": st.integers(0, 5),
        "eos": st.sampled_from([(), EOS]),
        "stop_token_ids": st.sampled_from([[], [5, 3]]),
        "stop": st.sampled_from([[], ["c"], ["ab", "b"], ["fg", "a", "kc"]]),
        "logprobs": st.sampled_from([None, 0, 3]),
        "repetition_detection": st.sampled_from([None, {"max_pattern_size": 1, "min_count": 2}]),
        "stream_interval": st.sampled_from([None, 1, 3]),
    }
)
engines = st.fixed_dictionaries(
    {
        "overlap": st.booleans(),
        "decode_steps": st.sampled_from([1, 4]),
        "max_num_seqs": st.sampled_from([2, 8]),
        "num_blocks": st.sampled_from([20, 100]),
    }
)


@settings(max_examples=25, deadline=None)
@given(st.lists(options, min_size=1, max_size=4), engines)
def test_kinds_of_output_are_parts_of_the_same_answer(all_options, engine_options):
    check_kinds_of_output(all_options, engine_options)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(options, min_size=1, max_size=4), engines)
def test_kinds_of_output_are_parts_of_the_same_answer_in_depth(all_options, engine_options):
    check_kinds_of_output(all_options, engine_options)


def check_kinds_of_output(all_options, engine_options):
    answers = {}
    for kind in RequestOutputKind:
        requests = [
            make_request(str(i), [i + 1, 2], output_kind=kind, **options)
            for i, options in enumerate(all_options)
        ]
        engine = make_engine(**engine_options)
        answers[kind] = collect(engine, *requests)
        assert_expected_texts(requests, answers[kind])
    for i, options in enumerate(all_options):
        cumulative, delta, final = (answers[kind][str(i)] for kind in RequestOutputKind)
        (last,) = final
        assert last.finished and [o.finished for o in cumulative].count(True) == 1
        assert delta[-1].finished and not any(o.finished for o in delta[:-1])
        assert last.outputs == cumulative[-1].outputs
        assert [c.index for c in last.outputs] == list(range(options["n"]))
        expected = {
            c.index: (c.text, c.token_ids, c.logprobs or [], c.finish_reason, c.stop_reason)
            for c in last.outputs
        }
        assert whole(delta) == expected
        assert_intervals(delta, options["stream_interval"] or 1)
        for c in delta[-1].outputs:  # of all tokens, also in a delta
            assert c.cumulative_logprob == last.outputs[c.index].cumulative_logprob
        assert len(cumulative) == 1 or options["n"] > 1 or len(delta) == len(cumulative)
        for output in cumulative:
            assert [c.index for c in output.outputs] == list(range(options["n"]))
            for c in output.outputs:
                assert last.outputs[c.index].text.startswith(c.text)
                assert last.outputs[c.index].token_ids[: len(c.token_ids)] == c.token_ids
                assert (c.logprobs is None) == (options["logprobs"] is None)


def assert_intervals(deltas, interval) -> None:
    """Of each sequence the first delta and the last come at once, others with `interval` tokens."""
    begun = set()
    for completion in (c for output in deltas for c in output.outputs):
        at_once = completion.index not in begun or completion.finish_reason is not None
        assert len(completion.token_ids) >= (0 if at_once else interval)
        begun.add(completion.index)


def assert_expected_texts(requests, outputs) -> None:
    """Ids and reasons of the last outputs, or of all deltas, are those of the plain loop."""
    for request in requests:
        mine = outputs[request.request_id]
        if request.params.output_kind is RequestOutputKind.DELTA:
            found = {i: (ids, *ends) for i, (_, ids, _, *ends) in whole(mine).items()}
        else:
            last = mine[-1].outputs
            found = {c.index: (c.token_ids, c.finish_reason, c.stop_reason) for c in last}
        assert found == {i: expected_output(request, i, 64) for i in range(request.params.n)}


def test_a_delta_has_only_sequences_with_news():
    engine = make_engine()
    request = make_request(
        "a", [1], n=3, max_tokens=20, stop=["c"], output_kind=RequestOutputKind.DELTA
    )
    outputs = collect(engine, request)["a"]
    lengths = [len(expected_output(request, i, 64)[0]) for i in range(3)]
    assert len(set(lengths)) > 1  # or there would be nothing to see
    for step, output in enumerate(outputs, start=1):
        assert [c.index for c in output.outputs] == [i for i in range(3) if lengths[i] >= step]
        assert all(len(c.token_ids) == 1 for c in output.outputs)


@pytest.mark.parametrize("decode_steps", [1, 4, 8])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_string_takes_the_tokens_after_it_from_engine_and_counters(overlap, decode_steps):
    engine = make_engine(overlap=overlap, decode_steps=decode_steps, block_size=2)
    requests = [
        make_request(str(i), [i, 1], max_tokens=30, seed=i, stop=["a", "b", "cd"], n=1 + i % 2)
        for i in range(12)
    ]
    run(engine, *requests)
    assert_expected(engine, *requests)
    num_tokens = sum(len(c.token_ids) for o in engine.outputs.values() for c in o.outputs)
    assert engine.stats().generation_tokens == num_tokens
    assert engine.stats().num_requests_finished == 12


def test_the_engine_drops_tokens_behind_the_end_of_the_text():
    engine = make_engine(decode_steps=4, block_size=2)
    request = make_request("a", [1], max_tokens=20, ignore_eos=True, detokenize=False)
    engine.add(request)
    while request.sequences[0].num_output_tokens < 6:
        engine.step()
    sequence = request.sequences[0]
    tokens, before = sequence.output_token_ids, engine.stats().generation_tokens
    engine.end_by_text(TextEnd("a", 0, 3, len(tokens) - 3))
    assert sequence.output_token_ids == tokens[:3]
    assert sequence.finish_reason is FinishReason.STOP
    assert engine.stats().generation_tokens == before - len(tokens) + 3
    assert_consistent(engine)
    assert_nothing_leaked(engine)
    engine.end_by_text(TextEnd("a", 0, 3, 0))  # it is gone
    assert engine.stats().num_requests_finished == 1


def test_logprobs_hold_the_best_ids_and_the_sampled_one():
    """`FakeRunner` ranks the sampled id 1, 2 or 3, and gives rank r the logprob -r/2."""
    engine = make_engine()
    run(engine, make_request("a", [1, 2], max_tokens=8, logprobs=1, ignore_eos=True))
    (completion,) = engine.outputs["a"].outputs
    ranks = [1 + token_id % 3 for token_id in completion.token_ids]
    assert len(set(ranks)) > 1
    for token_id, rank, entries in zip(
        completion.token_ids, ranks, completion.logprobs, strict=True
    ):
        assert next(iter(entries)) == token_id
        name = chr(ord("a") + token_id)
        assert entries[token_id] == Logprob(-0.5 * rank, rank, name)
        best = (token_id + 1 - rank) % 13
        assert (entries[best].logprob, entries[best].rank) == (-0.5, 1)
        assert len(entries) == 1 + (rank > 1)
    assert completion.cumulative_logprob == sum(-0.5 * rank for rank in ranks)


@pytest.mark.parametrize(("logprobs", "count"), [(0, 0), (2, 2), (3, 3), (-1, 8)])
def test_logprobs_are_as_many_as_asked_for(logprobs, count):
    engine = make_engine(decode_steps=4)
    others = [make_request(str(i), [3], max_tokens=9, logprobs=i) for i in range(1, 4)]
    run(engine, make_request("a", [1, 2], max_tokens=8, logprobs=logprobs), *others)
    (completion,) = engine.outputs["a"].outputs
    for token_id, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        best = [(token_id + r - (1 + token_id % 3)) % 13 for r in range(1, count + 1)]
        assert list(entries) == list(dict.fromkeys([token_id, *best]))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_detokenizer_that_raises_costs_its_request_and_leaks_nothing(overlap):
    engine = make_engine(overlap=overlap, max_num_seqs=2)
    doomed, lucky, other = (make_request(str(i), [i] * 3, seed=i, max_tokens=9) for i in range(3))
    for request in (doomed, lucky, other):  # two slots: `other` waits
        engine.add(request)
    engine.step()

    def append(token_id, *, ends, check_stop):
        raise RuntimeError("fails as told")

    engine.processor._requests["0"].sequences[0].detokenizer.append = append
    finish(engine)
    assert [str(e) for e in engine.errors.values()] == ["fails as told"]
    assert doomed.sequences[0].finish_reason is FinishReason.ABORT
    (completion,) = engine.outputs["0"].outputs
    assert completion.finish_reason == "abort" and engine.outputs["0"].finished
    assert_expected(engine, lucky, other)


def test_steps_of_forgotten_requests_are_ignored():
    engine = make_engine(overlap=True)
    request = make_request("a", [1], max_tokens=9)
    engine.add(request)
    engine.step()
    assert "a" in engine.processor and engine.processor.num_unfinished == 1
    assert engine.processor.discard("a") and not engine.processor.discard("a")
    assert "a" not in engine.processor
    for _ in range(12):
        assert engine.step() == []
    assert engine.processor.num_unreported == 0


def test_what_was_said_of_a_request_that_begins_anew_does_not_count():
    processor = OutputProcessor(FakeDetokenizer)
    requests = [make_request(name, [1], n=2, stop=["c"], max_tokens=9) for name in "ab"]
    for request in requests:
        processor.add(request)

    def step(tokens: dict[tuple[str, int], list[int]], **fields) -> Processed:
        return processor.process(
            StepOutput(
                request_ids=[name for name, _ in tokens],
                indices=[index for _, index in tokens],
                token_ids=list(tokens.values()),
                rows=[0] * len(tokens),
                **fields,
            )
        )

    step({("a", 0): [1], ("a", 1): [3], ("b", 0): [0]})
    assert step({("a", 0): [2]}, replica=3).text_ends == [TextEnd("a", 0, 2, 0, 3)]
    processed = step({}, restarted=["a", "gone"])
    assert processed.unwanted == ["gone"]
    ends = {i: SequenceEnd(FinishReason.LENGTH, None) for i in (0, 1)}
    assert step({("a", 0): [5, 6], ("a", 1): [7]}, ends=ends).finished == ["a"]
    output = processor.take_one("a")
    assert [c.token_ids for c in output.outputs] == [[5, 6], [7]]
    assert [c.text for c in output.outputs] == ["fg", "h"]
    assert [c.token_ids for c in processor.take()[0].outputs] == [[0], []]


def test_a_step_without_some_requests():
    end = SequenceEnd(FinishReason.STOP, None)
    step = StepOutput(
        request_ids=["a", "b", "a", "c"],
        indices=[0, 0, 1, 0],
        token_ids=[[1], [2], [3], [4]],
        rows=[0, 1, 2, 3],
        ends={1: end, 2: end, 3: end},
        scored=[("a", 2, False), (None, 1, True), ("c", 3, True)],
    )
    left = step.without({"a"})
    assert left.request_ids == ["b", "c"] and left.indices == [0, 0]
    assert left.token_ids == [[2], [4]] and left.rows == [1, 3]
    assert left.ends == {0: end, 1: end}
    # The places of what is scored stay.
    assert left.scored == [(None, 2, False), (None, 1, True), ("c", 3, True)]
