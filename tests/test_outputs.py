"""What a RequestOutput says of a request."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from jaxpage import tiny
from jaxpage.engine.step_output import SequenceEnd, StepOutput
from jaxpage.output_processor import OutputProcessor
from jaxpage.outputs import CompletionOutput, Logprob, RequestOutput, RequestStateStats
from jaxpage.plan import StepResult
from jaxpage.request import FinishReason, Request
from jaxpage.sampling_params import RequestOutputKind, SamplingParams
from jaxpage.tokenizer import Detokenizer, load_tokenizer


def make_request(**params) -> Request:
    return Request(
        request_id="r",
        prompt="ab",
        prompt_token_ids=[4, 5],
        params=SamplingParams(**params),
        seed=0,
        num_cached_tokens=1,
        num_cache_creation_tokens=1,
        num_preemptions=3,
        arrival_time=1e9,
        queued_time=10.0,
        first_scheduled_time=10.5,
    )


def step(
    tokens: dict[int, list[int]], *, ends: dict[int, SequenceEnd] | None = None, time: float = 12.0
) -> StepOutput:
    """What sequences of the request gained, by index; their logprobs are -1, -2, ... in turn."""
    rows, steps = len(tokens), max(map(len, tokens.values()))
    logprobs = -1.0 - np.arange(steps, dtype=np.float32)[:, None].repeat(rows, 1)
    result = StepResult(
        token_ids=np.zeros((steps, rows), np.int32),
        num_sampled=np.full(rows, steps, np.int32),
        logprobs=logprobs,
        ranks=-logprobs.astype(np.int32),
        top_token_ids=np.zeros((steps, rows, 0), np.int32),
        top_logprobs=np.zeros((steps, rows, 0), np.float32),
    )
    return StepOutput(
        time=time,
        request_ids=["r"] * rows,
        indices=list(tokens),
        token_ids=list(tokens.values()),
        rows=list(range(rows)),
        ends={list(tokens).index(index): end for index, end in (ends or {}).items()},
        result=result,
    )


def make_processor(request: Request, make_detokenizer=lambda request: None) -> OutputProcessor:
    processor = OutputProcessor(make_detokenizer)
    processor.add(request)
    return processor


def test_an_unfinished_request_is_a_copy_of_its_state():
    processor = make_processor(make_request(n=2))
    end = SequenceEnd(FinishReason.STOP, 12)
    processor.process(step({0: [10, 11], 1: [10, 11, 12]}, ends={1: end}))
    (output,) = processor.take()
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "ab", [4, 5])
    assert (output.finished, output.num_cached_tokens, output.prompt_logprobs) == (False, 1, None)
    first, second = output.outputs
    processor.process(step({0: [99]}))  # before anybody looked at its ids
    assert (first.index, first.token_ids, first.finish_reason) == (0, [10, 11], None)
    assert (second.index, second.token_ids) == (1, [10, 11, 12])
    assert (second.finish_reason, second.stop_reason) == ("stop", 12)
    assert (first.finished(), second.finished()) == (False, True)
    assert type(second.finish_reason) is str and type(first.token_ids) is list
    processor.process(step({0: [98]}))
    assert first.token_ids == [10, 11]
    assert isinstance(first, CompletionOutput)
    assert "token_ids=[10, 11], cumulative_logprob=None, logprobs=None" in repr(first)


def test_an_unfinished_completion_is_copied_and_pickled_as_what_it_shows():
    processor = make_processor(make_request(logprobs=0))
    processor.process(step({0: [10, 11]}))
    (first,) = processor.take()[0].outputs
    for again in (copy.copy(first), pickle.loads(pickle.dumps(first))):  # our own bytes
        assert type(again) is CompletionOutput
        assert (again.token_ids, again.logprobs) == ([10, 11], first.logprobs)


def test_what_a_user_does_to_an_output_does_not_reach_the_request():
    request = make_request(n=2)
    processor = make_processor(request)
    processor.process(step({0: [10], 1: [20]}))
    (output,) = processor.take()
    output.outputs[0].token_ids.append(99)
    output.prompt_token_ids.append(99)
    end = SequenceEnd(FinishReason.LENGTH, None)
    processor.process(step({0: [11], 1: [21]}, ends={0: end, 1: end}))
    assert [c.token_ids for c in processor.take()[0].outputs] == [[10, 11], [20, 21]]
    assert output.outputs[1].token_ids == [20]
    assert request.prompt_token_ids == [4, 5]


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_later_outputs_are_added_to_earlier_ones(kind):
    processor = make_processor(make_request(n=2, logprobs=0, output_kind=kind))
    processor.process(step({0: [10, 11]}))
    (whole,) = processor.take()
    for ids, ends in (
        ({0: [12], 1: [13]}, {0: SequenceEnd(FinishReason.STOP, 12)}),
        ({1: [14]}, {1: SequenceEnd(FinishReason.LENGTH, None)}),
    ):
        processor.process(step(ids, ends=ends))
        (later,) = processor.take()
        whole.add(later, aggregate=kind is RequestOutputKind.DELTA)
    assert whole.finished and whole.metrics == later.metrics
    assert [(c.index, c.token_ids, c.finish_reason) for c in whole.outputs] == [
        (0, [10, 11, 12], "stop"),
        (1, [13, 14], "length"),
    ]
    assert [len(c.logprobs) for c in whole.outputs] == [3, 2]


def test_times_are_those_of_the_request():
    processor = make_processor(make_request(n=2))
    processor.process(step({0: [10], 1: [10, 11, 12]}))
    processor.process(step({0: [11]}, time=13.0))
    (output,) = processor.take()
    metrics = output.metrics
    assert (metrics.num_generation_tokens, metrics.num_preemptions) == (5, 3)
    assert (metrics.arrival_time, metrics.queued_ts, metrics.scheduled_ts) == (1e9, 10.0, 10.5)
    assert (metrics.first_token_ts, metrics.last_token_ts) == (12.0, 13.0)
    assert metrics.first_token_latency == 2.0
    assert metrics.time_in_queue == 0.5
    assert metrics.first_scheduled_time == metrics.scheduled_ts
    assert (metrics.first_token_time, metrics.last_token_time) == (12.0, 13.0)
    assert output.num_cache_creation_tokens == 1
    processor.process(step({0: [11]}, time=14.0))
    assert metrics.last_token_ts == 13.0  # the earlier output stays as it is


def test_times_that_have_not_come_are_zero():
    request = make_request(n=2)
    request.first_scheduled_time = None
    processor = make_processor(request)
    processor.abort(["r"])
    (output,) = processor.take()
    metrics = output.metrics
    assert metrics.scheduled_ts == metrics.first_token_ts == metrics.last_token_ts == 0.0
    assert metrics.first_token_latency == metrics.time_in_queue == 0.0
    assert [c.finish_reason for c in output.outputs] == ["abort", "abort"] and output.finished


def test_logprobs_are_named_by_the_tokenizer_and_text_is_flushed(tmp_path):
    tokenizer = load_tokenizer(str(tiny.build(tmp_path / "tiny")))
    euro = [tokenizer.convert_tokens_to_ids(c) for c in "âĤ"]  # two of the three bytes of €
    request = make_request(logprobs=0)
    processor = make_processor(request, lambda r: Detokenizer(tokenizer, r.params))
    processor.process(step({0: euro[:1]}))
    processor.process(step({0: euro[1:]}))
    assert processor.take()[0].outputs[0].text == ""
    processor.abort(["r"])
    (completion,) = processor.take()[0].outputs
    assert completion.text == tokenizer.decode(euro) == "\ufffd"
    assert completion.cumulative_logprob == -2.0
    names = [p[i].decoded_token for p, i in zip(completion.logprobs, euro, strict=True)]
    assert names == ["", ""]  # parts of a character have no text
    assert [p[i].rank for p, i in zip(completion.logprobs, euro, strict=True)] == [1, 1]


def test_the_token_that_completes_a_character_is_named_after_it(tmp_path):
    tokenizer = load_tokenizer(str(tiny.build(tmp_path / "tiny")))
    tokens = [tokenizer.convert_tokens_to_ids(c) for c in "aâĤ¬b"]
    for kind in RequestOutputKind:
        request = make_request(logprobs=0, output_kind=kind)
        processor = make_processor(request, lambda r: Detokenizer(tokenizer, r.params))
        names = {}
        for start in range(0, 5, 2):  # two tokens a step
            processor.process(step({0: tokens[start : start + 2]}))
            for output in processor.take():
                names[start] = [next(iter(e.values())) for e in output.outputs[0].logprobs]
        processor.abort(["r"])
        for output in processor.take():
            names[5] = [next(iter(e.values())) for e in output.outputs[0].logprobs]
        named = sum(names.values(), []) if kind is RequestOutputKind.DELTA else names[5]
        assert [entry.decoded_token for entry in named] == ["a", "", "", "€", "b"]


def test_without_logprobs_there_is_no_cumulative_logprob():
    processor = make_processor(make_request(n=2))
    processor.process(step({0: [10]}))
    (output,) = processor.take()
    assert output.outputs[0].cumulative_logprob is None and output.outputs[0].logprobs is None


def test_fields_that_vllm_has_and_nobody_fills_yet_are_there():
    processor = make_processor(make_request())
    processor.process(step({0: [10]}))
    (output,) = processor.take()
    assert output.lora_request is output.encoder_prompt is output.encoder_prompt_token_ids is None
    (completion,) = output.outputs
    assert completion.lora_request is completion.routed_experts is None
    assert completion.weight_versions is None
    assert Logprob(-1.0) == Logprob(-1.0, None, None)


def test_outputs_are_made_as_those_of_vllm():
    completion = CompletionOutput(0, "a", [1], 0.0, None)
    named = CompletionOutput(
        index=0, text="a", token_ids=[1], cumulative_logprob=0.0, logprobs=None, finish_reason=None
    )
    assert completion == named and not completion.finished()
    output = RequestOutput("t", "x", [1], None, [completion], False)
    assert output == RequestOutput(
        request_id="t", prompt="x", prompt_token_ids=[1], prompt_logprobs=None, outputs=[named],
        finished=False,
    )  # fmt: skip
    assert output.num_cached_tokens == 0 and output.lora_request is None
    assert output.metrics == RequestStateStats()
