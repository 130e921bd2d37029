"""Load on a server: what is sent and when, how streams are read, and what a report says of known outcomes."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxpage import cli
from jaxpage.bench import serve
from jaxpage.bench.serve import ServeBench
from jaxpage.bench.serve_client import Outcome
from jaxpage.bench.serve_data import Call, Dataset, arrivals, draw
from jaxpage.bench.serve_report import (
    Report,
    is_good,
    parse_limits,
    peak_concurrency,
    peak_throughput,
    statistics,
)
from jaxpage.demo import checkpoint
from tests.bench.fake_openai import DONE, FakeOpenAI, count_to, delta, event, text, usage

SHORT = Dataset(random_input_len=4, random_output_len=3)
A = Outcome(start=10.0, times=[10.5, 11.0, 11.5], usage=(10, 3))
B = Outcome(start=11.0, times=[11.25], usage=(20, 1))
BROKEN = Outcome(start=10.0, times=[10.1], usage=(99, 99), error="RuntimeError: no")


def report(*outcomes: Outcome, **more) -> Report:
    options = {"max_concurrency": None, "request_rate": "Infinity"}
    return Report(
        **{
            "settings": {"options": options},
            "outcomes": outcomes,
            "duration": 2.0,
            "limits": {},
            "num_unfinished": 0,
            "num_unsent": 0,
            "client_cpu": 0.5,
        }
        | more
    )


# Figures.


def test_figures_of_known_outcomes_are_exact():
    found = report(A, BROKEN, B, limits={"ttft": 300.0}).metrics()
    assert found == {
        "duration": 2.0,
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 30,
        "total_output_tokens": 4,
        "request_throughput": 1.0,
        "request_goodput": 0.5,
        "output_throughput": 2.0,
        "total_token_throughput": 17.0,
        "max_output_tokens_per_s": 3.0,
        "max_concurrent_requests": 2,
        **{"mean_ttft_ms": 375.0, "median_ttft_ms": 375.0, "std_ttft_ms": 125.0},
        "p99_ttft_ms": pytest.approx(497.5),
        **{
            "mean_tpot_ms": 500.0,
            "median_tpot_ms": 500.0,
            "std_tpot_ms": 0.0,
            "p99_tpot_ms": 500.0,
        },
        **{"mean_itl_ms": 500.0, "median_itl_ms": 500.0, "std_itl_ms": 0.0, "p99_itl_ms": 500.0},
        **{"mean_e2el_ms": 875.0, "median_e2el_ms": 875.0, "std_e2el_ms": 625.0},
        "p99_e2el_ms": pytest.approx(1487.5),
        "client_cpu_seconds": 0.5,
    }


def test_percentiles_are_interpolated_as_by_numpy():
    seconds = [i / 1000 for i in range(1, 101)]
    found = statistics("itl", seconds)
    assert found["p99_itl_ms"] == pytest.approx(99.01)
    assert found["median_itl_ms"] == pytest.approx(50.5)
    assert statistics("itl", [])["p99_itl_ms"] is None


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        ({}, (True, True)),
        ({"ttft": 500.0}, (True, True)),  # the limit itself is good
        ({"ttft": 499.9}, (False, True)),
        ({"tpot": 499.0}, (False, True)),  # one token has no time per token
        ({"e2el": 1500.0, "ttft": 400.0}, (False, True)),
        ({"e2el": 249.0}, (False, False)),
    ],
)
def test_goodput_counts_what_keeps_all_limits(limits, good):
    assert (is_good(A, limits), is_good(B, limits)) == good


def test_limits_are_read():
    assert parse_limits(["ttft:500", "tpot:50.5"]) == {"ttft": 500.0, "tpot": 50.5}
    for wrong in ("itl:5", "ttft", "ttft:x", "ttft:-1", "ttft:nan"):
        with pytest.raises(ValueError, match="NAME:MILLISECONDS.*" + wrong):
            parse_limits([wrong])


def test_the_peak_counts_tokens_not_chunks():
    assert (
        peak_throughput([A, B]) == 3.0
    )  # 11.0, 11.25 and 11.5 lie in the second that began at 11.0
    six = Outcome(start=10.0, times=[10.5, 11.0, 11.5], usage=(10, 6))
    assert peak_throughput([six, B]) == 5.0
    assert peak_throughput([]) == 0.0


def test_requests_that_touch_are_not_concurrent():
    next_one = Outcome(start=11.5, times=[12.0])
    assert peak_concurrency([A, next_one]) == 1
    assert peak_concurrency([A, B, next_one]) == 2
    assert peak_concurrency([]) == 0


def test_the_table_is_vllms():
    settings = {"options": {"max_concurrency": 4, "request_rate": 2.5}}
    shown = str(report(A, B, BROKEN, BROKEN, limits={"ttft": 300.0}, settings=settings))
    values = dict(re.findall(r"^(.{3,40}): +(\S+)$", shown, re.M))
    assert shown.startswith("============ Serving Benchmark Result ============\n")
    assert values["Successful requests"] == "2" and values["Failed requests"] == "2"
    assert values["Maximum request concurrency"] == "4"
    assert values["Request rate configured (RPS)"] == "2.50"
    assert values["Request goodput (req/s)"] == "0.50"
    assert values["Total token throughput (tok/s)"] == "17.00"
    assert values["P99 TTFT (ms)"] == "497.50" and values["Mean E2EL (ms)"] == "875.00"
    assert values["Processor time of this client (s)"] == "0.50"
    assert shown.endswith("\n2 failed: RuntimeError: no")


def test_a_report_of_nothing_is_a_report():
    nothing = report(BROKEN, num_unfinished=2, num_unsent=3)
    assert "Mean TTFT (ms):                          n/a" in str(nothing)
    assert "stopped: 2 requests were in flight, 3 not sent" in str(nothing)
    assert json.loads(json.dumps(nothing.as_dict(), allow_nan=False))["ttfts"] == [None]
    assert "goodput" not in str(nothing)


# What is sent, and when.


def test_intervals_are_gamma_distributed_and_end_when_they_should():
    calls = [Call(prompt="x", max_tokens=1)] * 20_000
    for burstiness in (0.25, 1.0, 4.0):
        times = np.asarray(arrivals(calls, 50.0, burstiness, (3,)))
        drawn = np.random.default_rng((3,)).gamma(burstiness, size=len(calls)).cumsum()
        np.testing.assert_allclose(times, drawn * (400.0 / drawn[-1]), rtol=1e-12)
        assert times[-1] == pytest.approx(len(calls) / 50.0)
        intervals = np.diff(times, prepend=0.0)
        variation = intervals.std() / intervals.mean()
        assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_arrivals_at_the_limits():
    calls = [Call(prompt="x", max_tokens=1)] * 4
    assert arrivals(calls, 2.0, math.inf, (0,)) == [0.5, 1.0, 1.5, 2.0]
    assert arrivals(calls, math.inf, 1.0, (0,)) == [0.0] * 4
    assert all(map(math.isfinite, arrivals(calls, 2.0, 1e-9, (0,))))
    traced = [Call(prompt="x", max_tokens=1, at=at) for at in (5.0, 5.25, 7.0)]
    assert arrivals(traced, math.inf, 1.0, (0,)) == [0.0, 0.25, 2.0]


def test_random_prompts_have_the_lengths_and_ids_that_were_asked_for():
    data = Dataset(
        random_input_len=100, random_output_len=10, random_range_ratio=0.5, token_ids=(30, 40)
    )
    calls = draw(data, 400, (0,))
    sizes = [len(call.prompt) for call in calls]
    assert (min(sizes), max(sizes)) == (50, 150)
    assert {call.max_tokens for call in calls} == set(range(5, 16))
    assert {i for call in calls for i in call.prompt} == set(range(30, 40))
    assert calls == draw(data, 400, (0,)) != draw(data, 400, (1,))
    assert {len(call.prompt) for call in draw(SHORT, 9, (0,))} == {4}


def test_prefixes_are_shared_evenly():
    data = Dataset(
        dataset_name="shared-prefix", num_prefixes=3, prefix_len=20, suffix_len=5, output_len=7
    )
    prompts = [call.prompt for call in draw(data, 12, (0,))]
    starts = [tuple(prompt[:20]) for prompt in prompts]
    assert sorted(starts.count(start) for start in set(starts)) == [4, 4, 4]
    assert len({tuple(prompt[20:]) for prompt in prompts}) == 12
    assert {len(prompt) for prompt in prompts} == {25}


def test_with_a_tokenizer_random_prompts_are_texts():
    data = Dataset(random_input_len=50, tokenizer=str(checkpoint()))
    from jaxpage.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(checkpoint()))
    for call in draw(data, 5, (0,)):
        assert isinstance(call.prompt, str)
        assert 25 <= len(tokenizer.encode(call.prompt, add_special_tokens=False)) <= 60


def test_a_trace_says_what_comes_when(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"timestamp": 3000, "input_length": 4, "output_length": 2}\r\n\r\n'
        b'{"timestamp": 1000, "prompt": "caf\xc3\xa9", "output_length": 5}\r\n'
        b'{"timestamp": 9000, "prompt": [1, 2], "output_length": 1}'
    )
    data = Dataset(dataset_name="trace", dataset_path=path, timestamp_unit=0.001)
    first, second = draw(data, 2, (0,))
    assert first == Call(prompt="café", max_tokens=5, at=1.0)
    assert len(second.prompt) == 4 and second.at == 3.0


def test_custom_prompts(tmp_path):
    path = tmp_path / "custom.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "output_tokens": 3}\n')
    data = Dataset(dataset_name="custom", dataset_path=path, output_len=9)
    assert draw(data, 10, (0,)) == [
        Call(prompt="a", max_tokens=9),
        Call(prompt="b", max_tokens=3),
    ]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ('{"output_tokens": 3}', "line 2: has no 'prompt'"),
        ('{"prompt": 3}', "line 2: the prompt must be a text or token ids, got 3"),
        (
            '{"prompt": "x", "output_tokens": 0}',
            "line 2: the number of output tokens must be at least 1",
        ),
        ("{", "line 2: "),
        ("[1]", "line 2: "),
    ],
)
def test_bad_lines_of_data_are_named(tmp_path, line, wrong):
    path = tmp_path / "custom.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(ValueError, match=wrong):
        draw(Dataset(dataset_name="custom", dataset_path=path), 10, (0,))


@pytest.mark.parametrize(
    "fields",
    [
        {"random_input_len": 0},
        {"random_range_ratio": 1.0},
        {"token_ids": (5, 5)},
        {"dataset_name": "trace"},
        {"dataset_path": checkpoint() / "config.json"},
        {"dataset_name": "custom", "dataset_path": checkpoint() / "nothing"},
        {"dataset_name": "shared-prefix", "prefix_len": 0, "suffix_len": 0},
    ],
)
def test_data_that_cannot_be_had_is_refused(fields):
    with pytest.raises(ValueError):
        draw(Dataset(**fields), 1, (0,))


@pytest.mark.parametrize(
    "fields",
    [
        {"num_prompts": 0},
        {"request_rate": 0.0},
        {"request_rate": math.nan},
        {"burstiness": -1.0},
        {"max_concurrency": 0},
    ],
)
def test_impossible_options_are_refused(fields):
    flag = next(iter(fields)).replace("_", "-")
    with pytest.raises(ValueError, match=f"^--{flag} must be "):
        ServeBench(**fields)
    trace = Dataset(dataset_name="trace")
    with pytest.raises(ValueError, match="--request-rate"):
        ServeBench(data=trace, request_rate=1.0)


# Streams.


def outcome_of(answer, endpoint="/v1/completions") -> Outcome:
    """What the client makes of one answer."""
    data = (
        SHORT
        if endpoint == "/v1/completions"
        else Dataset(random_input_len=4, tokenizer=str(checkpoint()))
    )
    with FakeOpenAI(lambda body: answer) as server:
        bench = ServeBench(base_url=server.url, num_prompts=1, endpoint=endpoint, data=data)
        (outcome,) = serve.run(bench).outcomes
    return outcome


@pytest.mark.slow
def test_times_are_those_of_tokens():
    """The silence after the last token does not count, nor does the one that only brings the usage."""
    outcome = outcome_of([*count_to(3, seconds=0.05)[:3], (1.0, event(usage(7, 3))), (0.0, DONE)])
    assert outcome.error == "" and (outcome.num_input, outcome.num_output) == (7, 3)
    assert outcome.text == " 0 1 2" and len(outcome.itls) == 2
    assert 0.05 <= outcome.ttft and 0.15 <= outcome.latency < 1.0
    assert outcome.tpot == pytest.approx(sum(outcome.itls) / 2)


@pytest.mark.slow
def test_a_chat_begins_with_its_first_word_not_with_the_role():
    outcome = outcome_of(
        [
            (0.0, delta(role="assistant", content="")),
            (0.1, delta(reasoning="hm")),
            (0.1, delta(content="yes")),
            (0.0, delta(tool_calls=[{"index": 0}])),
            (1.0, delta("stop")),
            (0.0, event({"choices": []} | usage(9, 3))),
            (0.0, DONE),
        ],
        "/v1/chat/completions",
    )
    assert outcome.error == "" and outcome.text == "yes" and len(outcome.times) == 3
    assert 0.1 <= outcome.ttft and outcome.latency < 1.0


STREAM = (
    b": ping\r\n\r\n"
    + text("\u00e9\u4e2d").replace(b"\n", b"\r\n")
    + text("b", "stop", **usage(5, 2))
)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_may_come_in_any_pieces(size):
    pieces = [(0.0, STREAM[i : i + size]) for i in range(0, len(STREAM), size)]
    outcome = outcome_of(pieces)
    assert (outcome.error, outcome.text, outcome.usage) == ("", "\u00e9\u4e2db", (5, 2))


def test_tokens_without_text_count_and_so_does_an_answer_of_none():
    outcome = outcome_of([(0.0, text("")), (0.1, text("x")), (0.0, text("", "stop")), (0.0, DONE)])
    assert len(outcome.times) == 2 and outcome.num_output == 2 and outcome.usage is None
    outcome = outcome_of([(0.0, text("", "stop")), (0.0, event(usage(4, 0))), (0.0, DONE)])
    assert (outcome.error, outcome.num_output, len(outcome.times)) == ("", 0, 1)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((500, "no\n luck"), "status 500: no luck"),
        ((404, '{"error": {"message": "which model?"}}'), "which model?"),
        ([(0.0, text("x")), (0.0, event({"error": {"message": "step failed"}}))], "^step failed$"),
        ([(0.0, event({"error": "as text"}))], "^as text$"),
        ([(0.0, text("x")), (0.0, text("y"))], "broke off after 2 chunks"),
        ([(0.0, text("x")), (0.0, None)], "^ClientPayloadError: .*not completed"),
        ([(0.0, text("x")), (0.0, b'data: {"choi')], "broke off after 1 chunks"),
        ([(0.0, DONE)], "broke off after 0 chunks"),
        ([(0.0, b"data: {nonsense}\n\n")], "JSONDecodeError"),
        ([(0.0, b"\xff\xfe\n\n"), (0.0, b'data: "\xff"\n\n')], "UnicodeDecodeError"),
        ([(0.0, b"data: [1]\n\n")], "AttributeError"),
        ([(0.0, None)], "^Client.*(not completed|disconnected|reset)"),
    ],
)
def test_what_goes_wrong_is_an_error_of_its_request(answer, error):
    outcome = outcome_of(answer)
    assert re.search(error, outcome.error), outcome.error


# Loads.


def test_requests_say_what_was_asked_for():
    with FakeOpenAI(lambda body: count_to(3)) as server:
        bench = ServeBench(
            base_url=server.url + "/v1/",
            api_key="secret",
            num_prompts=5,
            ignore_eos=True,
            temperature=0.0,
            data=SHORT,
        )
        found = serve.run(bench)
    assert len(found.answered) == 5
    for seen in server.seen:
        prompt = seen.body.pop("prompt")
        assert len(prompt) == 4 and all(256 <= i < 500 for i in prompt)
        assert seen.body == {
            "model": "fake",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 3,
            "ignore_eos": True,
            "temperature": 0.0,
        }
        assert seen.path == "/v1/completions" and seen.headers["authorization"] == "Bearer secret"
    written = json.dumps(found.as_dict(), allow_nan=False)
    assert "secret" not in written and '"request_rate": "Infinity"' in written
    assert json.loads(written)["generated_texts"] == [" 0 1 2"] * 5


def test_chats_are_texts():
    data = Dataset(random_input_len=8, random_output_len=2, tokenizer=str(checkpoint()))
    with FakeOpenAI(lambda body: count_to(2)) as server:
        url = {"base_url": server.url, "endpoint": "/v1/chat/completions", "num_prompts": 2}
        serve.run(ServeBench(**url, model="m", data=data))
        with pytest.raises(ValueError, match="--tokenizer"):
            serve.run(ServeBench(**url))
    for seen in server.seen:
        (message,) = seen.body["messages"]
        assert message["role"] == "user" and isinstance(message["content"], str)
        assert seen.body["max_completion_tokens"] == 2 and seen.body["model"] == "m"
        assert "ignore_eos" not in seen.body and "authorization" not in seen.headers


def test_failures_are_counted_and_the_others_go_on():
    answers = iter([(500, "no"), [(0.0, None)], *[count_to(2)] * 6])
    with FakeOpenAI(lambda body: next(answers)) as server:
        found = serve.run(ServeBench(base_url=server.url, num_prompts=8, data=SHORT))
    assert (found.metrics()["completed"], found.metrics()["failed"]) == (6, 2)
    assert "1 failed: status 500: no" in str(found)


def test_the_rate_is_kept():
    with FakeOpenAI(lambda body: count_to(1)) as server:
        bench = ServeBench(
            base_url=server.url,
            num_prompts=10,
            request_rate=20.0,
            burstiness=math.inf,
            data=SHORT,
        )
        found = serve.run(bench)
    intervals = np.diff([outcome.start for outcome in found.outcomes])
    assert np.median(intervals) == pytest.approx(0.05, abs=0.02)
    assert found.duration >= 0.5


def test_no_more_than_so_many_requests_run_at_once_and_waiting_does_not_count():
    with FakeOpenAI(lambda body: count_to(1, seconds=0.05)) as server:
        bench = ServeBench(base_url=server.url, num_prompts=9, max_concurrency=3, data=SHORT)
        found = serve.run(bench)
    assert server.most_running == 3 == found.metrics()["max_concurrent_requests"]
    assert found.duration >= 0.15
    assert sum(outcome.latency for outcome in found.outcomes) <= 3 * found.duration


def test_warm_ups_do_not_count_and_have_other_prompts():
    with FakeOpenAI(lambda body: count_to(1)) as server:
        found = serve.run(ServeBench(base_url=server.url, num_prompts=3, num_warmups=2, data=SHORT))
    prompts = [tuple(seen.body["prompt"]) for seen in server.seen]
    assert len(found.outcomes) == 3 and len(prompts) == 5 == len(set(prompts))


@pytest.mark.slow
def test_many_streams_at_once():
    with FakeOpenAI(lambda body: count_to(20, seconds=0.02)) as server:
        found = serve.run(ServeBench(base_url=server.url, num_prompts=200, data=SHORT))
    assert len(found.answered) == 200 and server.most_running > 64
    assert {o.text for o in found.outcomes} == {"".join(f" {i}" for i in range(20))}
    assert found.metrics()["total_output_tokens"] == 4000


def test_without_a_server(capsys):
    with FakeOpenAI(lambda body: count_to(1)) as server:
        url = server.url
    with pytest.raises(ValueError, match=r"/v1/models names no model \(.*start the server"):
        serve.run(ServeBench(base_url=url, num_prompts=2, data=SHORT))
    assert (
        cli.main(["bench", "serve", "--base-url", url, "--model", "m", "--num-prompts", "2"]) == 1
    )
    assert "2 failed: ClientConnectorError" in capsys.readouterr().out


def test_the_command_prints_and_writes_the_report(tmp_path, capsys):
    path = tmp_path / "report.json"
    with FakeOpenAI(lambda body: count_to(2)) as server:
        command = f"bench serve --base-url {server.url} --num-prompts 4 --random-input-len 5 --json {path}"
        command += " --goodput ttft:60000 tpot:60000 --request-rate inf --dataset-name random"
        assert cli.main(command.split()) == 0
    assert "Successful requests:                     4" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["completed"] == 4 and found["output_lens"] == [2] * 4
    assert found["request_goodput"] == found["request_throughput"]
    assert found["options"]["goodput"] == ["ttft:60000", "tpot:60000"]


@pytest.mark.slow
def test_ctrl_c_shows_what_there_is(tmp_path):
    """The first three are answered at once, the others not before the test is over."""
    answers = iter([count_to(2)] * 3)
    with FakeOpenAI(lambda body: next(answers, [(60.0, DONE)])) as server:
        command = [sys.executable, "-m", "jaxpage", "bench", "serve", "--base-url", server.url]
        command += ["--num-prompts", "8", "--max-concurrency", "2", "--json", str(tmp_path / "out")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while len(server.seen) < 5:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Successful requests:                     3" in out
    assert "stopped: 2 requests were in flight, 3 not sent" in out
    assert json.loads((tmp_path / "out").read_text())["completed"] == 3
