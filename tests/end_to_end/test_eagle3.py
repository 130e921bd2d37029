"""EAGLE-3 heads draft what the same heads draft in torch, and a request has the tokens that it has without."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpage import LLM, SamplingParams
from tests import checkpoints, eagle_heads
from tests.checkpoints import VOCAB_SIZE, answers, assert_same_answers, make_llm
from tests.eagle_heads import CONFIG, Head, Target
from tests.end_to_end import test_draft_model

NUM_DRAFTS = 3
PLAIN = {"enforce_eager": True}


def drafts_of(folder, **options) -> dict:
    config = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": NUM_DRAFTS}
    return {"speculative_config": config | options}


def prompts() -> list[dict]:
    rng = np.random.default_rng(0)
    return [{"prompt_token_ids": rng.integers(3, VOCAB_SIZE, n).tolist()} for n in (5, 18, 40, 9)]


def greedy(num_tokens: int = 30) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return checkpoints.build("llama", 0, tmp_path_factory.mktemp("llama"), num_hidden_layers=3)


@pytest.fixture(scope="module")
def target(llama):
    return Target(llama)


@pytest.fixture(scope="module")
def trained(target, llama, tmp_path_factory):
    """A head that has learned the answers to `prompts`, and its folder."""
    found = answers(make_llm(llama, **PLAIN), prompts(), greedy(40))
    pairs = zip(prompts(), found, strict=True)
    sequences = [prompt["prompt_token_ids"] + tokens for prompt, (tokens, _) in pairs]
    # It knows most of their tokens.
    head = Head(CONFIG | {"draft_vocab_size": 200}, target.embedding)
    eagle_heads.train(head, target, sequences, steps=150)
    return head, head.save(tmp_path_factory.mktemp("trained"))


def check_drafts(llm: LLM, head: Head, target: Target) -> list[int]:
    """From now on, after each launch of `draft`, that drafts are those of torch. Returns their number in each launch,
    which grows.
    """
    runner = llm._engine.runner
    run, counts = runner._run, []

    def run_and_check(name, *buffers):
        result = run(name, *buffers)
        if name.startswith("draft"):
            layout, (packed,) = runner._lowerings.layouts[name], buffers
            fields = ("slots", "starts", "num_tokens", "num_drafts")
            rows = zip(*(layout.view(packed, field).tolist() for field in fields), strict=True)
            token_ids = np.asarray(runner._state["token_ids"])
            for slot, start, num_tokens, num_drafts in rows:
                known = start + num_tokens - num_drafts
                if num_drafts:
                    tokens = token_ids[slot, :known].tolist()
                    hidden = target.hidden(tokens[:-1], head.layer_ids)
                    drafts = token_ids[slot, known : known + num_drafts].tolist()
                    assert drafts == head.drafts(tokens, hidden, num_drafts)
            counts.append(sum(layout.view(packed, "num_drafts").tolist()))
        return result

    runner._run = run_and_check
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"max_num_batched_tokens": 16, "block_size": 4}, id="chunks"),
        pytest.param({"tensor_parallel_size": 2}, id="two devices"),
    ],
)
def test_drafts_of_a_trained_head_are_those_of_torch_and_often_right(
    options, trained, target, llama
):
    head, folder = trained
    expected = answers(make_llm(llama, **PLAIN), prompts(), greedy())
    llm = make_llm(llama, **PLAIN, **drafts_of(folder), **options)
    counts = check_drafts(llm, head, target)
    assert_same_answers(answers(llm, prompts(), greedy()), expected, atol=2e-4)
    stats = llm.stats()
    assert sum(counts) == stats.num_draft_tokens > 50
    print(len(counts), stats.num_draft_tokens, stats.num_accepted_tokens)
