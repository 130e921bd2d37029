"""A constrained request has the same tokens, whatever shares its batch and however the engine is set."""

from __future__ import annotations

import pytest

from jaxpage import SamplingParams
from tests import checkpoints
from tests.structured_outputs.cases import REGEXES, SCHEMAS

PROMPTS = [f"The answer of number {i} to a question is: " for i in range(10)]
WANTED = [
    *({"json": s, "disable_any_whitespace": i % 2 == 0} for i, s in enumerate(SCHEMAS[:6])),
    *({"regex": r} for r in REGEXES[:4]),
]


def params(index: int) -> SamplingParams:
    """Greedy and seeded; n > 1, logprobs, min_tokens, stop strings."""
    return SamplingParams(
        structured_outputs=WANTED[index],
        temperature=0.0 if index == 3 else 1.2,
        n=2 if index == 4 else 1,
        logprobs=1 if index == 5 else None,
        min_tokens=5 if index == 7 else 0,
        stop=["zz"] if index == 8 else None,
        seed=index,
        max_tokens=32,
    )


@pytest.fixture(scope="module")
def make_llm(tiny_folder):
    """Engines of a tiny model."""
    defaults = {"skip_tokenizer_init": False, "max_model_len": 96, "num_gpu_blocks_override": 400}

    def make(**options):
        return checkpoints.make_llm(tiny_folder, **(defaults | options))

    return make


def answers(llm, indices) -> dict[int, list]:
    outputs = llm.generate(
        [PROMPTS[i] for i in indices], [params(i) for i in indices], use_tqdm=False
    )
    return {
        i: [(c.token_ids, c.finish_reason) for c in output.outputs]
        for i, output in zip(indices, outputs, strict=True)
    }


@pytest.fixture(scope="module")
def expected(make_llm) -> dict[int, list]:
    """Each alone, one step after the other."""
    llm = make_llm(async_scheduling=False, enable_prefix_caching=False, enforce_eager=True)
    found: dict[int, list] = {}
    for index in range(len(WANTED)):
        found |= answers(llm, [index])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 7},
        {"num_gpu_blocks_override": 16},
        {"num_gpu_blocks_override": 16, "swap_space": 0.01, "preemption_mode": "swap"},
        {"max_num_seqs": 3, "scheduling_policy": "priority"},
        {"tensor_parallel_size": 2},
    ],
    ids=["all", "plain", "chunks", "recomputed", "swapped", "few slots", "two devices"],
)
def test_together_they_have_the_tokens_that_they_have_alone(make_llm, expected, options):
    llm = make_llm(**options)
    indices = list(range(len(WANTED)))
    assert answers(llm, indices) == expected
    assert answers(llm, indices[::-1]) == expected  # again, with a warm prefix cache
    if "num_gpu_blocks_override" in options:
        assert llm.stats().num_preemptions > 0
    assert llm.stats().num_recompiles == 0


@pytest.mark.slow
def test_neighbours_with_grammars_change_nothing_for_others(make_llm):
    free = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, logprobs=1)

    def answer(llm, wanted):
        prompts = ["Once upon a time"] + PROMPTS[: len(wanted)]
        all_params = [free, *(params(i) for i in wanted)]
        completion = llm.generate(prompts, all_params, use_tqdm=False)[0].outputs[0]
        rows = zip(completion.logprobs, completion.token_ids, strict=True)
        return completion.token_ids, [row[i].logprob for row, i in rows]

    llm = make_llm(enforce_eager=True)
    token_ids, logprobs = answer(llm, [])
    again, close = answer(llm, range(6))
    assert again == token_ids and close == pytest.approx(logprobs, abs=1e-4)
