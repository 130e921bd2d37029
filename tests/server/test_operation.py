"""A server among operators and attackers: probes, keys, limits, draining, broken clients, broken engines."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import socket
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from jaxpage.async_llm import AsyncLLM
from jaxpage.server.options import ServerOptions
from jaxpage.server.run import bind, make_http
from tests.few_programs import few_programs
from tests.server.conftest import Lasting, serving

pytestmark = pytest.mark.slow  # a server

LONG = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}


def ask(url, path, body=None, *, method=None, headers=None, raw=None):
    """(status, headers, body) of one request."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    data = raw if raw is not None else None if body is None else json.dumps(body)
    given = {"Content-Type": "application/json"} | (headers or {})
    try:
        connection.request(method or ("GET" if data is None else "POST"), path, data, given)
        answer = connection.getresponse()
        text = answer.read()
        return answer.status, dict(answer.getheaders()), text
    finally:
        connection.close()


def error_of(text: bytes) -> dict:
    error = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"] and 'File "' not in error["message"]
    return error


def open_stream(url, body=LONG) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    assert response.status == 200 and response.readline().startswith(b"data: ")
    return connection, response


def wait_until(condition, seconds=20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_idle(llm) -> bool:
    stats = llm.stats()
    return stats.num_running == stats.num_waiting == stats.num_blocks_used == 0


def test_probes(url):
    for path in ("/health", "/live", "/ping"):
        assert ask(url, path)[0] == 200
    wait_until(lambda: ask(url, "/ready")[0] == 200)
    assert json.loads(ask(url, "/version")[2])["version"]
    assert json.loads(ask(url, "/load")[2]) == {"server_load": 0}
    assert ask(url, "/ping", method="POST", raw="")[0] == 200


def test_metrics_count_what_was_asked(url, llm):
    before = metrics(url)
    ask(url, "/v1/completions", {"prompt": "the dog", "max_tokens": 7, "ignore_eos": True})
    after = metrics(url)

    def gained(name):
        return after[name] - before.get(name, 0)

    labels = 'engine="0",model_name="demo"'
    assert gained(f"vllm:generation_tokens_total{{{labels}}}") == 7
    num_prompt = len(llm.get_tokenizer()("the dog")["input_ids"])
    assert gained(f"vllm:prompt_tokens_total{{{labels}}}") == num_prompt
    assert gained(f"vllm:time_to_first_token_seconds_count{{{labels}}}") == 1
    assert after[f"jaxpage:recompiles_total{{{labels}}}"] == 0


def metrics(url) -> dict[str, float]:
    lines = ask(url, "/metrics")[2].decode().splitlines()
    return {n: float(v) for n, v in (x.rsplit(" ", 1) for x in lines if not x.startswith("#"))}


def test_the_access_log_has_no_prompts(url, caplog):
    caplog.set_level("INFO", logger="jaxpage")
    ask(url, "/v1/completions", {"prompt": "a secret", "max_tokens": 1})

    def lines():  # those of earlier requests may come late
        found = [json.loads(r.message) for r in caplog.records if r.name.endswith("access_log")]
        return [line for line in found if line["path"] == "/v1/completions"]

    wait_until(lines)
    assert all(line["status"] == 200 and line["ms"] > 0 for line in lines())
    assert "secret" not in caplog.text


def test_texts_become_ids_and_back(url, llm):
    ids = llm.get_tokenizer()("the dog")["input_ids"]
    found = json.loads(ask(url, "/tokenize", {"prompt": "the dog", "return_token_strs": True})[2])
    assert found["tokens"] == ids and found["count"] == len(ids) == len(found["token_strs"])
    assert found["max_model_len"] == 2048
    messages = [{"role": "user", "content": "hi"}]
    found = json.loads(ask(url, "/tokenize", {"messages": messages})[2])
    rendered = llm.get_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert found["tokens"] == llm.get_tokenizer()(rendered, add_special_tokens=False)["input_ids"]
    assert json.loads(ask(url, "/detokenize", {"tokens": ids})[2]) == {"prompt": "the dog"}
    assert ask(url, "/detokenize", {"tokens": [10**6]})[0] == 400


def test_ids_in_ids_out(url, llm):
    ids = llm.get_tokenizer()("the dog")["input_ids"]
    body = {"token_ids": ids, "sampling_params": {"max_tokens": 5, "temperature": 0, "logprobs": 1}}
    whole = json.loads(ask(url, "/inference/v1/generate", body)[2])
    (choice,) = whole["choices"]
    assert len(choice["token_ids"]) == 5 and choice["finish_reason"] == "length"
    first = choice["logprobs"]["content"][0]
    assert first["token_id"] == choice["token_ids"][0] and first["rank"] == 1
    assert first["top_logprobs"] == [{k: v for k, v in first.items() if k != "top_logprobs"}]
    assert whole["model"] == "demo" and whole["created"] > 0
    text = ask(url, "/inference/v1/generate", body | {"stream": True})[2].decode()
    events = [json.loads(e[6:]) for e in text.split("\n\n") if e and e != "data: [DONE]"]
    assert [i for e in events for i in e["choices"][0]["token_ids"]] == choice["token_ids"]
    assert "usage" not in text
    wanted = {"include_usage": True, "continuous_usage_stats": True}
    body |= {"sampling_params": {"max_tokens": 5, "temperature": 1, "n": 2, "ignore_eos": True}}
    streamed = ask(url, "/inference/v1/generate", body | {"stream": True, "stream_options": wanted})
    events = [
        json.loads(e[6:]) for e in streamed[2].decode().split("\n\n") if e.startswith("data: {")
    ]
    counts = [0, 0]
    for event in events[:-1]:
        (choice,) = event["choices"]
        counts[choice["index"]] += len(choice["token_ids"])
        assert event["usage"]["completion_tokens"] == counts[choice["index"]]
    assert events[-1]["usage"]["completion_tokens"] == sum(counts) == 10
    status, _, text = ask(url, "/inference/v1/generate", body | {"sampling_params": {"x": 1}})
    assert status == 400 and "x" in error_of(text)["message"]


def test_ids_in_have_no_limit_unless_they_are_given_one(url, llm):
    ends = {str(llm.get_tokenizer().eos_token_id): 100.0}
    params = {"min_tokens": 20, "logit_bias": ends, "temperature": 0}
    body = {"token_ids": [5, 6], "sampling_params": params}
    (choice,) = json.loads(ask(url, "/inference/v1/generate", body)[2])["choices"]
    assert len(choice["token_ids"]) == 21 and choice["finish_reason"] == "stop"


def test_logprobs_of_given_ids(url):
    given = {"max_tokens": 2, "logprob_token_ids": [5, 6, 7], "return_tokens_as_token_ids": True}
    body = given | {"prompt": "the", "logprobs": 0}
    found = json.loads(ask(url, "/v1/completions", body)[2])["choices"][0]["logprobs"]
    assert {"token_id:5", "token_id:6", "token_id:7"} <= set(found["top_logprobs"][0])
    body = given | {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
    found = json.loads(ask(url, "/v1/chat/completions", body)[2])["choices"][0]["logprobs"]
    names = {each["token"] for each in found["content"][0]["top_logprobs"]}
    assert {"token_id:5", "token_id:6", "token_id:7"} <= names
    body |= {"logprob_token_ids": [10**7]}
    status, _, text = ask(url, "/v1/chat/completions", body)
    assert status == 400 and error_of(text)["param"] == "logprob_token_ids"


def test_scores_of_the_tokens_that_are_asked_for(url):
    params = {"max_tokens": 1, "prompt_logprobs": 0, "prompt_logprob_token_ids": [[6], [9, -1]]}
    body = {"token_ids": [5, 6, 7], "sampling_params": params}
    found = json.loads(ask(url, "/inference/v1/generate", body)[2])
    first, second = found["prompt_token_id_logprobs"]
    assert first[0] == pytest.approx(found["prompt_logprobs"][1]["6"]["logprob"])
    assert second[0] < 0 and first[1:] == second[1:] == [-9999.0]  # none was asked for
    for name in ("prompt_logprobs", "prompt_logprob_token_ids"):
        one = {"sampling_params": {name: params[name]}, "stream": True}
        status, _, text = ask(url, "/inference/v1/generate", body | one)
        assert status == 400 and "stream=true" in error_of(text)["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_body_of_another_type_is_told_so(url, path, kind):
    status, _, text = ask(url, path, {"prompt": "the"}, headers={"Content-Type": kind})
    assert status == 400
    assert "the header Content-Type: application/json" in error_of(text)["message"]


def test_the_id_of_a_request_comes_back(url):
    body = {"prompt": "the", "max_tokens": 1}
    _, headers, text = ask(url, "/v1/completions", body, headers={"X-Request-Id": "mine"})
    assert headers["x-request-id"] == "mine" and json.loads(text)["id"] == "cmpl-mine"


@pytest.mark.parametrize(
    ("raw", "status", "message"),
    [
        (b"{", 400, "no JSON"),
        (b'{"prompt": "\xff"}', 400, "the body cannot be read: 'utf-8' codec"),
        (b"[" * 100_000, 400, "recursion"),
        (b'{"prompt": "x", "n": 1e999}', 400, "n"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400, "digits"),
        (b'{"prompt": "\\ud800"}', 400, "surrogate"),
        (b"", 400, "the body: Field required"),
        (b"null", 400, "the body: Input should be"),
        (b'"text"', 400, "the body: Input should be"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_bodies_that_are_no_requests(url, raw, status, message):
    found, _, text = ask(url, "/v1/completions", raw=raw)
    assert found == status and message in error_of(text)["message"]


def test_paths_and_methods_that_do_not_exist(url):
    assert error_of(ask(url, "/v1/nothing")[2])["code"] == 404
    assert error_of(ask(url, "/v1/completions")[2])["code"] == 405


def test_keys(llm, tmp_path):
    file = tmp_path / "keys"
    file.write_text("second\n\nthird \n")
    with serving(llm, api_key=("first",), api_key_file=file, admin_api_key="boss") as url:

        def status(path, key=None, **kwargs):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            return ask(url, path, headers=headers, **kwargs)[0]

        assert status("/v1/models") == status("/v1/models", "wrong") == 401
        assert status("/v1/models", "fïrst") == 401
        assert all(status("/v1/models", key) == 200 for key in ("first", "second", "third", "boss"))
        assert status("/health") == status("/live") == 200
        # The administrator's paths take no other key.
        assert status("/resume", "first", method="POST", raw="") == 401
        assert status("/resume", "boss", method="POST", raw="") == 200
        assert error_of(ask(url, "/v1/models")[2])["type"] == "AuthenticationError"
    with serving(llm, api_key=("first",), api_key_for_all=True) as url:
        assert ask(url, "/health")[0] == 401
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="has no key"):
        ServerOptions(api_key_file=tmp_path / "empty").keys()


def test_a_proxy_may_keep_the_prefix_of_paths_or_remove_it(llm):
    with serving(llm, root_path="/api", api_key=("one",)) as url:
        for path in ("/v1/models", "/api/v1/models"):
            assert ask(url, path)[0] == 401
            assert ask(url, path, headers={"x-api-key": "one"})[0] == 200
        assert [ask(url, path)[0] for path in ("/health", "/api/health")] == [200, 200]
        assert ask(url, "/api/api/health", headers={"x-api-key": "one"})[0] == 404


def test_a_prefix_ends_before_a_slash(llm):
    """Otherwise /resume would be no path of the administrator's."""
    with serving(llm, root_path="/r", admin_api_key="boss") as url:
        for path in ("/resume", "/r/resume"):
            assert ask(url, path, method="POST", raw="")[0] == 401


def test_administration_without_a_key_is_for_this_machine():
    from jaxpage.server.limits import KeyCheck

    async def status_for(client) -> int:
        sent = []

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def send(message):
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/pause", "headers": [],
            "client": client and (client, 5),
        }  # fmt: skip
        await KeyCheck(app, keys=(), admin_key=None)(scope, None, send)
        return sent[0]["status"]

    assert asyncio.run(status_for("127.0.0.1")) == asyncio.run(status_for("::1")) == 200
    assert asyncio.run(status_for("10.1.2.3")) == 403


def test_scripts_of_other_origins_ask_only_where_they_may(llm):
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}

    def allowed(url) -> str | None:
        headers = ask(url, "/v1/completions", method="OPTIONS", headers=asked)[1]
        return headers.get("access-control-allow-origin")

    with serving(llm, allowed_origins=("https://a.example",), api_key=("k",)) as url:
        assert allowed(url) == "https://a.example"
        asked["Origin"] = "https://b.example"
        assert allowed(url) is None
    with serving(llm) as url:
        assert allowed(url) is None


def test_pausing_and_aborting_over_http(url, llm):
    connection, response = open_stream(url)
    assert ask(url, "/pause?mode=keep&clear_cache=false", method="POST", raw="")[0] == 200
    assert json.loads(ask(url, "/is_paused")[2]) == {"is_paused": True}
    assert ask(url, "/pause?mode=never", method="POST", raw="")[0] == 400
    assert ask(url, "/reset_prefix_cache", method="POST", raw="")[0] == 409
    assert ask(url, "/resume", method="POST", raw="")[0] == 200
    assert json.loads(ask(url, "/abort_requests", {})[2]) == {"aborted": 1}
    text = response.read()
    assert b'"finish_reason":"abort"' in text and text.endswith(b"data: [DONE]\n\n")
    connection.close()
    wait_until(lambda: is_idle(llm))
    status, _, text = ask(url, "/reset_prefix_cache", method="POST", raw="")
    assert status == 200 and json.loads(text) == {"success": True}


def test_a_stream_aborted_by_its_id(url):
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    headers = {"Content-Type": "application/json", "X-Request-Id": "one"}
    connection.request("POST", "/v1/completions", json.dumps(LONG), headers)
    response = connection.getresponse()
    response.readline()
    assert json.loads(ask(url, "/abort_requests", {"request_ids": ["two"]})[2]) == {"aborted": 0}
    found = ask(url, "/abort_requests", {"request_ids": ["cmpl-one"]})[2]
    assert json.loads(found) == {"aborted": 1}
    assert b'"finish_reason":"abort"' in response.read()
    connection.close()


def test_the_profiler_writes_where_it_was_told(llm, tmp_path):
    with serving(llm, profiler_dir=tmp_path) as url:
        assert ask(url, "/start_profile", method="POST", raw="")[0] == 200
        assert ask(url, "/start_profile", method="POST", raw="")[0] == 409
        ask(url, "/v1/completions", {"prompt": "x", "max_tokens": 2})
        assert ask(url, "/stop_profile", method="POST", raw="")[0] == 200
        assert ask(url, "/stop_profile", method="POST", raw="")[0] == 409
    assert list(tmp_path.rglob("*.xplane.pb"))
    with serving(llm) as url:
        status, _, text = ask(url, "/start_profile", method="POST", raw="")
        assert status == 400 and "--profiler-dir" in error_of(text)["message"]


def test_large_bodies_are_refused_by_their_length_or_as_they_come(llm):
    with serving(llm, max_body_size=1000) as url:
        status, _, text = ask(url, "/v1/completions", {"prompt": "x" * 2000})
        assert status == 413 and "1000 bytes" in error_of(text)["message"]
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
        chunks = (b"x" * 500 for _ in range(10))
        connection.request("POST", "/v1/completions", chunks, encode_chunked=True,
                           headers={"Transfer-Encoding": "chunked"})  # fmt: skip
        assert connection.getresponse().status == 413
        connection.close()
        assert ask(url, "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


def test_a_full_queue_says_when_to_come_back(llm):
    with serving(llm, max_queued_requests=-7) as url:  # of 8 rows one is left
        connection, _ = open_stream(url)
        status, headers, text = ask(url, "/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert status == 503 and headers["retry-after"] == "1"
        assert any(v == 1 for n, v in metrics(url).items() if "admission_rejections_total" in n)
        assert "which is the limit" in error_of(text)["message"]
        connection.close()
        wait_until(lambda: is_idle(llm))
        assert ask(url, "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


def test_a_client_that_does_not_read_is_given_up(llm):
    with serving(llm, write_timeout=0.5) as url:
        parts = urlsplit(url)
        stalled = socket.socket()
        # Before it connects: the system would otherwise take megabytes in the client's place.
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect((parts.hostname, parts.port))
        body = json.dumps(LONG | {"n": 16, "logprobs": 20, "max_tokens": 2000}).encode()
        head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        stalled.sendall(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + body)
        wait_until(lambda: llm.stats().num_running, 30)
        assert ask(url, "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
        wait_until(lambda: is_idle(llm), 60)
        stalled.close()


def test_half_requests_hold_nobody_up(url):
    parts = urlsplit(url)
    halves = [socket.create_connection((parts.hostname, parts.port)) for _ in range(50)]
    for half in halves:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    assert ask(url, "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
    for half in halves:
        half.close()
    flood = {f"X-{i}": "y" * 500 for i in range(99)}
    assert ask(url, "/v1/models", headers=flood)[0] in (200, 400, 431)
    assert ask(url, "/health")[0] == 200


def run_in_thread(llm, **options):
    """(URL, the server, its thread), of a server that may drain."""
    options = ServerOptions(port=0, **options)
    bound = bind(options)
    bound.listen()  # who comes before the server is up waits
    server = make_http(llm, options)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])), daemon=True)
    thread.start()
    return f"http://127.0.0.1:{bound.getsockname()[1]}", server, thread


def test_a_ready_server_has_frozen_its_heap(llm, monkeypatch):
    """Full collections hold up every thread: they must not look through what stays."""
    calls = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    url, server, thread = run_in_thread(Lasting(llm))
    wait_until(lambda: ask(url, "/ready")[0] == 200)
    assert calls == ["freeze"]
    server.drain()
    thread.join(20)
    assert not thread.is_alive()


def test_draining_lets_running_requests_end(llm):
    url, server, thread = run_in_thread(Lasting(llm), shutdown_timeout=60.0)
    connection, response = open_stream(url, LONG | {"max_tokens": 300})
    server.drain()
    wait_until(lambda: ask(url, "/ready")[0] == 503)
    assert ask(url, "/live")[0] == 200
    status, headers, text = ask(url, "/v1/completions", {"prompt": "x"})
    assert status == 503 and "shutting down" in error_of(text)["message"]
    assert headers["retry-after"]
    text = response.read()
    assert b'"finish_reason":"length"' in text and text.endswith(b"data: [DONE]\n\n")
    connection.close()
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("how", ["second signal", "time is over"])
def test_what_does_not_end_in_time_gets_an_error(how):
    from jaxpage.demo import checkpoint

    with few_programs():
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": "64M"}
        llm = AsyncLLM(str(checkpoint()), enforce_eager=True, **sizes)
    timeout = 60.0 if how == "second signal" else 0.2
    url, server, thread = run_in_thread(llm, shutdown_timeout=timeout)
    connection, response = open_stream(url)
    server.drain()
    if how == "second signal":
        wait_until(lambda: ask(url, "/ready")[0] == 503)
        server.drain()
    *_, error, done = [line for line in response.read().split(b"\n\n") if line]
    assert "shut down" in error_of(error.removeprefix(b"data: "))["message"]
    assert done == b"data: [DONE]"
    connection.close()
    thread.join(20)
    assert not thread.is_alive()


def test_a_port_in_use_is_told_before_anything_is_loaded():
    taken = bind(ServerOptions(port=0))
    taken.listen()
    port = taken.getsockname()[1]
    with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}"):
        bind(ServerOptions(port=port))
    taken.close()


def test_flags_from_a_file(tmp_path):
    from jaxpage.server.config_file import with_config_file

    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: folder\nport: 9000\nserved-model-name: [a, b]\ndisable_log_stats: true\n"
        "enable_prefix_caching: false\nhf_overrides: {x: 1}\napi-key:\n"
    )
    flags = [
        "--port", "9000", "--served-model-name", "a", "b", "--disable-log-stats",
        "--no-enable-prefix-caching", "--hf-overrides", '{"x": 1}',
    ]  # fmt: skip
    given = ["--config", str(file), "--port", "1"]
    assert with_config_file(given) == ["folder", *flags, *given]
    assert with_config_file(["other", *given]) == ["other", *flags, *given]
    assert with_config_file(["other"]) == ["other"]
    file.write_text("- a\n")
    with pytest.raises(ValueError, match="must have flags"):
        with_config_file(given)
    with pytest.raises(ValueError, match="cannot be read"):
        with_config_file(["--config", str(Path(tmp_path) / "none")])
