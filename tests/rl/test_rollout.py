"""Rollouts as arrays: padding, masks, spans of weight versions, and seeds of groups."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpage.flat_logprobs import FlatLogprobs
from jaxpage.outputs import CompletionOutput, Logprob, RequestOutput, RequestStateStats
from jaxpage.rl import GroupSeeds, logprobs, to_padded
from jaxpage.rl.parity import compare
from jaxpage.rl.rollout import Row, make_rollout, stack_rows
from tests.rl.modules import make_module, write_config

PAD = 0


def completion(index, token_ids, reason="stop", versions=None):
    flat = FlatLogprobs()
    for token_id in token_ids:
        flat.append({token_id: Logprob(-0.5 * (token_id + 1), 1)})
    return CompletionOutput(
        index=index, text="", token_ids=token_ids, cumulative_logprob=0.0, logprobs=flat,
        finish_reason=reason, weight_versions=versions,
    )  # fmt: skip


def output(prompt, *completions, num_cached=0):
    return RequestOutput(
        request_id="", prompt=None, prompt_token_ids=prompt, prompt_logprobs=None, outputs=list(completions),
        finished=True, metrics=RequestStateStats(), num_cached_tokens=num_cached,
    )  # fmt: skip


@pytest.fixture
def rollout():
    # The pad id is sampled, at the beginning and at the end.
    first = output([7, 8, 9], completion(0, [PAD, 4, PAD]), completion(1, [5], "length"))
    second = output([6], completion(0, [3, 2], "abort", [(1, 0, 1), (2, 1, 2)]), num_cached=1)
    return make_rollout(
        [first, second],
        [11, 12],
        pad_id=PAD,
        temperature=1.0,
        logprobs_mode="raw",
        version_of={0: 0, 1: 5, 2: 6}.__getitem__,
    )


def test_arrays_say_what_was_sampled(rollout):
    assert len(rollout) == 3
    assert rollout.lengths.tolist() == [3, 1, 2]
    assert rollout.token_ids.tolist() == [[PAD, 4, PAD], [5, PAD, PAD], [3, 2, PAD]]
    assert rollout.mask.tolist() == [[True] * 3, [True, False, False], [True, True, False]]
    assert rollout.logprobs.tolist() == [[-0.5, -2.5, -0.5], [-3.0, 0, 0], [-2.0, -1.5, 0]]
    assert rollout.prompt_ids.tolist() == [[7, 8, 9], [7, 8, 9], [PAD, PAD, 6]]
    assert rollout.prompt_indices.tolist() == [0, 0, 1] and rollout.seeds.tolist() == [11, 11, 12]
    assert rollout.finish_reasons == ("stop", "length", "abort")
    assert rollout.weight_versions == (((0, 0, 3),), ((0, 0, 1),), ((5, 0, 1), (6, 1, 2)))
    assert rollout.num_cached.tolist() == [0, 0, 1]
    assert rollout.prompt(2) == [6] and rollout.completion(0) == [PAD, 4, PAD]


def test_padding_on_the_left_and_on_the_right(rollout):
    left = rollout.to_padded(4, 3, pad_id=99)
    assert left.token_ids.tolist() == [
        [99, 7, 8, 9, PAD, 4, PAD], [99, 7, 8, 9, 5, 99, 99], [99, 99, 99, 6, 3, 2, 99]
    ]  # fmt: skip
    assert left.positions[2].tolist() == [0, 0, 0, 0, 1, 2, 0]
    right = to_padded(rollout, side="right")
    assert right.token_ids.tolist() == [
        [7, 8, 9, PAD, 4, PAD], [7, 8, 9, 5, PAD, PAD], [6, 3, 2, PAD, PAD, PAD]
    ]  # fmt: skip
    assert right.positions[2].tolist() == [0, 1, 2, 0, 0, 0]
    for padded in (left, right):
        assert padded.completion_mask.sum(1).tolist() == [3, 1, 2]
        assert padded.attention_mask.sum(1).tolist() == [6, 4, 3]
        logprobs = [
            row[mask] for row, mask in zip(padded.logprobs, padded.completion_mask, strict=True)
        ]
        assert [row.tolist() for row in logprobs] == [[-0.5, -2.5, -0.5], [-3.0], [-2.0, -1.5]]
        assert not padded.logprobs[~padded.completion_mask].any()


def row(prompt_ids, token_ids, sampled):
    sampled = np.array(sampled, bool)
    return Row(
        prompt_ids=prompt_ids, token_ids=token_ids, logprobs=np.where(sampled, -1.0, 0.0),
        sampled=sampled, prompt_index=0, num_cached=0, seed=-1, finish_reason="stop",
        weight_versions=(), text="",
    )  # fmt: skip


@pytest.mark.parametrize("side", ["left", "right"])
def test_tokens_of_others_within_a_completion_are_seen_and_not_trained_on(side):
    rows = [row([7, 8], [3, PAD, 4, 5], [1, 0, 0, 1]), row([6], [9, 9], [1, 1])]
    rollout = stack_rows(rows, pad_id=PAD, temperature=1.0, logprobs_mode="temperature")
    assert rollout.mask.tolist() == [[True, False, False, True], [True, True, False, False]]
    padded = rollout.to_padded(side=side)
    for i, each in enumerate(rows):
        seen = padded.attention_mask[i]
        assert padded.token_ids[i][seen].tolist() == [*each.prompt_ids, *each.token_ids]
        trained = [False] * len(each.prompt_ids) + each.sampled.tolist()
        assert padded.completion_mask[i][seen].tolist() == trained
        assert padded.positions[i][seen].tolist() == list(range(len(trained)))
        np.testing.assert_array_equal(padded.logprobs[i], -1.0 * padded.completion_mask[i])


def test_lengths_that_are_too_short_are_refused(rollout):
    with pytest.raises(ValueError, match="prompt_length=2 is too short: the longest has 3"):
        rollout.to_padded(2)
    with pytest.raises(ValueError, match="completion_length=1 is too short"):
        rollout.to_padded(3, 1)
    with pytest.raises(ValueError, match='"left" or "right"'):
        rollout.to_padded(side="top")


def test_a_request_that_was_aborted_before_it_began_is_an_empty_row():
    rollout = make_rollout(
        [output([1], completion(0, [], "abort"))], [-1], pad_id=0, temperature=1.0, logprobs_mode="raw",
        version_of={0: 0}.__getitem__,
    )  # fmt: skip
    assert rollout.token_ids.shape == (1, 0) and rollout.weight_versions == ((),)
    assert rollout.to_padded(completion_length=2).token_ids.tolist() == [[1, 0, 0]]


def test_seeds_are_stored_as_the_engine_uses_them():
    """Any int is a seed; only -1 is none."""
    seeds = [2**63, -(2**70) + 5, -2, 7, -1]
    rollout = make_rollout(
        [output([1], completion(0, [4])) for _ in seeds], seeds, pad_id=0, temperature=1.0,
        logprobs_mode="raw", version_of={0: 0}.__getitem__,
    )  # fmt: skip
    assert rollout.seeds.dtype == np.int64
    assert rollout.seeds.tolist() == [0, 5, 2**32 - 2, 7, -1]


def test_arrays_on_a_device(rollout):
    put = rollout.device_put()
    assert isinstance(put.token_ids, jax.Array) and isinstance(put.mask, jax.Array)
    assert put.completion(2) == [3, 2] and put.finish_reasons == rollout.finish_reasons
    np.testing.assert_array_equal(put.to_padded().token_ids, rollout.to_padded().token_ids)


def test_members_of_a_group_have_different_seeds_in_any_order():
    prompts = [[1, 2], [3]] * 8
    expected = GroupSeeds(7)
    expected = sorted(expected.next(prompt) for prompt in prompts)
    seeds, found = GroupSeeds(7), []
    threads = [
        threading.Thread(target=lambda p=p: found.append(seeds.next(p))) for p in prompts[::-1]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == expected and len(set(found)) == len(prompts)


def test_seeds_follow_from_seed_version_and_prompt():
    def first(seed, version, prompt):
        return GroupSeeds(seed).next(prompt, version)

    assert first(1, 0, [1]) == first(1, 0, [1])
    assert len({first(1, 0, [1]), first(2, 0, [1]), first(1, 1, [1]), first(1, 0, [2])}) == 4
    seeds = GroupSeeds(1)
    assert [seeds.next([1], v) for v in (0, 1)] == [first(1, 0, [1]), first(1, 1, [1])]
    assert first(2**70 - 1, 0, [1]) == first(-1, 0, [1])  # modulo 2**64


@pytest.mark.slow
def test_logprobs_of_the_dense_forward_do_not_see_padding(tmp_path, rollout):
    module = make_module(write_config(tmp_path))
    right, left = rollout.to_padded(side="right"), rollout.to_padded(5, 4, pad_id=3)
    jitted = nnx.jit(logprobs)
    found = [np.asarray(jitted(module, batch, 0.7)) for batch in (right, left)]
    assert not found[0][~right.completion_mask].any()
    values = [lp[b.completion_mask] for lp, b in zip(found, (right, left), strict=True)]
    np.testing.assert_allclose(values[0], values[1], atol=1e-5)
    row = jnp.asarray([[7, 8, 9, PAD, 4, PAD]], jnp.int32)
    logits = nnx.jit(lambda module, row: module(row))(module, row)
    dense = jax.nn.log_softmax(logits / 0.7, -1)[0, jnp.arange(2, 5), row[0, 3:]]
    np.testing.assert_allclose(found[0][0, 3:6], dense, atol=1e-5)


def test_parity_counts_bits_and_estimates_kl():
    rng = np.random.default_rng(0)
    ours = np.log(rng.uniform(0.01, 1, 1000)).astype(np.float32)
    same = compare(ours, ours.copy())
    assert same.bitwise_equal and same.mismatch_count == 0 and same.token_count == 1000
    assert same.max_abs == same.k1 == same.k3 == 0 and same.pearson == pytest.approx(1)
    theirs = ours.copy()
    theirs[3] = np.nextafter(theirs[3], np.float32(-9))
    theirs[5] += np.float32(0.5)
    apart = compare(ours, theirs)
    assert not apart.bitwise_equal and apart.mismatch_count == 2
    assert apart.max_abs == pytest.approx(0.5, rel=1e-5)
    assert apart.k1 == pytest.approx(-0.5e-3, rel=1e-3)
    assert apart.k3 == pytest.approx((np.exp(0.5) - 1.5) / 1000, rel=1e-3)
    assert 0.9 < apart.pearson < 1
    assert apart.metrics()["sampler_trainer/logp_diff_max"] == apart.max_abs
    one = np.zeros(2, np.float32)
    assert compare(one, one.copy()).pearson == 1
    with pytest.raises(ValueError, match="no tokens"):
        compare(ours[:0], ours[:0])
    with pytest.raises(ValueError, match="not finite"):
        compare(ours, np.full_like(ours, np.nan))
