"""Engines of models with experts: transformers' tokens, whatever shares the batch, and experts on several devices."""

from __future__ import annotations

import pytest

from jaxpage import SamplingParams
from tests import checkpoints, mixtures
from tests.end_to_end import test_invariance as invariance
from tests.end_to_end import test_parity as parity
from tests.end_to_end.test_tensor_parallel import all_answers


def cases():
    """The first variant of a family is `slow`, the others are `deep`."""
    for family, variant in mixtures.CASES:
        marks = pytest.mark.slow if variant == 0 else pytest.mark.deep
        yield pytest.param(family, variant, marks=marks, id=f"{family}-{variant}")


@pytest.mark.parametrize(("family", "variant"), list(cases()))
def test_greedy_tokens_equal_transformers(family, variant, tmp_path):
    path = mixtures.build(family, variant, tmp_path)
    parity.check_greedy_tokens(path, parity.prompts_of(parity.PROMPT_LENS))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.slow if family == "gpt_oss" else pytest.mark.deep)
        for family in mixtures.VARIANTS
    ],
)
def test_alone_and_among_others_in_small_blocks_and_chunks_preempted(family, tmp_path):
    # Variants whose answers are long enough for the pool to run out.
    chosen = {"mixtral": 2, "qwen2_moe": 0, "glm4_moe": 0, "minimax_m2": 2, "ernie4_5_moe": 2}
    chosen |= {"glm4_moe_lite": 0, "nemotron_h_moe": 0}
    variant = chosen.get(family, 1)
    invariance.check_few_requests(mixtures.build(family, variant, tmp_path), num_devices=1)


@pytest.mark.deep
def test_experts_that_do_not_divide_are_on_each_device(tmp_path):
    """6 experts on 4 devices."""
    path = mixtures.build("mixtral", 2, tmp_path)
    one, several = all_answers(path), all_answers(path, tensor_parallel_size=4)
    checkpoints.assert_same_answers(several, one, atol=1e-4)


@pytest.mark.slow
def test_an_engine_has_its_share_of_the_experts_and_compiles_nothing_later(tmp_path):
    path = mixtures.build("mixtral", 0, tmp_path)
    llm = checkpoints.make_llm(path, tensor_parallel_size=2)
    stacks = [leaf for leaf in llm._engine.runner._leaves() if leaf.shape == (4, 144, 32)]
    assert [each.sharding.shard_shape(each.shape) for each in stacks] == [(2, 144, 32)] * 2
    params = SamplingParams(temperature=0.0, max_tokens=9, logprobs=1, detokenize=False)
    assert len(checkpoints.answers(llm, [[5, 6], [7, 8, 9]], params)) == 2
    assert llm.stats().num_recompiles == 0
