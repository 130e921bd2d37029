"""`Session`: turns of policy and environment, and rollouts of whole sessions."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from flax import nnx

from jaxpage import SamplingParams
from jaxpage.rl import Session, collect, logprobs
from tests.rl.modules import VOCAB_SIZE, change, make_module, make_sampler, write_config

FIRST, SECOND = list(range(5, 18)), [20, 21, 22]  # what the environment says
PARAMS = SamplingParams(max_tokens=9, temperature=0.8, ignore_eos=True)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bound(tmp_path_factory):
    """A module and its sampler."""
    path = write_config(tmp_path_factory.mktemp("config"))
    module = make_module(path)
    sampler = make_sampler(module, path)
    yield module, sampler
    sampler.shutdown()


def play(sampler, first=FIRST, params=PARAMS, seed=5, turns=3):
    session = Session(sampler, first, seed=seed)
    for _ in range(turns - 1):
        session.generate(params)
        session.extend(SECOND)
    session.generate(params)
    return session


def test_tokens_are_only_appended_and_the_mask_tells_whose_they_are(bound):
    _, sampler = bound
    session = Session(sampler, FIRST)
    first = session.generate(PARAMS)
    assert session.token_ids == FIRST + first.completion(0)
    session.extend(SECOND)
    second = session.generate(PARAMS)
    assert session.token_ids == FIRST + first.completion(0) + SECOND + second.completion(0)
    assert session.loss_mask.tolist() == [False] * 13 + [True] * 9 + [False] * 3 + [True] * 9
    np.testing.assert_array_equal(session.logprobs[13:22], first.logprobs[0])
    np.testing.assert_array_equal(session.logprobs[25:], second.logprobs[0])
    assert not session.logprobs[~session.loss_mask].any()
    # Blocks of 8: 21 tokens have KV from the turn before.
    assert second.num_cached[0] == 16


def test_a_turn_is_what_a_request_with_all_tokens_before_it_samples(bound):
    _, sampler = bound
    session = play(sampler, turns=2)
    prompt = session.token_ids[:25]
    alone = sampler.generate([prompt], PARAMS, seed=5)
    assert alone.completion(0) == session.token_ids[25:]


@pytest.mark.parametrize("side", ["left", "right"])
def test_logprobs_of_a_session_are_those_of_the_trainer(bound, side):
    module, sampler = bound
    sessions = [play(sampler), play(sampler, first=[9], seed=6, turns=1)]
    rollout = collect(sessions)
    assert [rollout.prompt(row) for row in range(2)] == [FIRST, [9]]
    assert rollout.completion(0) == sessions[0].token_ids[13:]
    assert rollout.mask.sum(1).tolist() == [27, 9] and rollout.lengths.tolist() == [33, 9]
    assert rollout.finish_reasons == ("length", "length")
    batch = rollout.to_padded(16, 40, side=side)
    np.testing.assert_array_equal(batch.completion_mask.sum(1), [27, 9])
    found = np.asarray(nnx.jit(logprobs)(module, batch, 0.8))
    np.testing.assert_allclose(found, batch.logprobs, atol=2e-5)
    report = sampler.check_parity(rollout)
    assert report.token_count == 36 and report.max_abs < 2e-5


def test_what_was_appended_behind_the_last_answer_is_left_out(bound):
    _, sampler = bound
    session = play(sampler, turns=2)
    before = collect([session])
    session.extend([3, 4])
    np.testing.assert_array_equal(collect([session]).token_ids, before.token_ids)


def test_turns_of_other_weights_are_told_apart(tmp_path):
    path = write_config(tmp_path)
    module = make_module(path)
    sampler = make_sampler(module, path)
    session = Session(sampler, FIRST)
    session.generate(PARAMS)
    session.extend(SECOND)
    change(module, 0.5)
    sampler.update(version=7)
    turn = session.generate(PARAMS)
    assert turn.num_cached[0] == 0
    assert collect([session]).weight_versions == (((0, 0, 9), (7, 12, 21)),)
    sampler.shutdown()


def test_sessions_of_many_threads(bound):
    _, sampler = bound
    seeds = range(6)
    alone = [play(sampler, seed=seed).token_ids for seed in seeds]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda seed: play(sampler, seed=seed).token_ids, seeds))
    assert together == alone and len(set(map(tuple, alone))) == 6


def test_what_cannot_be_appended_changes_nothing(bound):
    _, sampler = bound
    session = Session(sampler, FIRST)
    for tokens, message in (
        ([3] * 115, "would have 128 tokens (13 and 115 more); max_model_len is 128"),
        ([3, VOCAB_SIZE], f"token id {VOCAB_SIZE} is not in the vocabulary"),
        ([-1], "token id -1 is not in the vocabulary"),
        ("a text", "there is no tokenizer"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            session.extend(tokens)
    with pytest.raises(ValueError, match="one answer, got n=2"):
        session.generate(SamplingParams(n=2))
    with pytest.raises(ValueError, match="max_tokens"):
        session.generate(SamplingParams(min_tokens=500, max_tokens=400))
    assert session.token_ids == FIRST and not session.loss_mask.any()
    with pytest.raises(ValueError, match="prompt"):
        Session(sampler).generate(PARAMS)


def test_sessions_that_make_no_rollout(bound):
    _, sampler = bound
    session, silent = play(sampler, turns=1), Session(sampler, FIRST)
    with pytest.raises(ValueError, match="sessions are empty"):
        collect([])
    with pytest.raises(ValueError, match=re.escape("sessions [1] have no answer")):
        collect([session, silent])
    silent.generate(SamplingParams(max_tokens=2, temperature=0.5))
    with pytest.raises(ValueError, match=r"0\.5.*0\.8"):
        collect([session, silent])
