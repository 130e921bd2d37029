"""A server whose engine shares its weights between two devices answers as an engine on one device."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest

from jaxpage import LLM, SamplingParams
from jaxpage.async_llm import AsyncLLM
from jaxpage.demo import checkpoint
from tests import checkpoints
from tests.few_programs import few_programs
from tests.server.conftest import serving
from tests.server.test_completions import joined
from tests.server.test_operation import is_idle, wait_until
from tests.test_chat_outputs import NAMED, TOOLS, WEATHER

pytestmark = pytest.mark.slow  # a server

PROMPTS = ["Once upon a time", "3 + 4 =", "The capital of"]
OPTIONS = {"dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def one() -> LLM:
    options = OPTIONS | {"skip_tokenizer_init": False, "enforce_eager": True}
    return checkpoints.make_llm(checkpoint(), **options)


@pytest.fixture(scope="module")
def two():
    with few_programs():
        llm = AsyncLLM(
            str(checkpoint()),
            tensor_parallel_size=2,
            kv_cache_memory_bytes="16M",
            tool_call_parser="hermes",
            **OPTIONS,
        )
    yield llm
    try:
        wait_until(lambda: is_idle(llm))
        assert llm.stats().num_recompiles == 0
    finally:
        llm.shutdown()


@pytest.fixture(scope="module")
def client(two):
    with (
        serving(two, served_model_name=("demo",)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def texts_of(llm: LLM, **options) -> list[str]:
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=24, **options), use_tqdm=False)
    return [completion.text for output in outputs for completion in output.outputs]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 5, "n": 2}])
def test_streams(client, one, sampling):
    chunks = client.completions.create(
        model="demo", prompt=PROMPTS, max_tokens=24, stream=True, **sampling
    )
    assert [text for _, text in sorted(joined(chunks).items())] == texts_of(one, **sampling)


def test_logprobs(client, one):
    answer = client.completions.create(
        model="demo", prompt=PROMPTS[0], max_tokens=12, temperature=0, logprobs=3
    )
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=3)
    (output,) = one.generate([PROMPTS[0]], params, use_tqdm=False)
    expected = [
        step[token].logprob
        for token, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
    ]
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx(expected, abs=1e-4)


def test_a_schema(client, one):
    wanted = {"json": WEATHER, "disable_any_whitespace": True}
    options = {"temperature": 1.2, "seed": 3, "structured_outputs": wanted}
    answer = client.completions.create(
        model="demo", prompt=PROMPTS, max_tokens=60, temperature=1.2, seed=3,
        extra_body={"structured_outputs": wanted},
    )  # fmt: skip
    outputs = one.generate(PROMPTS, SamplingParams(max_tokens=60, **options), use_tqdm=False)
    assert [c.text for c in answer.choices] == [o.outputs[0].text for o in outputs]
    ended = [c.text for c in answer.choices if c.finish_reason == "stop"]
    assert ended
    for text in ended:
        jsonschema.validate(json.loads(text), WEATHER)


def test_a_named_tool(client):
    answer = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Weather?"}],
        tools=TOOLS, tool_choice=NAMED, temperature=0.9, seed=1, max_tokens=100,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
