"""MTP layers of Qwen3-Next and Qwen3.5 draft what the same layers draft in torch, and a request has the tokens that it
has without. The models have recurrent states, in which drafts that were wrong leave nothing.
"""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from jaxpage import LLM
from tests import checkpoints, picture_models
from tests.checkpoints import answers, assert_same_answers
from tests.eagle_heads import Target
from tests.end_to_end import test_pictures
from tests.end_to_end.test_draft_model import requests
from tests.end_to_end.test_eagle3 import check_behind_pictures, check_drafts, greedy, prompts
from tests.end_to_end.test_mtp import DRAFTS
from tests.end_to_end.test_parity import prompts_of
from tests.models.test_qwen_mtp import build
from tests.mtp_layers import tame
from tests.picture_targets import PictureTarget
from tests.qwen_mtp_layers import QwenLayer

pytestmark = pytest.mark.slow


def make_llm(path: Path, **options) -> LLM:
    return checkpoints.make_llm(path, enforce_eager=True, **options)


@pytest.mark.parametrize(
    ("family", "joined", "options"),
    [
        ("qwen3_5_moe", True, {"tensor_parallel_size": 2}),
        pytest.param("qwen3_5", False, {}, marks=pytest.mark.deep),
        pytest.param("qwen3_next", False, {}, marks=pytest.mark.deep),
    ],
)
def test_drafts_are_those_of_torch(family, joined, options, tmp_path):
    """Of a layer that has learned nothing, so that everything it reads matters: on two devices, and of prompts in
    chunks. It has its place in each block, and tokens are those of torch too.
    """
    path = build(family, 0, tmp_path)
    target = Target(path)
    layer = QwenLayer(target)
    options |= {"max_num_batched_tokens": 16, "block_size": 4}
    llm = make_llm(layer.add_to(path, joined=joined), **DRAFTS, **options)
    of_model, of_layer = jax.tree.leaves(llm._engine.runner._kv_pool)
    assert of_model.shape == of_layer.shape
    counts = check_drafts(llm, layer, target)
    for output in llm.generate(prompts(), greedy(12), use_tqdm=False):
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        hidden = target.hidden([*prompt, *tokens[:-1]], [])
        assert layer.logits(hidden[len(prompt) - 1 :]).argmax(-1).tolist() == list(tokens)
    assert sum(counts) == llm.stats().num_draft_tokens > 80


@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("qwen3_5", marks=pytest.mark.deep)])
def test_tokens_are_those_without_drafts(family, tmp_path):
    """Sampled ones too, of two sequences of a prompt, and preempted."""
    path = tame(build(family, 0, tmp_path))
    target = Target(path)
    layer = QwenLayer(target).tame()
    expected = answers(make_llm(layer.add_to(path)), *requests())
    llm = make_llm(path, **DRAFTS, num_gpu_blocks_override=40)
    assert_same_answers(answers(llm, *requests()), expected, atol=2e-4)
    stats = llm.stats()
    assert stats.num_accepted_tokens > stats.num_draft_tokens / 4
    assert stats.num_preemptions and not stats.num_blocks_used
    counts = check_drafts(llm, layer, target)
    llm.generate(prompts(), greedy(12), use_tqdm=False)
    assert sum(counts) == llm.stats().num_draft_tokens - stats.num_draft_tokens > 30


def test_a_prompt_begins_with_a_state_in_the_prefix_cache(tmp_path):
    path = tame(build("qwen3_next", 0, tmp_path))
    target = Target(path)
    layer = QwenLayer(target).tame()
    sizes = {"max_model_len": 512, "block_size": 16}
    prompt = [{"prompt_token_ids": each} for each in prompts_of((300,))]
    (expected,) = make_llm(layer.add_to(path), **sizes).generate(prompt, greedy(), use_tqdm=False)
    llm = make_llm(path, **DRAFTS, **sizes)
    counts = check_drafts(llm, layer, target)
    for cached in (0, 288):
        (output,) = llm.generate(prompt, greedy(), use_tqdm=False)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.num_cached_tokens == cached
    stats = llm.stats()
    assert sum(counts) == stats.num_draft_tokens > 20
    assert stats.num_accepted_tokens > stats.num_draft_tokens / 4


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3_5", {}),
        pytest.param("qwen3_5_moe", {"tensor_parallel_size": 2}, marks=pytest.mark.deep),
    ],
)
def test_behind_pictures_drafts_are_those_of_torch(name, options, tmp_path):
    """Of a layer that has learned nothing, which reads embeddings of pictures, at three positions each."""
    path = picture_models.save(test_pictures.CONFIGS[name](), tmp_path, seed="mtp")
    picture_models.save_tokenizer(path)
    target = PictureTarget(path, test_pictures.prepared(path), never=test_pictures.NEVER)
    layer = QwenLayer(target)
    check_behind_pictures(layer.add_to(path), layer, target, **DRAFTS, **options)
