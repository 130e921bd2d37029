"""`jaxpage chat --url` and `jaxpage complete`: a running server in the terminal."""

from __future__ import annotations

import http.server
import io
import threading

import pytest
from rich.console import Console

from jaxpage import SamplingParams
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
    assert "max_model_len is 2048" in text.getvalue()
    assert [t["content"] for t in turns if t["role"] == "user"] == ["short"]


def test_keys_and_servers_that_are_not_there(llm):
    with serving(llm, api_key=("secret",)) as url:
        pieces: list[str] = []
        options = {"max_tokens": 2}
        complete(Remote(url=url, api_key="secret", options=options), ("x",), pieces.append)
        assert len(pieces) > 2
        with pytest.raises(ValueError, match="a key is needed"):
            complete(Remote(url=url), ("x",), pieces.append)


@pytest.mark.parametrize("answer", ["<html>", "{}", '{"data": []}', "[]"])
def test_a_server_of_something_else_is_told(answer):
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        remote = Remote(url=f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(ValueError, match="is not a server of OpenAI's API: it answers 200"):
            converse(remote, Console(file=io.StringIO()), lambda: "/exit")
        server.shutdown()


def test_without_a_server_no_prompt_is_shown():
    pieces: list[str] = []
    with pytest.raises(ValueError, match="does not answer"):
        complete(Remote(url="http://127.0.0.1:9"), ("x",), pieces.append)
    assert pieces == []
