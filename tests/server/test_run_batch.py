"""Batch files: what lines come to, and that a run which was cut off is continued. A fake answers."""

from __future__ import annotations

import asyncio
import collections
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from jaxpage import LLM, EngineDeadError, cli
from jaxpage.server import run_batch as module
from jaxpage.server.run_batch import Results, main, run_batch
from tests.pooling.pooling_checkpoints import OPTIONS, build_bert

CHAT = "/v1/chat/completions"


def line(custom_id, url=CHAT, **body) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


class Batch:
    """An input, its output, and what an answerer was asked."""

    def __init__(self, folder):
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        self.asked = []

    def write(self, *lines, end="\n") -> None:
        self.source.write_bytes((end.join(lines) + end).encode())

    async def answer(self, url, body):
        """`sleep` seconds later, the `status` and the `text` that the request wants."""
        self.asked.append(body.get("text"))
        await asyncio.sleep(body.get("sleep", 0))
        if body.get("raises"):
            raise RuntimeError("the engine is dead")
        return body.get("status", 200), {"url": url, "text": body.get("text")}

    def run(self, **options):
        return asyncio.run(run_batch(self.source, self.target, self.answer, **options))

    @property
    def results(self) -> list[dict]:
        data = self.target.read_bytes()
        assert data == b"" or data.endswith(b"\n")
        return [json.loads(x) for x in data.split(b"\n")[:-1]]

    @property
    def texts(self) -> dict[str, str]:
        found = {r["custom_id"]: r["response"]["body"]["text"] for r in self.results}
        assert len(found) == len(self.results)
        return found


@pytest.fixture
def batch(tmp_path):
    return Batch(tmp_path)


def test_results_are_openais(batch):
    batch.write(line("a", text="x"), line("b", "/v1/completions", text="y", status=400))
    summary = batch.run()
    first, second = batch.results
    assert list(first) == ["id", "custom_id", "response", "error"] and first["custom_id"] == "a"
    assert list(first["response"]) == ["status_code", "request_id", "body"]
    assert first["response"]["status_code"] == 200 and first["error"] is None
    assert first["response"]["body"] == {"url": CHAT, "text": "x"}
    assert second["response"]["status_code"] == 400 and second["error"] is None
    ids = {r["id"] for r in batch.results} | {r["response"]["request_id"] for r in batch.results}
    assert len(ids) == 4
    assert (summary.answered, summary.refused, summary.unreadable, summary.skipped) == (1, 1, 0, 0)
    assert re.match(
        r"1 requests answered, 1 refused, 0 lines that are no request, in ", str(summary)
    )


def test_results_come_in_order_of_completion(batch):
    batch.write(line("slow", sleep=0.2, text="1"), line("quick", text="2"))
    batch.run()
    assert list(batch.texts) == ["quick", "slow"]


@pytest.mark.parametrize(
    ("bad", "custom_id", "code"),
    [
        ("{", None, "invalid_json_line"),
        ('{"custom_id": "x"} trailing', None, "invalid_json_line"),
        ("[" * 100_000, None, "invalid_json_line"),
        ("[]", None, "missing_required_parameter"),
        ("null", None, "missing_required_parameter"),
        ('{"custom_id": 7, "method": "POST"}', None, "missing_required_parameter"),
        (line("x").replace("POST", "GET"), "x", "invalid_method"),
        ('{"custom_id": "x", "method": "POST"}', "x", "invalid_url"),
        (line("x", "/v1/audio/speech"), "x", "invalid_url"),
        (line("x", ["/v1/completions"]), "x", "invalid_url"),
        (line("x", stream=True), "x", "invalid_request"),
        (line("x").replace("{}", "[]"), "x", "invalid_request"),
        (line("a"), "a", "duplicate_custom_id"),
    ],
)
def test_a_bad_line_becomes_an_error_with_its_number(batch, bad, custom_id, code):
    batch.write(line("a"), "", bad, line("b"))
    for _ in range(2):  # and is told once
        batch.run()
        errors = [r for r in batch.results if r["error"] is not None]
        (error,) = errors
        assert error["custom_id"] == custom_id and error["response"] is None
        assert error["error"]["code"] == code and error["error"]["line"] == 3
        assert error["error"]["message"].startswith("line 3: ")
        assert {r["custom_id"] for r in batch.results if r["error"] is None} == {"a", "b"}
    assert len(batch.asked) == 2


def test_bytes_that_are_no_utf8_are_a_bad_line(batch):
    batch.source.write_bytes(b'{"custom_id": "\xff"}\n' + line("a").encode())
    assert batch.run().unreadable == 1
    assert "utf-8" in batch.results[0]["error"]["message"]


def test_blank_lines_windows_line_ends_and_byte_order_marks(batch):
    batch.write("\ufeff" + line("a", text="1"), "", "  \t ", line("b", text="2"), end="\r\n")
    summary = batch.run()
    assert batch.texts == {"a": "1", "b": "2"} and summary.unreadable == 0


def test_a_last_line_without_an_end(batch):
    batch.source.write_text(line("a", text="1") + "\n" + line("b", text="2"))
    batch.run()
    assert batch.texts == {"a": "1", "b": "2"}


def test_unicode_stays_readable_and_lone_surrogates_survive(batch):
    texts = {"é": "中\u2028\x00🙂", "b": "\ud83d", "\udc00": "c"}
    batch.write(*(line(name, text=text) for name, text in texts.items()))
    batch.run()
    assert batch.texts == texts
    assert "中".encode() in batch.target.read_bytes()
    assert batch.run().skipped == 3


def test_what_has_a_result_is_not_computed_again(batch):
    batch.write(line("a", text="1"), line("b", text="2", status=500))
    batch.run()
    before = batch.target.read_bytes()
    batch.write(line("b", text="2"), line("c", text="3"), line("a", text="1"))
    summary = batch.run()
    assert batch.asked == ["1", "2", "3"] and summary.skipped == 2 and summary.answered == 1
    assert batch.target.read_bytes().startswith(before)
    assert str(summary).endswith("; 2 had results already")


def test_a_line_that_was_mended_is_run(batch):
    batch.write(line("a", "/v1/wrong"), "{")
    batch.run()
    batch.write(line("a", text="1"), line("b", text="2"))
    assert batch.run().answered == 2
    assert len(batch.results) == 4


def test_a_torn_last_line_is_cut_off_wherever_it_was_torn(batch):
    batch.write(line("a", text="1"), line("é", text="中"))
    batch.run()
    whole = batch.target.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first, len(whole)):
        batch.target.write_bytes(whole[:size])
        batch.asked.clear()
        batch.run()
        assert batch.asked == ["中"] and batch.texts == {"a": "1", "é": "中"}


def test_files_that_are_something_else_are_left_alone(batch):
    batch.write(line("a"))
    for data in (
        b"important",
        b"important\n",
        b'{"id": "x"}\n',
        b"{}\n" * 3,
        b'{"id": "batch_req_',
        b"\n",
    ):
        batch.target.write_bytes(data)
        if data == b'{"id": "batch_req_':  # ours, torn
            continue
        with pytest.raises(ValueError, match="line 1 is no result of a batch"):
            batch.run()
        assert batch.target.read_bytes() == data
    with pytest.raises(ValueError, match="is the input"):
        asyncio.run(run_batch(batch.source, batch.source, batch.answer))
    with pytest.raises(ValueError, match="there is no file"):
        asyncio.run(run_batch(batch.source / "x", batch.target, batch.answer))
    with pytest.raises(ValueError, match="cannot write to"):
        asyncio.run(run_batch(batch.source, batch.source / "x", batch.answer))
    assert batch.asked == []


def test_what_is_not_a_regular_file_is_named_as_what_it_is(batch, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    zero, pipe = Path("/dev/zero"), tmp_path / "pipe"
    for path, kind in ((zero, "a character device"), (tmp_path, "a folder"), (pipe, "a pipe")):
        batch.write(line("a"))
        with pytest.raises(ValueError, match=f"{path} is {kind}; name a regular file for the res"):
            Results(path, batch.source)
        with pytest.raises(ValueError, match=f"{path} is {kind}; name a regular file with the req"):
            Results(batch.target, path)
    assert not batch.target.exists()


def test_two_runs_do_not_write_to_one_file(batch):
    batch.write(line("a"))
    with batch.target.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is writing"):
            batch.run()
    assert batch.run().answered == 1


def test_no_more_than_so_many_requests_are_in_flight_and_lines_are_read_late(batch):
    """The file grows while it is read, so it is not read at once."""
    batch.write(*(line(str(i), text=str(i)) for i in range(20)))
    running, most = 0, 0

    async def answer(url, body):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        if body["text"] == "0":
            with batch.source.open("a") as file:
                file.write(line("late", text="late") + "\n")
        return 200, body

    asyncio.run(run_batch(batch.source, batch.target, answer, max_concurrency=4))
    assert most == 4 and len(batch.texts) == 21 and "late" in batch.texts
    with pytest.raises(ValueError, match="max_concurrency"):
        batch.run(max_concurrency=0)


def test_what_the_answerer_raises_ends_the_run_and_the_next_one_continues(batch):
    lines = [line(str(i), text=str(i)) for i in range(6)]
    batch.write(*lines[:3], line("3", text="3", raises=True), *lines[4:])
    with pytest.raises(RuntimeError, match="the engine is dead"):
        batch.run(max_concurrency=1)
    assert list(batch.texts) == ["0", "1", "2"]
    batch.write(*lines)
    assert batch.run().skipped == 3
    assert list(batch.texts) == list("012345")


def test_a_full_disk_leaves_no_half_lines(batch, monkeypatch):
    batch.write(*(line(str(i), text=str(i)) for i in range(3)))
    results = Results.write

    def write(self, done, status, body):
        if done.custom_id == "1":
            file = self._file

            class Full:
                def write(self, data):
                    file.write(data[:20])
                    raise OSError(28, "No space left on device")

                truncate, close = file.truncate, file.close

            self._file = Full()
        results(self, done, status, body)

    monkeypatch.setattr(Results, "write", write)
    kept = r"out.jsonl: No space left on device; the \d+ bytes of complete results stay"
    with pytest.raises(ValueError, match=kept):
        batch.run()
    assert list(batch.texts) == ["0"]


SLOW = """
import asyncio, sys, time
from pathlib import Path
from jaxpage.server.run_batch import run_batch

async def answer(url, body):
    await asyncio.sleep(0.002 * (body["number"] % 7))
    with open(sys.argv[3], "a") as asked:
        asked.write(f"{body['number']}\\n")
    return 200, {"text": "é" * 3000, "number": body["number"]}

print(asyncio.run(run_batch(Path(sys.argv[1]), Path(sys.argv[2]), answer, max_concurrency=8)))
"""


@pytest.mark.slow
def test_kill_9_in_the_middle_loses_nothing_and_repeats_little(batch, tmp_path):
    number, log = 400, tmp_path / "asked"
    batch.write(*(line(f"id {i}", number=i) for i in range(number)))
    command = [sys.executable, "-c", SLOW, str(batch.source), str(batch.target), str(log)]
    kills = 0
    for size in (20_000, 300_000, 900_000):  # bytes of the output
        process = subprocess.Popen(command, cwd=os.getcwd())
        deadline = time.monotonic() + 60
        while not batch.target.exists() or batch.target.stat().st_size < size:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        kills += 1
    last = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.search(r"; [1-9]\d* had results already", last.stdout)
    done = collections.Counter(r["custom_id"] for r in batch.results)
    assert done == {f"id {i}": 1 for i in range(number)}
    asked = collections.Counter(log.read_text().split())
    assert len(asked) == number and sum(asked.values()) <= number + 8 * kills


def test_the_command_makes_an_engine_and_asks_it(batch, monkeypatch, capsys):
    batch.write(line("a", text="x"))
    made = []

    class StubLLM:
        def __init__(self, **options):
            made.append(options)

        def shutdown(self):
            made.append("shut down")

    class InProcess:
        @staticmethod
        def answerer(llm, model_names):
            assert isinstance(llm, StubLLM)
            made.append(model_names)
            return batch.answer

    monkeypatch.setattr("jaxpage.async_llm.AsyncLLM", StubLLM)
    monkeypatch.setitem(sys.modules, "jaxpage.server.in_process", InProcess)
    command = ["run-batch", "-i", str(batch.source), "-o", str(batch.target)]
    flags = ["--model", "m", "--max-model-len", "8k", "--served-model-name", "a", "b"]
    assert cli.main([*command, *flags]) == 0
    assert made == [{"model": "m", "max_model_len": "8k"}, ("a", "b"), "shut down"]
    assert batch.texts == {"a": "x"} and "1 requests answered" in capsys.readouterr().out

    made.clear()
    batch.target.write_text("something else\n")
    assert cli.main([*command, "--model", "m"]) == 2 and made == []
    assert "is no result of a batch" in capsys.readouterr().err


@pytest.mark.slow
def test_a_batch_for_a_pooling_model(batch, tmp_path):
    folder = build_bert(tmp_path / "bert")
    batch.write(
        line("vector", "/v1/embeddings", model="bert", input="w10 w11"),
        line("scores", "/v1/score", queries="w10", documents=["w10", "w12"]),
        line("ranks", "/rerank", query="w10", documents=["w12", "w10"], top_n=1),
        line("no input", "/v1/embeddings"),
        line("text", CHAT, messages=[{"role": "user", "content": "w10"}]),
        line("class", "/classify", input="w10"),
    )
    main(batch.source, batch.target, {"model": str(folder)} | OPTIONS, 2, ("bert",))
    found = {r["custom_id"]: r["response"] for r in batch.results}
    status = {name: response["status_code"] for name, response in found.items()}
    assert [status.pop(name) for name in ("vector", "scores", "ranks")] == [200] * 3
    assert status == {"no input": 400, "text": 400, "class": 400}
    llm = LLM(str(folder), **OPTIONS)
    vector = found["vector"]["body"]["data"][0]["embedding"]
    assert vector == pytest.approx(llm.embed("w10 w11", use_tqdm=False)[0].outputs.embedding)
    scores = [entry["score"] for entry in found["scores"]["body"]["data"]]
    expected = llm.score("w10", ["w10", "w12"], use_tqdm=False)
    assert scores == pytest.approx([output.outputs.score for output in expected])
    assert found["ranks"]["body"]["results"][0]["index"] == 1
    assert "input or messages" in found["no input"]["body"]["error"]["message"]
    assert "does not generate text" in found["text"]["body"]["error"]["message"]


def test_failures_of_a_pooling_model_are_answers_until_its_engine_is_dead(monkeypatch):
    from jaxpage.server import in_process

    state = {"answers": True, "is_dead": False}

    async def app(scope, receive, send):
        if state["answers"]:
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b'{"error": 1}'})
        raise RuntimeError("no device")

    class Llm:
        async def check_health(self):
            if state["is_dead"]:
                raise EngineDeadError("shut down")

    monkeypatch.setattr(in_process, "make_pooling_app", lambda *_: (app, None))
    answer = in_process.pooling_answerer(Llm())
    assert asyncio.run(answer("/pooling", {})) == (500, {"error": 1})
    state["answers"] = False
    with pytest.raises(RuntimeError, match="no device"):
        asyncio.run(answer("/pooling", {}))
    state |= {"answers": True, "is_dead": True}
    with pytest.raises(EngineDeadError):
        asyncio.run(answer("/pooling", {}))


@pytest.fixture
def no_engine(monkeypatch):
    """Fails if one is made."""
    engine = MagicMock(side_effect=AssertionError("an engine was made"))
    monkeypatch.setattr("jaxpage.async_llm.AsyncLLM", engine)


def test_the_command_checks_the_concurrency_first(batch, no_engine, capsys):
    batch.write(line("a"))
    command = ["run-batch", "-i", str(batch.source), "-o", str(batch.target), "--model", "m"]
    assert cli.main([*command, "--max-concurrency", "0"]) == 2
    assert "max_concurrency must be at least 1, got 0" in capsys.readouterr().err
    assert not batch.target.exists()


def test_a_file_without_any_request_fails_without_an_engine(batch, no_engine, capsys):
    batch.write("root:x:0:0", "", '{"custom_id": "a"}')
    for num_new in (2, 0):  # the second time they are told already
        with pytest.raises(SystemExit) as stopped:
            main(batch.source, batch.target, {"model": "m"}, 256)
        assert re.search(r"no line of .*in.jsonl is a request; .*out.jsonl has", stopped.value.code)
        assert f"{num_new} lines that are no request" in capsys.readouterr().out
        assert [r["error"]["line"] for r in batch.results] == [1, 3]
    command = ["run-batch", "-i", str(batch.source), "-o", str(batch.target), "--model", "m"]
    finished = subprocess.run(
        [sys.executable, "-m", "jaxpage", *command], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 1 and finished.stderr.startswith("jaxpage: no line of ")


@pytest.mark.parametrize("lines", [["bad", line("a")], [""]])
def test_a_file_with_a_request_or_without_lines_does_not_fail(batch, lines, monkeypatch):
    batch.write(*lines)
    monkeypatch.setattr("jaxpage.async_llm.AsyncLLM", MagicMock())
    monkeypatch.setattr("jaxpage.server.in_process.answerer", lambda llm, names: batch.answer)
    main(batch.source, batch.target, {"model": "m"}, 256)
    assert len(batch.results) == (0 if lines == [""] else 2)


def test_ctrl_c_says_how_to_go_on(batch, monkeypatch, capsys):
    batch.write(line("a"))
    monkeypatch.setattr("jaxpage.async_llm.AsyncLLM", MagicMock())
    monkeypatch.setitem(sys.modules, "jaxpage.server.in_process", MagicMock())

    async def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_batch", interrupted)
    command = ["run-batch", "-i", str(batch.source), "-o", str(batch.target), "--model", "m"]
    assert cli.main(command) == 130
    assert "the same command continues" in capsys.readouterr().err
