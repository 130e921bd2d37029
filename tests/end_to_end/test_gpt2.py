"""Engines with GPT-2, whose positions are learned: up to the last one, for embeddings, and with other weights."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpage import SamplingParams
from tests import checkpoints, dense_families
from tests.end_to_end.test_parity import log_softmax, prompts_of, torch_logits_of
from tests.end_to_end.test_prompt_embeds import embeddings

NUM_POSITIONS = 64
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    return dense_families.build("gpt2", 0, folder, max_position_embeddings=NUM_POSITIONS)


def make(path, **options):
    """Chunks of 16 tokens, and a pool that is too small for all requests."""
    small = {"max_model_len": None, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 22}
    return checkpoints.make_llm(path, enforce_eager=True, **small | options)


def params(**options):
    return SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=0, **options)


def test_the_last_position_is_the_last_token(path):
    """Of requests in chunks, preempted, and found in the cache. The last token that is sampled needs no position."""
    prompts = prompts_of((30, 63, 1, 64 - 16, 30))
    prompts[4] = prompts[1][:40]
    llm = make(path)
    assert llm.model_config.max_model_len == NUM_POSITIONS
    found = checkpoints.answers(llm, prompts, [params()] * len(prompts))
    assert llm.stats().num_preemptions > 0 and llm.stats().prefix_cache_hits > 0
    theirs = torch_logits_of(path, prompts, [tokens for tokens, _ in found])
    for prompt, (tokens, logprobs), logits in zip(prompts, found, theirs, strict=True):
        assert len(prompt) + len(tokens) == NUM_POSITIONS
        expected = log_softmax(logits)
        assert tokens == expected.argmax(axis=-1).tolist()
        np.testing.assert_allclose(logprobs, expected.max(axis=-1), atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="65"):
        llm.generate([[5] * 65], params(), use_tqdm=False)
    with pytest.raises(ValueError, match="max_model_len=65 exceeds the 64 positions"):
        make(path, max_model_len=65)


def test_drafts_at_the_last_positions(path):
    """Drafts behind the last position are of no use, and change nothing."""
    lookup = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}
    prompts = [[5, 6, 7] * 15, [9] * 50]
    expected = checkpoints.answers(make(path), prompts, [params()] * 2)
    found = checkpoints.answers(make(path, speculative_config=lookup), prompts, [params()] * 2)
    checkpoints.assert_same_answers(found, expected, atol=1e-4)


def test_positions_are_added_to_prompts_of_embeddings(path):
    prompts = prompts_of((40, 7))
    embeds = [{"prompt_embeds": x} for x in embeddings(path, prompts)]
    llm = make(path, enable_prompt_embeds=True)
    expected = checkpoints.answers(llm, prompts, [params()] * 2)
    found = checkpoints.answers(llm, embeds, [params()] * 2)
    checkpoints.assert_same_answers(found, expected, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_other_weights(family, tmp_path):
    """Those of another checkpoint, into projections that are joined; GPT-NeoX's rows take turns by head."""
    first, second = tmp_path / "first", tmp_path / "second"
    dense_families.build(family, 0, first)
    config = checkpoints.config(first)
    checkpoints.save(config, second, seed="another")
    prompts = prompts_of((30, 7))
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
    other = checkpoints.make_llm(second, enforce_eager=True)
    expected = checkpoints.answers(other, prompts, [greedy, greedy])
    llm = checkpoints.make_llm(first, enforce_eager=True)
    assert checkpoints.answers(llm, prompts, [greedy, greedy]) != expected
    llm.update_weights(second)
    found = checkpoints.answers(llm, prompts, [greedy, greedy])
    checkpoints.assert_same_answers(found, expected, atol=1e-4)
