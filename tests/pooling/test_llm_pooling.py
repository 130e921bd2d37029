"""`LLM` with models that pool: texts, limits, and what each kind of model refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxpage import LLM, PoolingParams, SamplingParams
from tests.aot.recurrent import MODELS as RECURRENT
from tests.pooling.pooling_checkpoints import OPTIONS, build_bert


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), **OPTIONS)


def embedding(llm, text, **options) -> np.ndarray:
    (output,) = llm.embed(text, use_tqdm=False, **options)
    return np.array(output.outputs.embedding)


def test_texts_get_special_tokens_and_neighbours_change_nothing(llm):
    alone, among = llm.embed("w8 w7", use_tqdm=False), llm.embed(["w6", "w8 w7", "w5 w6 w7"])
    assert alone[0].prompt_token_ids == [2, 8, 7, 3] == among[1].prompt_token_ids
    np.testing.assert_allclose(
        alone[0].outputs.embedding, among[1].outputs.embedding, atol=1e-6, rtol=0
    )
    assert np.linalg.norm(alone[0].outputs.embedding) == pytest.approx(1.0)


def test_a_prompt_of_the_folder_goes_before_the_text(llm):
    np.testing.assert_array_equal(
        embedding(llm, "w8", prompt_name="query"), embedding(llm, "w9 w8")
    )
    with pytest.raises(ValueError, match="there are: 'query'"):
        llm.embed("w8", prompt_name="passage")


def test_long_texts_are_refused_or_truncated_between_their_special_tokens(llm):
    text = " ".join(["w8"] * 40)
    with pytest.raises(
        ValueError, match="length is 32 tokens. However, your prompt contains 42 input"
    ):
        llm.embed(text)
    for options in (
        {"tokenization_kwargs": {"truncate_prompt_tokens": -1}},
        {"pooling_params": PoolingParams(truncate_prompt_tokens=32)},
    ):
        (output,) = llm.embed(text, use_tqdm=False, **options)
        ids = output.prompt_token_ids
        assert len(ids) == 32 and ids[0] == 2 and ids[-1] == 3


def test_a_model_that_pools_does_not_generate(llm):
    calls = (
        lambda: llm.generate("w8"),
        lambda: llm.chat([{"role": "user", "content": "w8"}]),
        lambda: llm.add_request("a", "w8", SamplingParams()),
        llm.get_default_sampling_params,
    )
    for call in calls:
        with pytest.raises(ValueError, match="BertModel does not generate text: its tasks are"):
            call()
    assert llm.step() == [] and not llm.has_unfinished_requests()


def test_counts_and_programs(llm):
    before = llm.stats()
    llm.embed([[5, 6], [7]], use_tqdm=False)
    after = llm.stats()
    assert (after.num_texts - before.num_texts, after.num_tokens - before.num_tokens) == (2, 3)
    names = [record.name for record in llm.programs() if record.num_calls]
    assert names and all(name.startswith("texts B=") for name in names)


def test_options_of_the_engine_that_pooling_lacks_are_refused(folder):
    for options, complaint in (
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not supported by pooling"),
        ({"quantization": "int8"}, "quantization='int8' is not supported by pooling"),
        ({"record_expert_load": True}, "record_expert_load=True is not supported by pooling"),
        ({"max_model_len": 64}, "exceeds the 32 positions"),
        ({"pooler_config": {"pooling_type": "AVG"}}, "pooling_type must be one of"),
        ({"runner": "draft"}, "runner must be one of"),
        ({"task": "sum"}, "task must be one of"),
    ):
        with pytest.raises(ValueError, match=complaint):
            LLM(str(folder), **(OPTIONS | options))


def test_a_model_with_a_recurrent_state_does_not_pool(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RECURRENT["4B"]))
    options = OPTIONS | {"load_format": "dummy", "skip_tokenizer_init": True}
    with pytest.raises(ValueError, match="Qwen3_5ForCausalLM is not .* a recurrent state"):
        LLM(str(tmp_path), runner="pooling", **options)


def test_a_model_that_generates_refuses_to_embed_until_it_is_told_to(tmp_path):
    from jaxpage import tiny
    from tests import checkpoints

    folder = tiny.build(tmp_path / "tiny")
    generating = checkpoints.make_llm(folder, enforce_eager=True, kv_cache_memory_bytes="4M")
    for ask in (generating.embed, generating.classify, generating.encode, generating.reward):
        with pytest.raises(ValueError, match='generates text and cannot .*runner="pooling"'):
            ask([1, 2])
    with pytest.raises(ValueError, match='convert="embed"'):
        LLM(str(folder), runner="pooling", convert="none", **OPTIONS)
    with pytest.raises(ValueError, match="CLS is meaningless"):
        LLM(str(folder), task="embed", pooler_config={"pooling_type": "CLS"}, **OPTIONS)
    with pytest.raises(ValueError, match="trained for shorter embeddings"):
        LLM(str(folder), runner="pooling", **OPTIONS).embed(
            [1], pooling_params=PoolingParams(dimensions=2)
        )
