"""Prompts of embeddings: their slices go up with the rows that compute them, and their content is part of the key."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.harness import assert_expected, make_engine, run
from tests.engine.test_any_workload import as_embeds
from tests.fakes import make_request

PROMPT = as_embeds([i % 7 for i in range(14)])


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [1, 3, 1000])
def test_slices_go_up_with_the_rows_that_compute_them(budget, overlap):
    engine = make_engine(max_num_batched_tokens=budget, overlap=overlap, decode_steps=4)
    request = make_request("a", PROMPT, max_tokens=9, ignore_eos=True)
    run(engine, request)
    assert_expected(engine, request)
    slices = [embeds for plan in engine.runner.plans for _, embeds in plan.input_embeds]
    np.testing.assert_array_equal(np.concatenate(slices), PROMPT)


def test_they_mix_with_prompts_of_tokens():
    engine = make_engine(max_num_batched_tokens=9)
    requests = [make_request(str(i), PROMPT[i:], max_tokens=5, n=1 + i % 2) for i in range(3)]
    requests += [make_request(f"ids {i}", [0] * 14, max_tokens=5) for i in range(2)]
    run(engine, *requests)
    assert_expected(engine, *requests)


@pytest.mark.parametrize("preemption_mode", ["swap", "recompute"])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_preempted_ones_are_answered_alike(preemption_mode, enable_prefix_caching):
    engine = make_engine(
        num_blocks=11,
        num_host_blocks=20,
        preemption_mode=preemption_mode,
        enable_prefix_caching=enable_prefix_caching,
    )
    requests = [make_request(str(i), PROMPT[i:10], max_tokens=16, seed=i) for i in range(3)]
    run(engine, *requests)
    assert_expected(engine, *requests)
    assert engine.stats().num_preemptions > 0


def cached_tokens(second, **options) -> int:
    """Of a prompt, after `PROMPT` was answered by the same engine."""
    engine = make_engine(block_size=4)
    run(engine, make_request("first", PROMPT, max_tokens=2))
    request = make_request("second", second, max_tokens=2, **options)
    run(engine, request)
    assert_expected(engine, request)
    return request.num_cached_tokens


def test_equal_embeddings_share_blocks_and_others_do_not():
    assert cached_tokens(PROMPT.copy()) == 12
    for position, shared in ((0, 0), (3, 0), (4, 4), (11, 8), (12, 12)):
        other = PROMPT.copy()
        other[position, 1] += 1e-3
        assert cached_tokens(other) == shared, position
    assert cached_tokens(PROMPT.astype(np.float64)) == 0
    assert cached_tokens(PROMPT, salt="other") == 0
    assert cached_tokens([0] * 14) == 0, "the token ids that stand in for embeddings are no prompt"


def test_a_block_of_prompt_and_answer_is_known_by_both():
    engine = make_engine(block_size=4)
    first = make_request("first", PROMPT, max_tokens=8, ignore_eos=True)
    run(engine, first)
    again = make_request("again", PROMPT, max_tokens=8, ignore_eos=True)
    again_elsewhere = make_request("b", PROMPT + np.float32(1), max_tokens=8, ignore_eos=True)
    engine.add(again)
    engine.step()
    engine.add(again_elsewhere)
    engine.scheduler.preempt_all()  # forgets what is cached
    run(engine)
    assert_expected(engine, again, again_elsewhere)
    hashes = [r.sequences[0].block_hashes for r in (first, again, again_elsewhere)]
    assert hashes[0][:5] == hashes[1][:5]
    assert not set(hashes[0]) & set(hashes[2])


def test_embeddings_that_do_not_fit_the_prompt_are_refused():
    request = make_request("a", PROMPT)
    request.prompt_token_ids.pop()
    with pytest.raises(ValueError, match="14 embeddings for a prompt of 13 tokens"):
        make_engine().add(request)
