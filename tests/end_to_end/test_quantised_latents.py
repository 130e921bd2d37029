"""Engines whose pools have latents in 8-bit floats: the log-probabilities of torch's model with rounded latents and
keys, and the same tokens however these were cached.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

from jaxpage import LLM, SamplingParams
from pallas_kernels.kv_write.quantized import FLOATS
from tests import checkpoints, mixtures
from tests.eagle_heads import Target
from tests.end_to_end import test_host_blocks as host_blocks
from tests.end_to_end.test_quantised_pools import STEP, rounded
from tests.end_to_end.test_tensor_parallel import assert_same_until_ties
from tests.mtp_layers import Layer

pytestmark = pytest.mark.slow

MLA = theirs.DeepseekV3Attention
ROTATIONS = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A latent of 20 numbers and a rotated key of 8, for 8 heads."""
    return mixtures.build("deepseek_v3", 1, tmp_path_factory.mktemp("deepseek_v3"))


def make_llm(path: Path, kv_cache_dtype: str = "fp8", **options) -> LLM:
    return checkpoints.make_llm(path, enforce_eager=True, kv_cache_dtype=kv_cache_dtype, **options)


@contextmanager
def rounding(model: torch.nn.Module, format: str, monkeypatch):
    """Torch's model with latents, and with keys that are rotated, as the pool has them."""

    def round_them(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(rounded(x.numpy(), format))

    layers = [each for each in model.modules() if isinstance(each, MLA)]
    hooks = [
        each.kv_a_layernorm.register_forward_hook(lambda *given: round_them(given[-1]))
        for each in layers
    ]
    with monkeypatch.context() as patched:
        for name in ROTATIONS:
            rotate = getattr(theirs, name)

            def rotate_and_round(q, k, *rest, rotate=rotate, **options):
                q, k = rotate(q, k, *rest, **options)
                return q, round_them(k)

            patched.setattr(theirs, name, rotate_and_round)
        yield
    for each in hooks:
        each.remove()


@pytest.mark.parametrize("format", FLOATS)
def test_logprobs_are_those_of_torch_with_rounded_latents(format, path, monkeypatch):
    llm = make_llm(path, format)
    (first, *_) = jax.tree.leaves(llm._engine.runner._kv_pool)
    assert (first.shape[1:], first.dtype) == ((8, 28), np.uint8)
    rng = random.Random(1)
    prompts = [host_blocks.random_ids(rng, length) for length in (1, 15, 16, 17, 60)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    found = checkpoints.answers(llm, prompts, params)

    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def differences() -> list[float]:
        """Of log-probabilities, and of these from the greatest."""
        largest = []
        for prompt, (answer, got) in zip(prompts, found, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.log_softmax(-1).numpy()
            taken = logprobs[np.arange(len(answer)), answer]
            largest += [np.abs(taken - got).max(), (logprobs.max(-1) - taken).max()]
        return largest

    with rounding(model, format, monkeypatch):
        of_rounded = differences()
    assert max(of_rounded) < STEP
    assert max(differences()) > 4 * max(of_rounded)  # rounding is the reason


def answers(llm: LLM) -> list[checkpoints.Answer]:
    return checkpoints.answers(llm, *host_blocks.work())


@pytest.fixture(scope="module")
def expected(path) -> list[checkpoints.Answer]:
    """Of prompts at once, without a cache and with room for all."""
    llm = make_llm(
        path,
        enable_prefix_caching=False,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=host_blocks.LARGE,
    )
    return answers(llm)


def assert_same(got, expected) -> None:
    assert_same_until_ties(got, expected, atol=STEP)


def test_chunks_swapped_blocks_and_those_from_the_disk_are_the_same(path, expected, tmp_path):
    """With a tenth of the blocks that the work wants."""
    bytes_per_block = 3 * host_blocks.BLOCK_SIZE * 28
    options = {
        "max_num_batched_tokens": 16,
        "num_gpu_blocks_override": host_blocks.SMALL["llama"],
        "preemption_mode": "swap",
        "swap_space": host_blocks.FEW * bytes_per_block / 2**30,
        "kv_offload_dir": str(tmp_path),
    }
    llm = make_llm(path, **options)
    assert llm._engine.runner.pool_spec.bytes_per_block == bytes_per_block
    for _ in range(2):  # the second time host and disk hold what was evicted
        assert_same(answers(llm), expected)
    stats = llm.stats()
    assert stats.num_preemptions and stats.num_blocks_swapped_in and stats.num_disk_hit_blocks


def test_two_devices_and_the_prefix_cache_change_nothing(path, expected):
    llm = make_llm(path, tensor_parallel_size=2)
    for _ in range(2):
        assert_same(answers(llm), expected)
    assert llm.stats().prefix_cache_hits


def test_drafts_of_an_mtp_layer_change_nothing(expected, tmp_path):
    """Whose latents are in the pool too."""
    path = mixtures.build("deepseek_v3", 1, tmp_path)
    drafts = {"method": "mtp", "num_speculative_tokens": 3}
    llm = make_llm(Layer(Target(path)).add_to(path), speculative_config=drafts)
    arrays = jax.tree.leaves(llm._engine.runner._kv_pool)
    assert [(each.shape[1:], each.dtype) for each in arrays] == [((8, 28), np.uint8)] * 4
    assert_same(answers(llm), expected)
    assert llm.stats().num_draft_tokens > 50
