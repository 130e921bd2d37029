"""Strict numerics: the trainer's logprobs are the sampler's, bit for bit; its gradients are the dense forward's."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpage import SamplingParams
from jaxpage.rl import ParityError, load_module, logprobs
from jaxpage.rl.strict import strict_logprobs
from tests import dense_families
from tests.rl.modules import Holder, change, in_layout, make_module, make_sampler, write_config

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, *range(20, 60)], [3, 4, 5], [9]]
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, ignore_eos=True)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("production_compiler")]


@pytest.fixture(
    scope="module",
    params=[
        ("bfloat16", 1),
        pytest.param(("bfloat16", 2), marks=pytest.mark.deep),
        pytest.param(("float32", 2), marks=pytest.mark.deep),
    ],
    ids="{0[0]}-{0[1]}".format,
)
def bound(request, tmp_path_factory, production_compiler):
    """A module and its sampler. One with two layers, in the layout of others, is below."""
    dtype, num_layers = request.param
    path = write_config(tmp_path_factory.mktemp("config"), num_layers=num_layers)
    module = make_module(path, dtype=dtype)
    sampler = make_sampler(module, path, numerics="strict", enforce_eager=True)
    yield module, sampler
    sampler.shutdown()


def test_every_logprob_is_the_trainers(bound):
    """Of other batches than the sampler's, and in the program that differentiates."""
    module, sampler = bound
    rollout = sampler.generate(PROMPTS, PARAMS, n=4, seed=1)
    report = sampler.check_parity(rollout)
    assert report.token_count == 144 and report.mismatch_count == 0 and report.max_abs == 0
    forward = sampler.logprob_fn()
    batch = jax.device_put(rollout.to_padded(prompt_length=60, completion_length=20))
    sampled = batch.completion_mask

    def loss(module, forward):
        found = forward(module, batch, 0.8)
        return (found * jnp.sin(jnp.arange(found.size)).reshape(found.shape)).sum(), found

    gradient = nnx.jit(nnx.grad(loss, has_aux=True), static_argnums=1)
    ours, found = gradient(module, forward)
    assert (found[sampled] == batch.logprobs[sampled]).all() and not found[~sampled].any()
    dense, other = gradient(module, logprobs)
    assert not (other[sampled] == batch.logprobs[sampled]).all()
    for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(dense), strict=True):
        assert np.abs(theirs).max() > 0
        np.testing.assert_array_equal(mine, theirs)


def test_scores_are_the_trainers_too(bound):
    _, sampler = bound
    rollout = sampler.generate(PROMPTS, dataclasses.replace(PARAMS, temperature=1.0), seed=2)
    sequences = [rollout.prompt(i) + rollout.completion(i) for i in range(len(rollout))]
    scored = sampler.score(sequences)
    for i, (number, length) in enumerate(zip(rollout.lengths, rollout.prompt_lengths, strict=True)):
        found = scored.logprobs[i, length : length + number]
        np.testing.assert_array_equal(found, rollout.logprobs[i, :number])


def test_other_weights_have_other_bits_and_the_same_parity(bound):
    module, sampler = bound
    before = sampler.generate(PROMPTS, PARAMS, seed=3)
    assert sampler.check_parity(before).bitwise_equal
    num_compiled = sampler.stats().num_recompiles
    change(module)
    after = sampler.generate(PROMPTS, PARAMS, seed=3)
    assert (before.logprobs != after.logprobs).any()
    assert sampler.check_parity(after).bitwise_equal
    assert sampler.stats().num_recompiles == num_compiled > 0


def test_one_bit_is_an_error(bound):
    _, sampler = bound
    rollout = sampler.generate(PROMPTS, PARAMS, seed=4)
    changed = rollout.logprobs.copy()
    changed[1, 3] = np.nextafter(changed[1, 3], np.float32(0))
    with pytest.raises(ParityError, match="1 of 36 logprobs differ between sampler and trainer"):
        sampler.check_parity(dataclasses.replace(rollout, logprobs=changed))


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("maxtext stacked", "bfloat16"),
        pytest.param("tunix", "bfloat16", marks=pytest.mark.deep),
        pytest.param("tunix", "float32", marks=pytest.mark.deep),
        pytest.param("maxtext", "float32", marks=pytest.mark.deep),
    ],
)
def test_the_layouts_of_others_are_sampled_strictly_too(tmp_path, layout, dtype):
    """Whatever the batches; float32 arrays are rounded to the engine's bfloat16 in the same place on both sides."""
    path = write_config(tmp_path)
    ours = make_module(path)
    theirs = Holder(in_layout(layout, ours, path))
    sampler = make_sampler(theirs, path, numerics="strict", dtype=dtype, enforce_eager=True)
    rollout = sampler.generate(PROMPTS, PARAMS, n=4, seed=1)
    num_compiled = sampler.stats().num_recompiles
    report = sampler.check_parity(rollout)
    assert report.token_count == 144 and report.mismatch_count == 0
    forward = sampler.logprob_fn()
    batch = jax.device_put(rollout.to_padded(prompt_length=60, completion_length=20))
    sampled = batch.completion_mask

    def loss(module, forward):
        found = forward(module, batch, 0.8)
        return (found * jnp.sin(jnp.arange(found.size)).reshape(found.shape)).sum(), found

    gradient, found = nnx.jit(nnx.grad(loss, has_aux=True), static_argnums=1)(theirs, forward)
    assert (found[sampled] == batch.logprobs[sampled]).all()
    assert all(np.abs(each).max() > 0 for each in jax.tree.leaves(gradient))
    alone = sampler.generate(PROMPTS[:1], PARAMS, n=4, seed=1)
    np.testing.assert_array_equal(alone.logprobs, rollout.logprobs[:4])
    assert sampler.stats().num_recompiles == num_compiled > 0
    sampler.shutdown()


def test_several_devices_are_refused(tmp_path):
    path = write_config(tmp_path)
    with pytest.raises(ValueError, match='numerics="strict" uses one device, not 2'):
        make_sampler(make_module(path), path, numerics="strict", tensor_parallel_size=2)


def test_models_that_no_strict_sampler_takes_are_refused(tmp_path):
    path = dense_families.build("gemma4", 2, tmp_path)
    no_batch: Any = None
    with pytest.raises(ValueError, match="strict logprobs are not for Gemma 4"):
        strict_logprobs(load_module(str(path)), no_batch, block_size=8)
