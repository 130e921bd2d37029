"""A server of models that pool: vLLM's shapes, refusals, and calls that are computed together."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import ml_dtypes
import numpy as np
import openai
import pytest

from jaxpage.config import EngineConfig
from jaxpage.pooling.async_pooler import AsyncPooler
from jaxpage.server.options import ServerOptions
from jaxpage.server.pooling import _encoded
from jaxpage.server.protocol.pooling import EmbeddingRequest
from jaxpage.server.run import bind, make_http
from tests.pooling.pooling_checkpoints import OPTIONS, build, write_modules, write_tokenizer

pytestmark = pytest.mark.slow  # a server


@contextlib.contextmanager
def serving(pooler: AsyncPooler, **options) -> Iterator[str]:
    options = ServerOptions(port=0, shutdown_timeout=0.0, **options)
    bound = bind(options)
    bound.listen()
    server = make_http(pooler, options)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    build("Bert", 0, folder, max_position_embeddings=32)
    write_tokenizer(folder)
    write_modules(folder, query="w9 ")
    config = {"hf_overrides": {"is_matryoshka": True}, "max_num_seqs": 16}
    config["chat_template"] = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return AsyncPooler(EngineConfig.from_options(model=str(folder), **(OPTIONS | config)))


@pytest.fixture(scope="module")
def url(embedder):
    with serving(embedder, served_model_name=("bert",), max_queued_requests=4) as url:
        yield url


@pytest.fixture(scope="module")
def ranker_url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranker")
    build("Bert", 0, folder, head="ForSequenceClassification", num_labels=1)
    write_tokenizer(folder)
    pooler = AsyncPooler(EngineConfig.from_options(model=str(folder), **OPTIONS))
    with serving(pooler, served_model_name=("ranker",)) as url:
        yield url


def ask(url: str, path: str, body: dict | None = None):
    """(status, JSON) of one request."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    try:
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, data, headers)
        answer = connection.getresponse()
        text = answer.read()
        is_json = "json" in (answer.getheader("content-type") or "")
        return answer.status, json.loads(text) if is_json else text.decode()
    finally:
        connection.close()


def test_the_official_client_gets_embeddings(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model="bert", input=["w8 w7", "w6"])  # asks for base64
        cut = client.embeddings.create(model="bert", input="w8 w7", dimensions=4)
    assert [d.index for d in found.data] == [0, 1] and found.model == "bert"
    assert found.usage.prompt_tokens == found.usage.total_tokens == 7
    first = np.array(found.data[0].embedding)
    assert first.shape == (32,) and np.linalg.norm(first) == pytest.approx(1)
    short = first[:4] / np.linalg.norm(first[:4])
    np.testing.assert_allclose(cut.data[0].embedding, short, atol=1e-6)


def test_all_forms_of_input_and_encoding_are_the_same_embedding(url):
    forms = ("w8 w7", ["w8 w7"], [2, 8, 7, 3], [[2, 8, 7, 3]])
    found = []
    for form in forms:
        status, answer = ask(url, "/v1/embeddings", {"input": form})
        assert status == 200 and answer["object"] == "list" and answer["id"].startswith("embd-")
        found.append(answer["data"][0]["embedding"])
    status, answer = ask(url, "/v1/embeddings", {"input": "w8 w7", "encoding_format": "base64"})
    found.append(np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4").tolist())
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-6)
    status, answer = ask(url, "/v1/embeddings", {"input": "w7", "prompt_name": "query"})
    assert answer["usage"]["prompt_tokens"] == 4


def test_one_text_is_a_list_of_one_even_if_it_is_empty(url):
    one, same = (ask(url, "/v1/embeddings", {"input": form}) for form in ("", [""]))
    assert one[0] == 200 and one[1]["data"] == same[1]["data"]
    one, same = (ask(url, "/rerank", {"query": "w8", "documents": form}) for form in ("w7", ["w7"]))
    assert one[0] == 200 and one[1]["results"] == same[1]["results"]


def test_scores_and_ranks_of_an_embedding_model_are_cosines(url):
    documents = ["w30 w31", "w8 w7"]
    status, scored = ask(url, "/score", {"text_1": "w8 w7", "text_2": documents})
    assert status == 200
    scores = [d["score"] for d in scored["data"]]
    assert scores[1] == pytest.approx(1) and scores[0] < 1
    status, ranked = ask(url, "/v2/rerank", {"query": "w8 w7", "documents": documents, "top_n": 1})
    assert status == 200 and ranked["id"].startswith("rerank-") and "usage" in ranked
    (best,) = ranked["results"]
    assert best["index"] == 1 and best["document"] == {"text": "w8 w7"}
    assert best["relevance_score"] == pytest.approx(1)


def test_a_cross_encoder_scores_ranks_and_classifies(ranker_url):
    documents = ["w30 w31", "w8 w7", "w9"]
    _, scored = ask(ranker_url, "/v1/score", {"data_1": "w8", "data_2": documents})
    scores = [d["score"] for d in scored["data"]]
    assert [d["object"] for d in scored["data"]] == ["score"] * 3 and len(set(scores)) == 3
    body = {"query": "w8", "documents": [{"text": d} for d in documents]}
    _, ranked = ask(ranker_url, "/rerank", body)
    got = [(r["index"], r["relevance_score"]) for r in ranked["results"]]
    expected = sorted(enumerate(scores), key=lambda pair: -pair[1])
    assert [i for i, _ in got] == [i for i, _ in expected]
    np.testing.assert_allclose([s for _, s in got], [s for _, s in expected], atol=1e-6)
    _, classified = ask(ranker_url, "/classify", {"input": ["w8", "w9"]})
    assert [d["num_classes"] for d in classified["data"]] == [1, 1]
    assert all(0 < d["probs"][0] < 1 for d in classified["data"])
    for wrong in (5, None, [8]):
        status, answer = ask(ranker_url, "/score", {"text_1": "w8", "text_2": ["w9", wrong]})
        assert status == 400 and answer["error"]["message"].endswith(f"got {wrong}")
    status, answer = ask(ranker_url, "/v1/embeddings", {"input": "w8"})
    assert status == 400 and "cannot embed: its tasks are classify" in answer["error"]["message"]


def test_a_pair_is_not_cut_shorter_than_its_special_tokens(ranker_url):
    body = {"text_1": "w8 w7", "text_2": "w9 w8"}
    status, answer = ask(ranker_url, "/score", body | {"truncate_prompt_tokens": 5})
    assert status == 200 and answer["usage"]["prompt_tokens"] == 5
    for length in (1, 2):
        status, answer = ask(ranker_url, "/score", body | {"truncate_prompt_tokens": length})
        message = answer["error"]["message"]
        assert status == 400 and message.startswith(f"truncate_prompt_tokens={length} is too small")
        assert "3 special tokens" in message


def test_queries_and_documents_have_limits_of_their_own(ranker_url, url):
    """As in vLLM, they lose their end, and the answer has whole documents."""
    limits = {"max_tokens_per_query": 2, "max_tokens_per_doc": 3}
    long, short = ("w8 w7 w6", "w9 w8 w7 w6 w5"), ("w8 w7", "w9 w8 w7")
    for server in (ranker_url, url):
        status, _ = ask(
            server, "/rerank", {"query": "w8", "documents": ["w9"]} | dict.fromkeys(limits)
        )
        assert status == 200
        body = {"text_1": long[0], "text_2": long[1]} | limits
        status, cut = ask(server, "/score", body)
        assert status == 200, cut
        _, given = ask(server, "/score", {"text_1": short[0], "text_2": short[1]})
        assert cut["data"] == given["data"] and cut["usage"] == given["usage"]
        _, ranked = ask(server, "/rerank", {"query": long[0], "documents": [long[1]]} | limits)
        (result,) = ranked["results"]
        assert result["document"] == {"text": long[1]}
        assert result["relevance_score"] == given["data"][0]["score"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/score", "/rerank"])
def test_the_side_that_long_texts_lose(url, path):
    texts = {"/v1/embeddings": ("input",), "/score": ("text_1", "text_2")}
    names = texts.get(path, ("query", "documents"))
    found = []
    for text, cut in (
        ("w8 w7 w6 w5", {"truncate_prompt_tokens": 4, "truncation_side": "left"}),
        ("w6 w5", {}),
    ):
        body = dict(zip(names, (text, "w9"), strict=False))
        status, answer = ask(url, path, body | cut)
        assert status == 200, answer
        found.append((answer.get("data") or answer["results"], answer["usage"]))
    assert found[0] == found[1]


def test_raw_numbers_of_texts_and_of_tokens(url):
    _, answer = ask(url, "/pooling", {"input": "w8 w7", "use_activation": False})
    (item,) = answer["data"]
    assert item["object"] == "pooling" and len(item["data"]) == 32
    _, answer = ask(url, "/pooling", {"input": "w8 w7", "task": "token_embed"})
    assert np.array(answer["data"][0]["data"]).shape == (4, 32)


@pytest.mark.parametrize(
    ("path", "body", "status", "complaint"),
    [
        ("/v1/embeddings", {}, 400, "input or messages must be given"),
        ("/v1/embeddings", {"input": []}, 400, "input must not be empty"),
        ("/v1/embeddings", {"messages": []}, 400, "messages"),
        (
            "/v1/embeddings",
            {"input": ["w8", ""] * 2, "dimensions": 64},
            400,
            "exceeds the model's 32",
        ),
        ("/v1/embeddings", {"input": [999]}, 400, "has 999, the vocabulary has ids 0..249"),
        (
            "/v1/embeddings",
            {"input": "w8 " * 40},
            400,
            "length is 32 tokens. However, your prompt contains 42 input",
        ),
        ("/v1/embeddings", {"input": "x" * 10000}, 400, "10000 characters"),
        ("/v1/embeddings", {"input": "w8", "model": "other"}, 404, "'other' is not served"),
        ("/v1/embeddings", {"input": "w8", "encoding_format": "hex"}, 400, "encoding_format"),
        ("/v1/embeddings", {"input": ["w8"] * 50}, 200, ""),
        ("/v1/embeddings", {"input": "w8 " * 40, "truncate_prompt_tokens": -1}, 200, ""),
        ("/score", {"text_1": "w8"}, 400, "a score needs two texts"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, 400, "data_1 has 2 texts"),
        ("/rerank", {"query": "w8", "documents": []}, 400, "documents"),
        ("/classify", {"input": "w8"}, 400, "cannot classify"),
        ("/pooling", {"input": "w8", "task": "reward"}, 400, "call LLM.reward"),
        ("/v1/chat/completions", {"messages": []}, 400, "does not generate text"),
        ("/v1/completions", {"prompt": "w8"}, 400, "does not generate text"),
        ("/v1/messages", {"messages": []}, 400, "does not generate text"),
    ],
)
def test_bad_calls_are_told_why(url, path, body, status, complaint):
    found, answer = ask(url, path, body)
    assert found == status, answer
    if status != 200:
        assert complaint in answer["error"]["message"]
    assert ask(url, "/load")[1] == {"server_load": 0}


@pytest.mark.parametrize(("length", "left"), [(3, 3), (-1, 32)])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_conversations_are_truncated_too(url, path, length, left):
    messages = [{"role": "user", "content": "w8 " * 2000}]
    status, answer = ask(url, path, {"messages": messages, "truncate_prompt_tokens": length})
    assert status == 200 and answer["usage"]["prompt_tokens"] == left
    status, answer = ask(url, path, {"messages": messages})
    assert status == 400 and "6000 characters" in answer["error"]["message"]


def test_what_operators_ask(url, embedder):
    assert ask(url, "/health")[0] == 200
    assert ask(url, "/v1/models")[1]["data"][0]["id"] == "bert"
    assert ask(url, "/tokenize", {"prompt": "w8"})[1]["tokens"] == [2, 8, 3]
    _, text = ask(url, "/metrics")
    tokens = embedder.stats().num_tokens
    assert f'vllm:prompt_tokens_total{{engine="0",model_name="bert"}} {float(tokens)}' in text


def test_calls_that_wait_are_computed_together(embedder):
    async def many() -> list[list]:
        async def one(i: int) -> list:
            work = await embedder.read(lambda pooler: pooler.embed([5 + i, 6]))
            return await embedder.compute(work)

        return await asyncio.gather(*(one(i) for i in range(40)))

    before = embedder.stats()
    outputs = asyncio.run(many())
    after = embedder.stats()
    assert [o.prompt_token_ids for (o,) in outputs] == [[5 + i, 6] for i in range(40)]
    assert after.num_texts - before.num_texts == 40
    assert after.num_launches - before.num_launches < 40


def test_a_call_that_fails_fails_alone_and_those_after_shutdown_are_refused(tmp_path):
    from jaxpage import EngineDeadError

    build("Bert", 0, tmp_path)
    options = OPTIONS | {"skip_tokenizer_init": True}
    pooler = AsyncPooler(EngineConfig.from_options(model=str(tmp_path), **options))

    async def embed(ids: list[int]):
        return await pooler.compute(await pooler.read(lambda p: p.embed(ids)))

    run = pooler._built.engine.run
    pooler._built.engine.run = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        asyncio.run(embed([5]))
    pooler._built.engine.run = run
    assert len(asyncio.run(embed([5]))) == 1
    pooler.shutdown()
    pooler.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        asyncio.run(embed([5]))


def test_calls_that_wait_when_the_engine_is_shut_down_get_an_error(tmp_path):
    build("Bert", 0, tmp_path)
    options = OPTIONS | {"skip_tokenizer_init": True}
    pooler = AsyncPooler(EngineConfig.from_options(model=str(tmp_path), **options))
    begun, may_end, answers = threading.Event(), threading.Event(), {}
    run = pooler._built.engine.run

    def slow(*args, **options):
        begun.set()
        assert may_end.wait(20)
        return run(*args, **options)

    pooler._built.engine.run = slow
    with serving(pooler) as url:

        def embed(number: int) -> None:
            answers[number] = ask(url, "/v1/embeddings", {"input": [5, 6]})

        threads = [threading.Thread(target=embed, args=(i,)) for i in range(3)]
        threads[0].start()
        assert begun.wait(20)
        for thread in threads[1:]:
            thread.start()
        while ask(url, "/load")[1]["server_load"] < 3:
            time.sleep(0.01)
        ending = threading.Thread(target=pooler.shutdown)
        ending.start()
        while not pooler.errored:
            time.sleep(0.01)
        may_end.set()
        for thread in (*threads, ending):
            thread.join(20)
    assert [answers[i][0] for i in range(3)] == [200, 503, 503]
    assert "shut down" in answers[2][1]["error"]["message"]


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("float32", np.dtype(np.float32), 0),
        ("float16", np.dtype(np.float16), 1e-3),
        ("bfloat16", np.dtype(ml_dtypes.bfloat16), 1e-2),
        ("fp8_e4m3", np.dtype(ml_dtypes.float8_e4m3fn), 0.1),
        ("fp8_e5m2", np.dtype(ml_dtypes.float8_e5m2), 0.2),
    ],
)
def test_types_and_byte_orders_of_base64(name, dtype, tolerance):
    numbers = np.linspace(-1, 1, 7, dtype=np.float32)
    for order in ("native", "little", "big"):
        body = EmbeddingRequest(encoding_format="base64", embed_dtype=name, endianness=order)
        data = np.frombuffer(base64.b64decode(_encoded(numbers, body)), f"u{dtype.itemsize}")
        found = (data.byteswap() if order == "big" else data).view(dtype)
        np.testing.assert_allclose(found.astype(np.float32), numbers, atol=tolerance)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/embeddings", {"embed_dtype": "float64"}),
        ("/v1/embeddings", {"endianness": "middle"}),
        ("/v1/embeddings", {"encoding_format": "bytes"}),
        ("/v1/embeddings", {"truncation_side": "middle"}),
        ("/v1/embeddings", {"cache_salt": ""}),
        ("/score", {"max_tokens_per_doc": -1}),
        ("/rerank", {"max_tokens_per_query": 32}),
    ],
)
def test_what_would_be_ignored_is_refused(url, path, field):
    texts = {"input": "w8", "text_1": "w8", "text_2": "w9", "query": "w8", "documents": ["w9"]}
    names = {"/v1/embeddings": ["input"], "/score": ["text_1", "text_2"]}
    body = {name: texts[name] for name in names.get(path, ["query", "documents"])}
    status, answer = ask(url, path, body | field)
    assert status == 400 and next(iter(field)) in json.dumps(answer)
