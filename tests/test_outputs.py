"""What a RequestOutput says of a request."""

from __future__ import annotations

from jaxpage import tiny
from jaxpage.outputs import Logprob, from_request
from jaxpage.request import FinishReason, Request, Sequence
from jaxpage.sampling_params import SamplingParams
from jaxpage.tokenizer import Detokenizer, load_tokenizer


def make_request(**params) -> Request:
    request = Request(
        request_id="r",
        prompt="ab",
        prompt_token_ids=[4, 5],
        params=SamplingParams(**params),
        seed=0,
        num_cached_tokens=1,
        num_preemptions=3,
        arrival_time=1e9,
        queued_time=10.0,
        first_scheduled_time=10.5,
        first_token_time=12.0,
        last_token_time=13.0,
    )
    for index in (1, 0):
        tokens = [4, 5, *range(10, 12 + index)]
        sequence = Sequence(request=request, index=index, token_ids=tokens, max_len=9)
        request.sequences.append(sequence)
    return request


def test_an_unfinished_request_is_a_copy_of_its_state():
    request = make_request(n=2)
    request.sequences[0].finish_reason = FinishReason.STOP
    request.sequences[0].stop_reason = 12
    output = from_request(request)
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "ab", [4, 5])
    assert (output.finished, output.num_cached_tokens, output.prompt_logprobs) == (False, 1, None)
    first, second = output.outputs
    assert (first.index, first.token_ids, first.finish_reason) == (0, [10, 11], None)
    assert (second.index, second.token_ids) == (1, [10, 11, 12])
    assert (second.finish_reason, second.stop_reason) == ("stop", 12)
    assert (first.finished(), second.finished()) == (False, True)
    assert type(second.finish_reason) is str
    request.sequences[1].token_ids.append(99)
    assert first.token_ids == [10, 11]


def test_times_are_those_of_the_request():
    metrics = from_request(make_request(n=2)).metrics
    assert (metrics.num_generation_tokens, metrics.num_preemptions) == (5, 3)
    assert (metrics.arrival_time, metrics.queued_ts, metrics.scheduled_ts) == (1e9, 10.0, 10.5)
    assert (metrics.first_token_ts, metrics.last_token_ts) == (12.0, 13.0)
    assert metrics.first_token_latency == 2.0
    assert metrics.time_in_queue == 0.5
    assert metrics.first_scheduled_time == metrics.scheduled_ts
    assert (metrics.first_token_time, metrics.last_token_time) == (12.0, 13.0)


def test_times_that_have_not_come_are_zero():
    request = make_request(n=2)
    request.first_scheduled_time = request.first_token_time = request.last_token_time = None
    metrics = from_request(request).metrics
    assert metrics.scheduled_ts == metrics.first_token_ts == metrics.last_token_ts == 0.0
    assert metrics.first_token_latency == metrics.time_in_queue == 0.0


def test_logprobs_are_named_by_the_tokenizer_and_text_is_flushed(tmp_path):
    tokenizer = load_tokenizer(str(tiny.build(tmp_path / "tiny")))
    euro = [tokenizer.convert_tokens_to_ids(c) for c in "âĤ"]  # two of the three bytes of €
    request = make_request(logprobs=0)
    (sequence,) = request.sequences = request.sequences[:1]
    sequence.token_ids = [4, 5, *euro]
    sequence.detokenizer = Detokenizer(tokenizer, request.params)
    for token_id in euro:
        sequence.detokenizer.append(token_id, ends=False, check_stop=True)
    sequence.logprobs = [{euro[0]: Logprob(-1.0, 1)}, {euro[1]: Logprob(-2.0, 2)}]
    sequence.cumulative_logprob = -3.0
    assert from_request(request).outputs[0].text == ""
    sequence.finish_reason = FinishReason.LENGTH
    (completion,) = from_request(request).outputs
    assert completion.text == tokenizer.decode(euro) == "\ufffd"
    assert completion.cumulative_logprob == -3.0
    assert [p[i].decoded_token for p, i in zip(completion.logprobs, euro, strict=True)] == [
        "\ufffd",
        "\ufffd",
    ]


def test_without_logprobs_there_is_no_cumulative_logprob():
    assert from_request(make_request(n=2)).outputs[0].cumulative_logprob is None
