"""MTP layers draft what the same layers draft in torch, and a request has the tokens that it has without."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from jaxpage import LLM
from tests import checkpoints, mixtures
from tests.checkpoints import answers, assert_same_answers
from tests.eagle_heads import Target
from tests.end_to_end.test_draft_model import requests
from tests.end_to_end.test_eagle3 import check_drafts, greedy, prompts, watch
from tests.mtp_layers import Layer, tame

pytestmark = pytest.mark.slow

DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}


def make_llm(path: Path, **options) -> LLM:
    return checkpoints.make_llm(path, enforce_eager=True, **options)


def test_drafts_are_those_of_torch(tmp_path):
    """Of a layer that has learned nothing, so that everything it reads matters: on two devices, and of prompts in
    chunks. It has its place in each block, and tokens are those of torch too.
    """
    path = mixtures.build("deepseek_v3", 0, tmp_path)
    target = Target(path)
    layer = Layer(target)
    options = {"max_num_batched_tokens": 16, "block_size": 4, "tensor_parallel_size": 2}
    llm = make_llm(layer.add_to(path), **DRAFTS, **options)
    *of_model, of_layer = jax.tree.leaves(llm._engine.runner._kv_pool)
    assert [each.shape for each in of_model] == [of_layer.shape] * 2
    counts = check_drafts(llm, layer, target)
    for output in llm.generate(prompts(), greedy(12), use_tqdm=False):
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        hidden = target.hidden([*prompt, *tokens[:-1]], [])
        assert layer.logits(hidden[len(prompt) - 1 :]).argmax(-1).tolist() == list(tokens)
    assert sum(counts) == llm.stats().num_draft_tokens > 80


def test_tokens_are_those_without_drafts(tmp_path):
    """Sampled ones too, of two sequences of a prompt, where prompts are found in the prefix cache, and preempted."""
    path = tame(mixtures.build("glm4_moe", 0, tmp_path))
    target = Target(path)
    layer = Layer(target).tame()
    expected = answers(make_llm(layer.add_to(path, copies=False)), *requests())
    llm = make_llm(path, **DRAFTS, num_gpu_blocks_override=40)
    for _ in range(2):
        assert_same_answers(answers(llm, *requests()), expected, atol=2e-4)
    stats = llm.stats()
    assert stats.num_accepted_tokens > stats.num_draft_tokens / 4
    assert stats.num_preemptions and stats.prefix_cache_hits and not stats.num_blocks_used
    counts = check_drafts(llm, layer, target)
    llm.generate(prompts(), greedy(12), use_tqdm=False)
    assert sum(counts) == llm.stats().num_draft_tokens - stats.num_draft_tokens > 30


def test_a_layer_reads_the_embeddings_of_a_prompt(tmp_path):
    """Which are those of tokens: drafts behind them are those behind the tokens, of prompts in chunks too."""
    path = mixtures.build("deepseek_v3", 0, tmp_path)
    target = Target(path)
    options = {"enable_prompt_embeds": True, "max_num_batched_tokens": 16, "block_size": 4}
    llm = make_llm(Layer(target).add_to(path), **DRAFTS, **options, enable_prefix_caching=False)
    found: list[list[int]] = []
    watch(llm, lambda _, drafts: found.append(drafts))
    llm.generate(prompts(), greedy(12), use_tqdm=False)
    expected, found[:] = list(found), []
    embeds = [target.embedding[each["prompt_token_ids"]].numpy() for each in prompts()]
    llm.generate([{"prompt_embeds": each} for each in embeds], greedy(12), use_tqdm=False)
    assert found == expected and sum(map(len, found)) > 50
