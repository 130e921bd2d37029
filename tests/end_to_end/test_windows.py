"""Models whose layers see unequally far: as transformers, in the memory of their windows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxpage import SamplingParams
from jaxpage.kv_groups import most_blocks
from tests import checkpoints

pytestmark = pytest.mark.slow

BLOCK_SIZE, NUM_TOKENS = 16, 512  # the second: of a step


def make_llm(path, length, **options):
    return checkpoints.make_llm(
        path,
        max_model_len=length,
        max_num_seqs=2,
        max_num_batched_tokens=NUM_TOKENS,
        block_size=BLOCK_SIZE,
        enforce_eager=True,
        **options,
    )


def greedy(llm, prompt, count):
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0)
    (output,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return output


def random_prompt(length):
    rng = random.Random(length)
    return [rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(length)]


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("gemma3", 0),
        pytest.param("gemma2", 2, marks=pytest.mark.deep),
        pytest.param("mistral", 0, marks=pytest.mark.deep),
    ],
)
def test_far_beyond_the_window_tokens_are_those_of_transformers(family, variant, tmp_path):
    path = checkpoints.build(family, variant, tmp_path, max_position_embeddings=2048)
    prompt, count = random_prompt(1500), 40
    llm = make_llm(path, 2048)
    runner = llm._engine.runner
    assert min(window for window in runner.groups.windows if window) < 100
    tokens = greedy(llm, prompt, count).outputs[0].token_ids
    logits = checkpoints.torch_logits(path, np.array([prompt + list(tokens)]))[0]
    assert logits[len(prompt) - 1 : -1].argmax(axis=-1).tolist() == list(tokens)
    # Found again, in all groups: all whole blocks of what was computed, which the last token was not.
    again = greedy(llm, prompt + list(tokens), 5)
    assert again.num_cached_tokens == (len(prompt) + count - 1) // BLOCK_SIZE * BLOCK_SIZE
    more = again.outputs[0].token_ids
    logits = checkpoints.torch_logits(path, np.array([[*prompt, *tokens, *more]]))[0]
    assert logits[len(prompt) + count - 1 : -1].argmax(axis=-1).tolist() == list(more)


@pytest.mark.parametrize(
    "length", [4096, *(pytest.param(n, marks=pytest.mark.deep) for n in (8192, 32_768))]
)
def test_far_beyond_the_window_a_pool_without_room_for_all_layers_is_enough(length, tmp_path):
    """Two layers of three see 64 tokens, one everything."""
    layer_types = ["sliding_attention"] * 2 + ["full_attention"]
    shape = {"layer_types": layer_types, "num_hidden_layers": 3, "sliding_window": 64}
    path = checkpoints.build("gemma3", 0, tmp_path, max_position_embeddings=length, **shape)
    prompt = random_prompt(length - 700)
    windows = (64,) * 2 + (None,)
    num_blocks = most_blocks(windows, length, BLOCK_SIZE, NUM_TOKENS) + 1
    assert num_blocks == 1 + length // BLOCK_SIZE + 2 * 37  # three times the second without groups
    llm = make_llm(path, length, num_gpu_blocks_override=num_blocks)
    assert llm._engine.runner.groups.windows == windows
    tight = greedy(llm, prompt, 20).outputs[0]
    assert llm.stats().num_preemptions == 0
    roomy = make_llm(path, length, num_gpu_blocks_override=4 * length // BLOCK_SIZE)
    expected = greedy(roomy, prompt, 20).outputs[0]
    assert tight.token_ids == expected.token_ids
    assert tight.cumulative_logprob == expected.cumulative_logprob
