"""Engines whose pools have latents: with drafts, swapped blocks, one pass over long texts, and a trainer."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers

from jaxpage import LLM, SamplingParams
from jaxpage.rl import Sampler, load_module, logprobs
from tests import checkpoints, eagle_heads, mixtures
from tests.end_to_end import test_host_blocks as host_blocks
from tests.end_to_end.test_speculation import LOOKUP, requests
from tests.pooling.pooling_checkpoints import OPTIONS, normalised, texts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A latent of 20 numbers and a rotated key of 8, for 8 heads."""
    return mixtures.build("deepseek_v3", 1, tmp_path_factory.mktemp("deepseek_v3"))


def make_llm(path: Path, **options) -> LLM:
    return checkpoints.make_llm(path, enforce_eager=True, **options)


@pytest.fixture(scope="module")
def expected(path) -> list[checkpoints.Answer]:
    return checkpoints.answers(make_llm(path), *requests())


@pytest.mark.parametrize(
    "speculative", [LOOKUP, {"method": "draft_model", "num_speculative_tokens": 3}]
)
def test_tokens_are_those_without_drafts(speculative, path, expected):
    """Looked up, or of a draft model that has latents too."""
    own = {"model": str(path)} if speculative["method"] == "draft_model" else {}
    llm = make_llm(path, speculative_config=speculative | own)
    arrays = jax.tree.leaves(llm._engine.runner._kv_pool)
    assert [each.shape[1:] for each in arrays] == [(8, 28)] * 3 * (1 + len(own))
    got = checkpoints.answers(llm, *requests())
    checkpoints.assert_same_answers(got, expected, atol=2e-4)
    assert llm.stats().num_accepted_tokens > 0


def test_tokens_are_those_without_an_eagle_head(path, expected, tmp_path):
    """Which reads hidden states of the model, and has keys and values of its own."""
    head = eagle_heads.Head(
        eagle_heads.CONFIG | {"hidden_size": 64}, eagle_heads.Target(path).embedding
    )
    drafts = {"method": "eagle3", "model": str(head.save(tmp_path)), "num_speculative_tokens": 3}
    llm = make_llm(path, speculative_config=drafts)
    arrays = jax.tree.leaves(llm._engine.runner._kv_pool)
    assert [each.shape[1:] for each in arrays] == [(8, 28)] * 3 + [(8, 4, 16)]
    got = checkpoints.answers(llm, *requests())
    checkpoints.assert_same_answers(got, expected, atol=2e-4)
    assert llm.stats().num_draft_tokens > 0


def test_swapped_latents_and_those_from_the_disk_are_the_same(path, tmp_path):
    """With a tenth of the blocks that the work wants, in small chunks."""
    work = host_blocks.work()
    large = host_blocks.make_llm(path, host_blocks.LARGE, enforce_eager=True)
    expected = checkpoints.answers(large, *work)
    assert large.stats().num_preemptions == 0
    bytes_per_block = 3 * host_blocks.BLOCK_SIZE * 28 * 4
    assert large._engine.runner.pool_spec.bytes_per_block == bytes_per_block
    llm = host_blocks.make_llm(
        path,
        host_blocks.SMALL["llama"],
        enforce_eager=True,
        preemption_mode="swap",
        swap_space=host_blocks.FEW * bytes_per_block / 2**30,
        kv_offload_dir=str(tmp_path),
    )
    for _ in range(2):  # the second time host and disk hold what was evicted
        checkpoints.assert_same_answers(checkpoints.answers(llm, *work), expected, atol=1e-4)
    stats = llm.stats()
    assert stats.num_preemptions and stats.num_blocks_swapped_in and stats.num_disk_hit_blocks


@pytest.mark.parametrize("tokens", [256, 24])
def test_embeddings_are_those_of_transformers(tokens, path):
    """At once, and chunk by chunk."""
    prompts = texts(6, longest=90, seed=3)
    theirs = transformers.AutoModel.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        states = [theirs(torch.tensor([each])).last_hidden_state[0, -1].numpy() for each in prompts]
    sizes = {"max_num_batched_tokens": tokens, "max_model_len": 96, "skip_tokenizer_init": True}
    llm = LLM(str(path), runner="pooling", **(OPTIONS | sizes))
    found = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
    np.testing.assert_allclose(found, [normalised(each) for each in states], atol=1e-5, rtol=0)


def test_a_trainer_has_the_logprobs_of_its_sampler(path):
    """They share the parameters."""
    module = load_module(str(path))
    sampler = Sampler(
        module,
        str(path),
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=8,
        num_gpu_blocks_override=60,
        enforce_eager=True,
    )
    params = SamplingParams(max_tokens=10, temperature=0.8, ignore_eos=True)
    rollout = sampler.generate([[5, 6, 7, 8, 9], [3, 4]], params, n=2, seed=1)
    batch = rollout.to_padded(side="right")
    dense = np.asarray(logprobs(module, batch, 0.8))[batch.completion_mask]
    np.testing.assert_allclose(rollout.logprobs[rollout.mask], dense, atol=2e-5)
    sampler.shutdown()
