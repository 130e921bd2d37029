"""What breaks inside: a step, a detokenizer, a grammar that explodes. The request is told, and the server goes on."""

from __future__ import annotations

import json

import pytest

from tests.server.test_operation import ask, error_of, is_idle, wait_until

pytestmark = pytest.mark.slow  # a server

BODY = {"prompt": "Once", "max_tokens": 20, "ignore_eos": True}


def events_of(text: bytes) -> list[dict]:
    lines = [line for line in text.split(b"\n\n") if line]
    assert lines.pop() == b"data: [DONE]"
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


@pytest.fixture
def failing_step(llm, monkeypatch):
    """A function after which the n-th step from now on fails with an exception."""
    runner = llm._tasks.engine.runner
    collect = runner.collect

    def fail(error: Exception, after: int = 0) -> None:
        left = [after]

        def collect_or_fail(launched):
            result = collect(launched)
            left[0] -= 1
            if left[0] == -1:
                raise error
            return result

        monkeypatch.setattr(runner, "collect", collect_or_fail)

    return fail


@pytest.mark.parametrize(
    "error",
    [RuntimeError("RESOURCE_EXHAUSTED: out of memory"), ValueError("secret inside")],
    ids=["memory", "bug"],
)
def test_a_step_that_fails_fails_its_requests(url, llm, failing_step, error):
    failing_step(error)
    status, _, text = ask(url, "/v1/completions", BODY)
    assert status == 500
    assert "its log says why" in error_of(text)["message"]
    failing_step(error, after=2)
    (*_, last) = events_of(ask(url, "/v1/completions", BODY | {"stream": True})[2])
    assert last["error"]["code"] == 500
    assert ask(url, "/health")[0] == 200
    assert ask(url, "/v1/completions", BODY)[0] == 200
    wait_until(lambda: is_idle(llm))


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_others_go_on_where_one_cannot_be_read(url, llm, monkeypatch, error):
    """Whatever is raised behind the border, it is not the client's fault, nor for its eyes."""
    from jaxpage.tokenizer import Detokenizer

    append = Detokenizer.append

    def fail(self, token_id, **kwargs):
        if self.fails:
            raise error("no such character")
        return append(self, token_id, **kwargs)

    monkeypatch.setattr(Detokenizer, "fails", True, raising=False)
    monkeypatch.setattr(Detokenizer, "append", fail)
    status, _, text = ask(url, "/v1/completions", BODY)
    assert status == 500 and error_of(text)["type"] == "InternalServerError"
    assert "character" not in error_of(text)["message"]
    (*_, last) = events_of(ask(url, "/v1/completions", BODY | {"stream": True})[2])
    assert last["error"]["code"] == 500
    monkeypatch.setattr(Detokenizer, "fails", False)
    assert ask(url, "/v1/completions", BODY)[0] == 200
    wait_until(lambda: is_idle(llm))


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "(((a{1,1000}){1,1000}){1,1000})"},
        {"regex": "(" * 5000 + "a" + ")" * 5000},
        {"json": json.loads('{"properties":{"a":' * 200 + "{}" + "}}" * 200)},
        {"grammar": "start: " + "a " * 100_000},
    ],
    ids=["regex bomb", "deep regex", "deep schema", "long grammar"],
)
def test_grammars_that_explode(url, llm, constraint):
    """Refused, or ended with an error, in bounded time; and nobody else notices."""
    body = BODY | {"structured_outputs": constraint}
    status, _, text = ask(url, "/v1/completions", body)
    if status == 200:
        assert json.loads(text)["choices"][0]["finish_reason"] in ("error", "length", "stop")
    else:
        assert status == 400 and error_of(text)["message"]
    assert ask(url, "/v1/completions", BODY)[0] == 200
    wait_until(lambda: is_idle(llm))
