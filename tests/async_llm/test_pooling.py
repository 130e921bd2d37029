"""`AsyncLLM` with a model that pools."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from jaxpage import LLM, AsyncLLM, EngineDeadError, PoolingParams
from tests.pooling.pooling_checkpoints import OPTIONS, build_bert


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def llm(folder):
    llm = AsyncLLM(str(folder), **OPTIONS)
    yield llm
    llm.shutdown()


async def encode(llm: AsyncLLM, *args, **options):
    (output,) = [output async for output in llm.encode(*args, **options)]
    return output


def test_many_at_once_get_what_a_batch_gets(llm, folder):
    texts = [f"w{i} w{i + 1}" for i in range(5, 20)]
    expected = LLM(str(folder), **OPTIONS).encode(texts, use_tqdm=False)

    async def run():
        calls = [encode(llm, text, None, f"r{i}") for i, text in enumerate(texts)]
        return await asyncio.gather(*calls)

    outputs = asyncio.run(run())
    assert [output.request_id for output in outputs] == [f"r{i}" for i in range(len(texts))]
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.prompt_token_ids == wanted.prompt_token_ids
        np.testing.assert_allclose(output.outputs.data, wanted.outputs.data, atol=1e-6, rtol=0)


def test_params_are_cloned():
    params = PoolingParams(task="embed", returned_token_ids=[1])
    clone = params.clone()
    assert clone == params and clone.returned_token_ids is not params.returned_token_ids


def test_params_say_the_task(llm):
    output = asyncio.run(encode(llm, "w8 w7", PoolingParams(task="token_embed")))
    assert output.outputs.data.shape[0] == len(output.prompt_token_ids) == 4


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (["w8", "w7"], None, "one prompt, got 2"),
        (
            " ".join(["w8"] * 40),
            None,
            "length is 32 tokens. However, your prompt contains 42 input",
        ),
        ("w8", PoolingParams(task="classify"), "does not have the task"),
    ],
)
def test_what_cannot_be_answered_is_refused(llm, prompt, params, message):
    with pytest.raises(ValueError, match=message):
        asyncio.run(encode(llm, prompt, params))
    asyncio.run(encode(llm, "w8"))


def test_what_only_generating_models_do_is_refused(llm):
    async def generate():
        async for _ in llm.generate("w8"):
            pass

    for refused in (generate, llm.pause_generation, llm.resume_generation, llm.sleep):
        with pytest.raises(ValueError, match="does not generate text"):
            asyncio.run(refused())
    with pytest.raises(ValueError, match="does not generate text"):
        llm.submit("w8")


def test_the_engine_is_looked_at_as_any_other(llm):
    asyncio.run(llm.wait_until_warm())
    asyncio.run(llm.check_health())
    assert not llm.errored and llm.is_running
    assert asyncio.run(llm.reset_prefix_cache())
    assert llm.stats().num_texts and llm.programs()
    assert llm.get_tokenizer().pad_token_id == 0 and llm.model_config.max_model_len == 32


def test_nothing_is_computed_after_the_end(folder):
    llm = AsyncLLM(str(folder), **OPTIONS)
    llm.shutdown()
    assert llm.errored
    with pytest.raises(EngineDeadError):
        asyncio.run(llm.check_health())
    with pytest.raises(EngineDeadError):
        asyncio.run(encode(llm, "w8"))


@pytest.mark.parametrize("thread", ["inputs", "compute"])
def test_its_own_threads_may_shut_it_down(folder, thread, monkeypatch):
    """The garbage collector may, in any of them."""
    llm = AsyncLLM(str(folder), **OPTIONS)
    pooler = llm._pooler
    if thread == "inputs":
        asyncio.run(pooler.with_inputs(lambda _: pooler.shutdown()))
    else:
        run = pooler._built.engine.run

        def shut_down_and_run(*args, **kwargs):
            pooler.shutdown()
            return run(*args, **kwargs)

        monkeypatch.setattr(pooler._built.engine, "run", shut_down_and_run)
        assert len(asyncio.run(encode(llm, "w8")).outputs.data)
    pooler.shutdown()
    assert pooler.errored and not pooler._thread.is_alive()
