"""`jaxpage chat --url` and `jaxpage complete`: a running server in the terminal."""

from __future__ import annotations

import contextlib
import http.server
import io
import re
import socket
import threading

import pytest
from rich.console import Console

from jaxpage import SamplingParams, client
from jaxpage.cli import main
from jaxpage.client import Remote, complete, converse
from tests.server.conftest import serving

pytestmark = pytest.mark.slow  # a server


def test_a_prompt_is_continued(url, llm, capsys):
    assert main(["complete", "--url", url, "--prompt", "Once upon", "--max-tokens", "6",
                 "--temperature", "0"]) == 0  # fmt: skip
    params = SamplingParams(max_tokens=6, temperature=0)
    (expected,) = llm.submit("Once upon", params).result(60).outputs
    assert capsys.readouterr().out == f"Once upon{expected.text}\n"


def test_a_conversation(url):
    lines = iter(["Tell me a story.", "/what", "more", "/reset", "Again."])

    def read() -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    text = io.StringIO()
    remote = Remote(url=url, options={"max_tokens": 8, "temperature": 0})
    turns = converse(remote, Console(file=text), read, system="Be brief.")
    assert [t["role"] for t in turns] == ["system", "user", "assistant"]
    assert turns[1]["content"] == "Again." and turns[2]["content"] in text.getvalue()
    assert "/what is not a command" in text.getvalue()


def test_what_is_wrong_is_said_and_the_conversation_goes_on(url):
    lines = iter(["x " * 3000, "short", "/exit"])
    text = io.StringIO()
    remote = Remote(url=url, options={"max_tokens": 2})
    turns = converse(remote, Console(file=text, width=200), lambda: next(lines))
    assert "maximum context length is 2048" in text.getvalue()
    assert [t["content"] for t in turns if t["role"] == "user"] == ["short"]


def test_keys_and_servers_that_are_not_there(llm):
    with serving(llm, api_key=("secret",)) as url:
        pieces: list[str] = []
        options = {"max_tokens": 2}
        complete(Remote(url=url, api_key="secret", options=options), ("x",), pieces.append)
        assert len(pieces) > 2
        with pytest.raises(ValueError, match="a key is needed"):
            complete(Remote(url=url), ("x",), pieces.append)


@contextlib.contextmanager
def answering(status: int, answer: str):
    """The URL of a server that gives this answer to everything."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer.encode())))
            self.end_headers()
            self.wfile.write(answer.encode())

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def check(remote: Remote) -> None:
    converse(remote, Console(file=io.StringIO()), lambda: "/exit")


@pytest.mark.parametrize(
    ("status", "answer"),
    [(200, "<html>"), (200, "{}"), (200, '{"data": []}'), (200, "[]"), (404, '{"detail": "none"}')],
)
def test_a_server_of_something_else_is_told(status, answer):
    told = f"is not a server of OpenAI's API: /v1/models answers {status}, '{re.escape(answer)}'$"
    with answering(status, answer) as url, pytest.raises(ValueError, match=told):
        check(Remote(url=url))


@pytest.mark.parametrize(
    ("status", "answer", "told"),
    [
        (400, '{"error": {"message": "too long"}}', "too long"),
        (400, '{"error": "too long"}', "too long"),
        (400, '{"message": "too long"}', "URL answers 400: too long"),
        (404, '{"detail": "too long"}', "URL answers 404: too long"),
        (400, '{"error": {"message": null}}', 'URL answers 400: {"error": {"message": null}}'),
        (502, "<html>\n " + "x" * 500, "URL answers 502: <html> " + "x" * 292),
        (503, "", "URL answers 503: nothing"),
    ],
)
def test_what_a_server_says_is_told_in_any_format(status, answer, told):
    with answering(status, answer) as url:
        with pytest.raises(ValueError) as raised:
            complete(Remote(url=f"{url}/v1/", model="m"), ("x",), print)
        assert str(raised.value) == told.replace("URL", url)


def test_a_named_model_needs_no_list_of_models():
    for status in (200, 404, 500):
        with answering(status, "<html>") as url:
            check(Remote(url=url, model="m"))
    for status in (401, 403):
        with answering(status, '{"message": "who?"}') as url, pytest.raises(ValueError) as raised:
            check(Remote(url=url, model="m"))
        assert str(raised.value) == f"{url} answers {status}: who?"


def test_a_server_that_is_silent_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(client, "CHECK_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        for model in ("m", None):
            with pytest.raises(ValueError, match="does not answer: nothing came in 0.2 s$"):
                check(Remote(url=url, model=model))


def test_without_a_server_no_prompt_is_shown():
    pieces: list[str] = []
    with pytest.raises(ValueError, match="does not answer"):
        complete(Remote(url="http://127.0.0.1:9"), ("x",), pieces.append)
    assert pieces == []
