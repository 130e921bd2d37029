"""Prompts given as embeddings: what the model's own embeddings of tokens give is what the tokens give."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers

from jaxpage import SamplingParams
from tests import checkpoints

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LENGTHS = (1, 5, 40, 70)


def prompts_of(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, checkpoints.VOCAB_SIZE, length).tolist() for length in lengths]


def embeddings(path, prompts):
    """What transformers' model gives its first layer for these tokens (scaled, for Gemma)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    embed = model.get_input_embeddings()
    with torch.no_grad():
        return [embed(torch.tensor(prompt)).numpy() for prompt in prompts]


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module", params=["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def path(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return checkpoints.build(request.param, 0, folder)


@pytest.fixture(scope="module")
def llm(path):
    """Compiles nothing for what it refuses."""
    options = {"enable_prompt_embeds": True, "max_model_len": 128, "enforce_eager": True}
    return checkpoints.make_llm(path, **options)


# Gemma scales embeddings, and has windows.
@pytest.mark.slow
@pytest.mark.parametrize(
    "path", ["gemma3", pytest.param("llama", marks=pytest.mark.deep)], indirect=True
)
def test_embeddings_of_tokens_answer_as_the_tokens_do_beside_them(path):
    """Alone, mixed with prompts of tokens, in chunks, preempted, and found in the cache."""
    prompts = prompts_of(*LENGTHS)
    embeds = [{"prompt_embeds": x} for x in embeddings(path, prompts)]
    plain = checkpoints.make_llm(path, max_model_len=128, enforce_eager=True)
    expected = tokens(plain.generate(prompts, GREEDY, use_tqdm=False))
    llm = checkpoints.make_llm(
        path,
        enable_prompt_embeds=True,
        max_model_len=128,
        max_num_batched_tokens=16,
        block_size=8,
        num_gpu_blocks_override=30,
    )
    outputs = llm.generate([*embeds, *prompts], GREEDY, use_tqdm=False)
    assert tokens(outputs) == expected * 2
    assert llm.stats().num_preemptions > 0 and llm.stats().num_recompiles == 0
    assert outputs[0].prompt is None and outputs[0].prompt_token_ids == []
    again = [llm.generate(embeds[2], GREEDY, use_tqdm=False) for _ in range(2)]
    assert [tokens(each) for each in again] == [expected[2:3]] * 2
    assert again[1][0].num_cached_tokens > 0


@pytest.mark.slow
def test_only_equal_embeddings_share_blocks(path, llm):
    (prompt,) = prompts_of(40)
    (embeds,) = embeddings(path, [prompt])
    other = embeds.copy()
    other[3, 1] += 1
    cached = []
    for each in (embeds, embeds, other, [0] * 40, embeds[:20]):
        prompt = each if isinstance(each, list) else {"prompt_embeds": each}
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        cached.append(output.num_cached_tokens)
    assert cached == [0, 32, 0, 0, 16]


@pytest.mark.slow
def test_penalties_see_no_tokens_in_a_prompt_of_embeddings(path, llm):
    """Their ids are placeholders: token 0 is not penalised for standing in the prompt."""
    (prompt,) = prompts_of(30)
    (embeds,) = embeddings(path, [prompt])
    bias = {0: 50.0}  # makes 0 the answer, unless it is penalised beyond that
    params = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, repetition_penalty=1000.0, logit_bias=bias
    )
    embedded, plain = llm.generate([{"prompt_embeds": embeds}, [0] * 30], params, use_tqdm=False)
    assert tokens([embedded]) == [[0]] and tokens([plain]) != [[0]]


@pytest.mark.parametrize(
    ("embeds", "message"),
    [
        (np.zeros((3, 31), np.float32), "31.*have 32 dimensions"),
        (np.zeros(32, np.float32), r"floats \[T, E\]"),
        (np.zeros((0, 32), np.float32), "at least one row"),
        (np.zeros((3, 32), np.int32), "floats"),
        (np.full((3, 32), np.nan, np.float32), "finite"),
        (np.zeros((128, 32), ml_dtypes.bfloat16), "leaves no room"),
    ],
)
def test_what_is_no_embedding_is_refused(llm, embeds, message):
    with pytest.raises(ValueError, match=message):
        llm.generate({"prompt_embeds": embeds}, GREEDY, use_tqdm=False)


def test_an_engine_without_the_option_says_how_to_have_it(path):
    llm = checkpoints.make_llm(path, max_model_len=128, enforce_eager=True)
    with pytest.raises(ValueError, match="enable_prompt_embeds=True"):
        llm.generate({"prompt_embeds": np.zeros((3, 32), np.float32)}, GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="stand alone"):
        llm.generate({"prompt_embeds": np.zeros((3, 32)), "prompt": "a"}, GREEDY, use_tqdm=False)
