"""A server with a trainer outside its process: sleep, other weights, and the calls of TRL's client."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from jaxpage import SamplingParams, tiny
from jaxpage.async_llm import AsyncLLM
from tests.few_programs import few_programs
from tests.server.conftest import serving
from tests.server.test_operation import ask, error_of

pytestmark = pytest.mark.slow  # a server

TEXTS = ["The train was late", "Water boils", "He thought about it"]
CALLS = [
    ("/sleep", None), ("/wake_up", None), ("/update_weights", {"model_path": "x"}),
    ("/generate/", {"prompts": ["a"]}), ("/chat/", {"messages": [[]]}),
    ("/get_sequence_logprobs/", {"sequences": [[5, 6]], "prompt_lengths": [1]}),
    ("/init_communicator/", {}), ("/update_named_param/", {}), ("/close_communicator/", {}),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.build(tmp_path_factory.mktemp("rl") / "model")


@pytest.fixture(scope="module")
def llm(folder):
    with few_programs():
        llm = AsyncLLM(
            str(folder),
            dtype="float32",
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=256,
            kv_cache_memory_bytes="2M",
        )
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def url(llm):
    with serving(llm, enable_rl=True, max_n=180) as url:
        yield url


def post(url, path, body=None):
    status, _, text = ask(url, path, body, method="POST")
    assert status == 200, text
    return json.loads(text) if text else None


def get(url, path):
    status, _, text = ask(url, path)
    assert status == 200, text
    return json.loads(text)


def test_operation_ids_of_the_schema_are_unique(url):
    paths = get(url, "/openapi.json")["paths"]
    ids = [operation["operationId"] for path in paths.values() for operation in path.values()]
    assert len(ids) == len(set(ids))
    assert set(paths["/ping"]) == {"get", "post"}


def greedy(url):
    """Of one prompt. Several would be batched differently each time, which may change the last bits of logprobs."""
    return post(url, "/generate/", {"prompts": TEXTS[:1], "temperature": 0, "max_tokens": 8})


def test_only_if_it_is_asked_for(llm):
    with serving(llm) as url:
        for path, body in CALLS:
            assert ask(url, path, body, method="POST")[0] == 404, path


def test_only_for_an_administrator(llm):
    with serving(llm, enable_rl=True, api_key=("key",), admin_api_key="admin") as url:
        for path, body in CALLS:
            headers = {"Authorization": "Bearer key"}
            assert ask(url, path, body, method="POST", headers=headers)[0] == 401, path
        admin = {"Authorization": "Bearer admin"}
        assert ask(url, "/weight_version", headers=admin)[0] == 200


def test_weights_come_from_a_checkpoint(url, folder, tmp_path):
    before, version = greedy(url), get(url, "/weight_version")["weight_version"]
    other = tiny.write_checkpoint(tmp_path / "other", tiny.TINY_CONFIG, seed=1)
    answer = post(url, "/update_weights", {"model_path": str(other)})
    assert answer == {"weight_version": version + 1} == get(url, "/weight_version")
    after = greedy(url)
    assert after["prompt_ids"] == before["prompt_ids"]
    assert after["completion_ids"] != before["completion_ids"]
    tokens = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3, "ignore_eos": True}}
    choice = post(url, "/inference/v1/generate", tokens)["choices"][0]
    assert choice["weight_versions"] == [[version + 1, 0, 3]]
    status, _, text = ask(url, "/update_weights", {"model_path": str(tmp_path / "none")})
    assert status == 400 and "none" in error_of(text)["message"]
    status, _, text = ask(url, "/update_weights", {"model_path": "x" * 5000})
    assert status == 400 and error_of(text)["param"] == "model_path"
    post(url, "/update_weights", {"model_path": str(folder)})
    assert greedy(url) == before


def test_sleep(url):
    before = greedy(url)
    assert get(url, "/is_sleeping") == {"is_sleeping": False}
    post(url, "/sleep?level=1&mode=wait")
    assert get(url, "/is_sleeping") == {"is_sleeping": True}
    status, _, text = ask(url, "/resume", method="POST")
    assert status == 409 and error_of(text)["message"].startswith("the engine is asleep")
    post(url, "/wake_up?tags=weights&tags=kv_cache")
    assert get(url, "/is_paused") == {"is_paused": False}
    assert greedy(url) == before
    assert ask(url, "/sleep?level=7", method="POST")[0] == 400
    assert ask(url, "/wake_up?tags=all", method="POST")[0] == 400


def test_many_prompts_and_what_was_sampled(url, llm):
    body = {"prompts": TEXTS, "n": 60, "max_tokens": 5, "generation_kwargs": {"seed": 3}}
    answer = post(url, "/generate/", body | {"temperature": 1.3, "top_k": 0, "logprobs": 2})
    assert len(answer["prompt_ids"]) == 3 and len(answer["completion_ids"]) == 180
    for ids, found, logprobs in zip(
        answer["completion_ids"], answer["logprob_token_ids"], answer["logprobs"], strict=True
    ):
        assert 0 < len(ids) <= 5 and len(ids) == len(found) == len(logprobs)
        for token, tokens, values in zip(ids, found, logprobs, strict=True):
            assert token in tokens and len(tokens) in (2, 3)
            assert values == sorted(values, reverse=True)
    params = SamplingParams(n=60, max_tokens=5, seed=3, temperature=1.3)
    outputs = [llm.submit(text, params).result() for text in TEXTS]
    expected = [list(c.token_ids) for output in outputs for c in output.outputs]
    assert answer["completion_ids"] == expected


def test_ids_regular_expressions_and_no_logprobs(url):
    regex = {"structured_outputs_regex": "[0-9]{3}", "max_tokens": 8, "logprobs": None}
    texts = [[5, 6, 7], [8, 9]]
    answer = post(url, "/generate/", {"prompts": texts} | regex)
    assert answer["prompt_ids"] == texts
    assert answer["logprobs"] is None and answer["logprob_token_ids"] is None
    for ids in answer["completion_ids"]:
        assert post(url, "/detokenize", {"tokens": ids[:-1]})["prompt"].isdigit()


def test_conversations(url):
    messages = [[{"role": "user", "content": text}] for text in TEXTS]
    answer = post(url, "/chat/", {"messages": messages, "n": 2, "max_tokens": 4})
    assert len(answer["prompt_ids"]) == 3 and len(answer["completion_ids"]) == 6
    for row, conversation in enumerate(messages):
        tokens = post(url, "/tokenize", {"messages": conversation})["tokens"]
        assert answer["prompt_ids"][row] == tokens


@pytest.mark.parametrize("top", [0, 3])
def test_sequences_are_scored(url, top):
    sequences, lengths = [list(range(5, 25)), [9, 8, 7], [4, 5, 6]], [12, 0, 3]
    body = {"sequences": sequences, "prompt_lengths": lengths, "top_logprobs": top}
    whole = {"token_ids": sequences[0], "sampling_params": {"prompt_logprobs": 20, "max_tokens": 1}}
    expected = post(url, "/inference/v1/generate", whole)["prompt_logprobs"][12:]
    found = post(url, "/get_sequence_logprobs/", body)
    assert [len(row) for row in found["logprobs"]] == [8, 3, 0]
    assert found["logprobs"][1][0] == []  # the first token follows nothing
    for i, token in enumerate(sequences[0][12:]):
        entries = dict(zip(found["logprob_token_ids"][0][i], found["logprobs"][0][i], strict=True))
        best = [int(t) for t, e in expected[i].items() if e["rank"] <= top]
        assert set(entries) == {*best, token}
        for each, value in entries.items():
            assert value == pytest.approx(expected[i][str(each)]["logprob"], abs=1e-4)
    binary = post(url, "/get_sequence_logprobs/", body | {"response_format": "binary"})
    assert binary["shape"] == [3, 8, top] and binary["completion_lengths"] == [8, 3, 0]
    own = _array(binary["actual_logprobs_b64"], np.float32).reshape(3, 8)
    ids = _array(binary["actual_token_ids_b64"], np.int32).reshape(3, 8)
    assert ids[0].tolist() == sequences[0][12:] and ids[1, :3].tolist() == sequences[1]
    for i, token in enumerate(sequences[0][12:]):
        assert own[0, i] == pytest.approx(expected[i][str(token)]["logprob"], abs=1e-4)
    assert np.isneginf(own[1, [0, 3]]).all() and np.isneginf(own[2]).all()
    values = _array(binary["logprobs_b64"], np.float32).reshape(3, 8, top)
    assert (np.diff(values[0], axis=-1) <= 0).all()


def _array(text, dtype):
    return np.frombuffer(base64.b64decode(text), dtype)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/generate/", {"prompts": []}, "prompts"),
        ("/generate/", {"prompts": ["a"], "n": 0}, "n"),
        ("/generate/", {"prompts": ["a"], "n": 181}, "the limit is 180 (--max-n)"),
        ("/generate/", {"prompts": ["a"], "temperature": -1}, "temperature"),
        ("/generate/", {"prompts": ["a"], "generation_kwargs": {"colour": 1}}, "colour"),
        ("/generate/", {"prompts": ["a"], "images": []}, "0 images for 1 prompts"),
        ("/generate/", {"prompts": ["a"], "images": [["?"]]}, "base64"),
        ("/generate/", {"prompts": ["a", "b " * 3000]}, "3001 input tokens"),
        ("/chat/", {"messages": []}, "messages"),
        ("/chat/", {"messages": [[{"role": "user", "content": "a"}]] * 91, "n": 2}, "are 182"),
        ("/get_sequence_logprobs/", {"sequences": [[5]], "prompt_lengths": []}, "0 numbers for 1"),
        ("/get_sequence_logprobs/", {"sequences": [[5]], "prompt_lengths": [2]}, "is 2, of 1"),
        (
            "/get_sequence_logprobs/",
            {"sequences": [[5, 6]] * 181, "prompt_lengths": [1] * 181},
            "the limit is 180 (--max-n)",
        ),
        (
            "/get_sequence_logprobs/",
            {"sequences": [[5, 6]], "prompt_lengths": [1], "temperature": 2},
            "temperature=2.0",
        ),
        (
            "/get_sequence_logprobs/",
            {"sequences": [[5, 6]], "prompt_lengths": [1], "top_logprobs": 100},
            "max_logprobs",
        ),
        ("/update_weights", {"model_path": ""}, "model_path"),
    ],
)
def test_bad_calls(url, path, body, message):
    status, _, text = ask(url, path, body)
    assert status == 400 and message in error_of(text)["message"]


def test_nccl_is_refused_and_told_what_to_do(url):
    assert get(url, "/get_world_size/") == {"world_size": 1}
    for path in ("/init_communicator/", "/update_named_param/"):
        status, _, text = ask(url, path, {"name": "x", "dtype": "torch.float32", "shape": [1]})
        assert status == 501 and "/update_weights" in error_of(text)["message"]
    assert post(url, "/close_communicator/")
    status, _, text = ask(url, "/server_info?config_format=json")
    assert status == 501 and "/update_weights" in error_of(text)["message"]


def test_what_trls_newer_client_asks(url):
    """The bodies that `trl.generation.vllm_client` 1.16 sends, and what it reads of the answers."""
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    drawn = {
        "n": 2,
        "repetition_penalty": 1.0,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
    }
    body = {"prompt": TEXTS, "max_tokens": 5, "logprobs": 1} | ids | drawn
    choices = post(url, "/v1/completions", body)["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    for choice in choices:
        assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"])
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
        assert all(len(top) >= 1 for top in choice["logprobs"]["top_logprobs"])
    prompts = [choice["prompt_token_ids"] for choice in choices[::2]]

    scored = [
        prompt + choice["token_ids"] for prompt, choice in zip(prompts, choices[::2], strict=True)
    ]
    body = {"prompt": scored, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 3}
    for choice, sequence in zip(post(url, "/v1/completions", body)["choices"], scored, strict=True):
        found = choice["prompt_logprobs"]
        assert len(found) == len(sequence) and found[0] is None
        for token_id, entry in zip(sequence[1:], found[1:], strict=True):
            assert entry[str(token_id)]["logprob"] <= 0
            assert {value["rank"] for value in entry.values()} >= {1, 2, 3}

    message = {"role": "user", "content": TEXTS[0]}
    body = (
        {"messages": [message], "max_tokens": 4, "logprobs": True, "top_logprobs": 0} | ids | drawn
    )
    answer = post(url, "/v1/chat/completions", body)
    assert answer["prompt_token_ids"] and len(answer["choices"]) == 2
    for choice in answer["choices"]:
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert tokens == [f"token_id:{i}" for i in choice["token_ids"]]
