"""`Sampler`: one engine on a live module, whose parameters are replaced while it lives."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpage import SamplingParams, StepFailedError
from jaxpage.rl import GroupSeeds, Sampler, load_module, logprobs
from jaxpage.weights.spec import variables
from tests import picture_models
from tests.rl.modules import Holder, change, in_layout, make_module, make_sampler, write_config

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [3, 4, 5], [9]]
PARAMS = SamplingParams(max_tokens=10, temperature=0.8, ignore_eos=True)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module")
def bound(path):
    """A module and its sampler."""
    module = make_module(path)
    sampler = make_sampler(module, path)
    yield module, sampler
    sampler.shutdown()


@pytest.fixture(scope="module", autouse=True)
def little_to_collect():
    """The garbage collector, which many tests here call, does not scan what those of other modules have left."""
    gc.collect()
    gc.freeze()


jitted_logprobs = nnx.jit(logprobs)


def dense_logprobs(model, rollout, temperature):
    """Of the sampled tokens, by the module's own dense forward."""
    batch = rollout.to_padded(side="right")
    return np.asarray(jitted_logprobs(model, batch, temperature))[batch.completion_mask]


def assert_same(first, second):
    """Not bit for bit, which only strict numerics are: how many rows share a step depends on the engine's thread."""
    np.testing.assert_array_equal(first.token_ids, second.token_ids)
    np.testing.assert_allclose(first.logprobs, second.logprobs, rtol=0, atol=1e-5)


def test_logprobs_are_those_of_the_module_at_the_temperature(bound):
    module, sampler = bound
    rollout = sampler.generate(PROMPTS, PARAMS, n=2, seed=1)
    assert rollout.logprobs_mode == "temperature"
    expected = dense_logprobs(module, rollout, 0.8)
    np.testing.assert_allclose(rollout.logprobs[rollout.mask], expected, atol=2e-5)
    assert len({tuple(row) for row in rollout.token_ids.tolist()}) == len(rollout) == 6


def test_of_a_model_that_sees_the_text_part_is_trained_and_sampled(tmp_path):
    path = picture_models.save(picture_models.gemma3_config(), tmp_path, seed="rl")
    module = load_module(str(path), max_model_len=128)
    sampler = make_sampler(module, path, enforce_eager=True)
    rollout = sampler.generate(PROMPTS[:2], PARAMS, seed=1)
    expected = dense_logprobs(module, rollout, 0.8)
    np.testing.assert_allclose(rollout.logprobs[rollout.mask], expected, atol=2e-5)
    sampler.shutdown()


def test_stop_tokens_are_kept_and_the_pad_id_may_be_sampled(bound):
    module, sampler = bound
    biased = SamplingParams(
        max_tokens=12, logit_bias={sampler.pad_id: 8.0, 2: 4.0}, temperature=1.0
    )
    rollout = sampler.generate([[5, 6]], biased, n=6, seed=3)
    tokens = [rollout.completion(row) for row in range(len(rollout))]
    assert any(sampler.pad_id in row[:-1] for row in tokens)
    stopped = [
        row for row, why in zip(tokens, rollout.finish_reasons, strict=True) if why == "stop"
    ]
    assert stopped and all(row[-1] == 2 for row in stopped)
    # Another distribution was sampled; these are the model's own logprobs all the same.
    np.testing.assert_allclose(
        rollout.logprobs[rollout.mask], dense_logprobs(module, rollout, 1.0), atol=2e-5
    )


def test_the_prompt_is_computed_once_for_n(bound):
    _, sampler = bound
    sampler.reset_prefix_cache()
    before = sampler.stats().prompt_tokens
    sampler.generate([PROMPTS[0]], PARAMS, n=4)
    assert sampler.stats().prompt_tokens - before == len(PROMPTS[0])


def test_seeds(bound):
    _, sampler = bound
    first = sampler.generate(PROMPTS, PARAMS, seed=7)
    assert_same(first, sampler.generate(PROMPTS, PARAMS, seed=7))
    alone = sampler.generate([PROMPTS[1]], PARAMS, seed=7)
    assert alone.completion(0) == first.completion(1)
    twice = sampler.generate([PROMPTS[1]] * 2, PARAMS, seed=7)
    assert twice.completion(0) == first.completion(1) != twice.completion(1)
    seeds = GroupSeeds(7)
    group = [sampler.generate([PROMPTS[1]], PARAMS, seed=seeds).completion(0) for _ in range(3)]
    assert len(set(map(tuple, group))) == 3
    unseeded = [sampler.generate([PROMPTS[1]], PARAMS).completion(0) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_all_members_of_a_group_have_the_version_of_the_weights_that_they_find(bound):
    module, sampler = bound
    sampler.generate(PROMPTS, PARAMS)
    change(module)  # which no step has noticed yet
    seeds, expected = GroupSeeds(7), GroupSeeds(7)
    found = [sampler.generate([PROMPTS[1]], PARAMS, seed=seeds).seeds[0] for _ in range(3)]
    assert found == [expected.next(PROMPTS[1], sampler.version) for _ in range(3)]


def test_threads_of_one_prompt_each_answer_as_one_call(bound):
    _, sampler = bound
    prompts = [[i, i + 1, i + 2] for i in range(3, 35)]
    together = sampler.generate(prompts, PARAMS, seed=5)
    num_steps = sampler.stats().num_steps
    with ThreadPoolExecutor(len(prompts)) as pool:
        apart = list(pool.map(lambda p: sampler.generate([p], PARAMS, seed=5), prompts))
    assert [r.completion(0) for r in apart] == [
        together.completion(row) for row in range(len(prompts))
    ]
    # They share steps: 32 prompts one after the other would take 32 times 2 at least.
    assert sampler.stats().num_steps - num_steps < 40


def test_a_prompt_that_cannot_be_served_is_refused_before_anything_runs(bound):
    _, sampler = bound
    num_steps = sampler.stats().num_steps
    with pytest.raises(ValueError, match="prompt 1 of 2"):
        sampler.generate([[1], [1] * 500], PARAMS)
    with pytest.raises(ValueError, match="prompts are empty"):
        sampler.generate([], PARAMS)
    with pytest.raises(ValueError, match="params must be one SamplingParams.*got list"):
        sampler.generate(PROMPTS, [PARAMS] * len(PROMPTS))
    for seed in ([1, 2], 0.5, np.array([1, 2])):
        with pytest.raises(ValueError, match="seed must be an int or a GroupSeeds"):
            sampler.generate(PROMPTS, PARAMS, seed=seed)
    assert sampler.stats().num_steps == num_steps and sampler.stats().num_running == 0


def test_one_prompt_may_be_an_array_or_a_list_of_any_integers(bound):
    _, sampler = bound
    ids = np.array(PROMPTS[0])
    expected = sampler.generate([PROMPTS[0]], PARAMS, seed=1)
    for prompt in (ids, jnp.array(ids), list(ids), list(jnp.array(ids)), tuple(PROMPTS[0]), [ids]):
        assert_same(expected, sampler.generate(prompt, PARAMS, seed=1))
    with pytest.raises(ValueError, match="prompts are empty"):
        sampler.generate(np.array([], np.int32), PARAMS)


def test_a_replaced_parameter_is_sampled_with_and_finds_no_old_kv(bound, path):
    module, sampler = bound
    sampler.generate(PROMPTS, PARAMS, seed=2)
    assert sampler.generate(PROMPTS, PARAMS, seed=2).num_cached[0] == 8
    version = sampler.version
    change(module)
    rollout = sampler.generate(PROMPTS, PARAMS, seed=2)  # nobody called update
    assert not rollout.num_cached.any() and sampler.version == version + 1
    assert set(rollout.weight_versions) == {((version + 1, 0, 10),)}
    np.testing.assert_allclose(
        rollout.logprobs[rollout.mask], dense_logprobs(module, rollout, 0.8), atol=2e-5
    )
    fresh = make_sampler(module, path)
    try:
        again = fresh.generate(PROMPTS, PARAMS, seed=2)
        np.testing.assert_array_equal(rollout.token_ids, again.token_ids)
        # Another engine's bits are promised with strict numerics only; 1e-6 apart was seen.
        np.testing.assert_allclose(rollout.logprobs, again.logprobs, atol=1e-5)
    finally:
        fresh.shutdown()


def test_a_param_that_was_replaced_is_refused_until_update_reads_it(bound):
    module, sampler = bound
    sampler.update()
    old = module.model.norm.weight
    version = sampler.version
    try:
        module.model.norm.weight = nnx.Param(old.get_value() * 2)
        with pytest.raises(RuntimeError, match=r"another nnx.Param as model.norm.weight .* update"):
            sampler.generate(PROMPTS, PARAMS)
        assert sampler.update() == version + 1
        rollout = sampler.generate(PROMPTS, PARAMS, seed=2)
        np.testing.assert_allclose(
            rollout.logprobs[rollout.mask], dense_logprobs(module, rollout, 0.8), atol=2e-5
        )
        module.model.norm.weight = old.get_value()
        for call in (sampler.update, partial(sampler.generate, PROMPTS, PARAMS)):
            with pytest.raises(RuntimeError, match=r"no nnx.Param model.norm.weight any more"):
                call()
    finally:
        module.model.norm.weight = old
        sampler.update()


def test_update_copies_nothing_and_compiles_nothing(bound):
    module, sampler = bound
    sampler.generate(PROMPTS, PARAMS)
    seconds = []
    for number in range(20):
        change(module, 0.99)
        leaves = [each.get_raw_value() for each in sampler._binding.variables]
        num_arrays = len(jax.live_arrays())
        with (
            jax.transfer_guard_device_to_host("disallow_explicit"),
            jax.transfer_guard_host_to_device("disallow_explicit"),
            jax.transfer_guard_device_to_device("disallow_explicit"),
        ):
            start = time.perf_counter()
            assert sampler.update(version=100 + number) == 100 + number
            seconds.append(time.perf_counter() - start)
        assert len(jax.live_arrays()) == num_arrays
        read = [each.get_raw_value() for each in sampler._binding.variables]
        assert all(one is other for one, other in zip(leaves, read, strict=True))
    assert sampler.generate(PROMPTS, PARAMS).weight_versions[0] == ((119, 0, 10),)
    assert sampler.stats().num_recompiles == 0
    assert sorted(seconds)[10] < 0.05  # 0.3 ms on an idle machine


def num_live_arrays() -> int:
    """Without those that wait for the garbage collector, also of earlier tests."""
    gc.collect()
    return len(jax.live_arrays())


def test_two_hundred_updates_while_sixteen_threads_sample(path):
    """Nothing is compiled, no array is left over, and each rollout says which weights its tokens are of."""
    module = make_module(path)
    sampler = make_sampler(module, path)
    own = nnx.state(module, nnx.Param)
    trees = [jax.tree.map(lambda x, factor=f: x * factor, own) for f in (1.0, 1.01, 1.02)]
    is_over = threading.Event()

    def sample(thread):
        found = []
        while not is_over.is_set():
            found.append(sampler.generate([[3 + thread, 4, 5]], PARAMS))
        return found

    try:
        sampler.generate(PROMPTS, PARAMS)
        num_arrays = num_live_arrays()
        with ThreadPoolExecutor(16) as pool:
            futures = [pool.submit(sample, thread) for thread in range(16)]
            for number in range(200):
                sampler.update(trees[number % 3], version=1000 + number)
            is_over.set()
            rollouts = [rollout for future in futures for rollout in future.result()]
        assert len(rollouts) >= 16
        for rollout in rollouts:
            spans = rollout.weight_versions[0]
            assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])]
            assert spans[-1][2] == 10 and np.isfinite(rollout.logprobs).all()
            assert list(spans) == sorted(spans)
        assert {version for r in rollouts for version, _, _ in r.weight_versions[0]} > {1199}
        assert sampler.stats().num_recompiles == 0
        assert num_live_arrays() == num_arrays
    finally:
        is_over.set()
        sampler.shutdown()


def test_update_with_arrays_of_the_callers(bound, path):
    module, sampler = bound
    before = sampler.generate(PROMPTS, PARAMS, seed=4)
    other = make_module(path, seed=1)
    given = nnx.state(other, nnx.Param)
    assert sampler.update(given) == sampler.version
    swapped = sampler.generate(PROMPTS, PARAMS, seed=4)
    np.testing.assert_allclose(
        swapped.logprobs[swapped.mask], dense_logprobs(other, swapped, 0.8), atol=2e-5
    )
    with pytest.raises(ValueError, match="params have nobody; the module"):
        sampler.update({"nobody": np.zeros(3, np.float32)})
    assert_same(swapped, sampler.generate(PROMPTS, PARAMS, seed=4))
    sampler.update()
    after = sampler.generate(PROMPTS, PARAMS, seed=4)
    assert_same(before, after)
    assert after.num_cached[0] == 0


def test_a_refused_update_leaves_the_old_weights(bound, path):
    module, sampler = bound
    before = sampler.generate(PROMPTS, PARAMS, seed=4)
    other = make_module(path, seed=2)
    sampler.update(other)
    expected = sampler.generate(PROMPTS, PARAMS, seed=4)
    norm = module.model.norm.weight
    kept, doomed = norm.get_value(), jnp.ones(32, jnp.float32)
    norm.set_value(doomed)
    doomed.delete()
    with pytest.raises(RuntimeError, match="model.norm.weight .* donated or deleted"):
        sampler.update()
    rollout = sampler.generate(PROMPTS, PARAMS, seed=4)
    assert_same(expected, rollout)
    assert sampler.check_parity(rollout).max_abs < 2e-5
    norm.set_value(kept)
    sampler.update()
    norm.set_value(doomed)
    with pytest.raises(RuntimeError, match="model.norm.weight .* donated or deleted"):
        sampler.update({"model": {"embed_tokens": other.model.embed_tokens}})
    norm.set_value(kept)
    sampler.update({"model": {"norm": module.model.norm}})  # nothing is left of the refused part
    rollout = sampler.generate(PROMPTS, PARAMS, seed=4)
    assert_same(before, rollout)
    assert sampler.check_parity(rollout).max_abs < 2e-5


def test_host_arrays_may_be_refilled_in_place(bound, path):
    module, sampler = bound
    buffers = {name: np.array(each.get_value()) for name, each in variables(module).items()}
    sampler.update(buffers)
    before = sampler.generate(PROMPTS, PARAMS, seed=4)
    other = make_module(path, seed=1)
    for name, each in variables(other).items():
        buffers[name][...] = each.get_value()
    assert_same(before, sampler.generate(PROMPTS, PARAMS, seed=4))  # until the update
    version = sampler.version
    assert sampler.update(buffers) == version + 1
    rollout = sampler.generate(PROMPTS, PARAMS, seed=4)
    np.testing.assert_allclose(
        rollout.logprobs[rollout.mask], dense_logprobs(other, rollout, 0.8), atol=2e-5
    )
    sampler.update()


def test_the_cache_is_kept_if_the_caller_says_so(bound):
    module, sampler = bound
    sampler.generate(PROMPTS, PARAMS)
    change(module)
    version = sampler.update(keep_cache=True)
    rollout = sampler.generate(PROMPTS, PARAMS)
    assert rollout.num_cached[0] == 8
    assert rollout.weight_versions[0] == ((version, 0, 10),)


def test_weights_that_change_in_the_middle_are_told_token_by_token(bound):
    module, sampler = bound
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    first = sampler.update()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(sampler.generate, PROMPTS, params, 2)
        while sampler.stats().generation_tokens % 1000 < 1:
            time.sleep(0.001)
        num_updates = 0
        while not future.done():
            change(module, 0.999)
            sampler.update()
            num_updates += 1
            time.sleep(0.005)
    rollout = future.result()
    for spans in rollout.weight_versions:
        versions, starts, ends = zip(*spans, strict=True)
        assert starts == (0, *ends[:-1]) and ends[-1] == 100
        assert list(versions) == sorted(set(versions))
        assert first <= versions[0] and versions[-1] <= sampler.version
    assert any(len(spans) > 1 for spans in rollout.weight_versions)


def test_a_deleted_parameter_fails_requests_and_not_the_engine(bound):
    module, sampler = bound
    norm = module.model.norm.weight
    kept, doomed = norm.get_value(), jnp.ones(32, jnp.float32)
    norm.set_value(doomed)
    sampler.generate(PROMPTS, PARAMS)
    doomed.delete()
    with pytest.raises(RuntimeError, match="parameter model.norm.weight .* donated or deleted"):
        sampler.generate(PROMPTS, PARAMS)
    with pytest.raises(RuntimeError, match="parameter model.norm.weight .* donated or deleted"):
        sampler.update()
    # As if it was deleted behind the check: more often than an engine survives failures.
    check, sampler._binding.check_usable = sampler._binding.check_usable, lambda: None
    for value in (doomed, None):  # None: its transfer failed
        norm.set_raw_value(value)
        for _ in range(4):
            with pytest.raises(
                StepFailedError, match="a parameter of the model was donated or deleted"
            ):
                sampler.generate(PROMPTS, PARAMS)
    sampler._binding.check_usable = check
    norm.set_value(kept)
    assert (sampler.generate(PROMPTS, PARAMS).lengths == 10).all()


def test_arrays_that_no_program_takes_fail_requests_and_not_the_engine(bound):
    module, sampler = bound
    norm = module.model.norm.weight
    kept = norm.get_value()
    expected = sampler.generate(PROMPTS, PARAMS, seed=1)
    away = jax.device_put(kept, jax.local_devices()[1])
    for array, match in [
        (kept.astype(jnp.bfloat16), r"model.norm.weight .* bfloat16\[32\].* float32\[32\].*update"),
        (kept[1:], r"model.norm.weight .* float32\[31\].* float32\[32\].*update"),
        (away, r"model.norm.weight .* is now on .*id=1.*id=0.*update\(\)"),
    ]:
        norm.set_value(array)
        with pytest.raises(RuntimeError, match=match):
            sampler.generate(PROMPTS, PARAMS)
        # As if it was replaced behind the check: more often than an engine survives failures.
        check, sampler._binding.check_usable = sampler._binding.check_usable, lambda: None
        for _ in range(4):
            with pytest.raises(StepFailedError, match="a parameter of the model is now .*update"):
                sampler.generate(PROMPTS, PARAMS)
        sampler._binding.check_usable = check
        if array is away:
            sampler.update()
            assert_same(expected, sampler.generate(PROMPTS, PARAMS, seed=1))
        else:
            with pytest.raises(RuntimeError, match=match):
                sampler.update()
    norm.set_value(kept)
    sampler.update()
    assert_same(expected, sampler.generate(PROMPTS, PARAMS, seed=1))


def test_no_array_of_the_trainers_is_held(bound):
    module, sampler = bound
    sampler.generate(PROMPTS, PARAMS)
    old = [weakref.ref(each.get_value()) for each in variables(module).values()]
    change(module)
    gc.collect()
    assert not any(reference() for reference in old)


def test_parity_with_the_dense_forward_is_measured(bound):
    module, sampler = bound
    rollout = sampler.generate(PROMPTS, PARAMS, n=4, seed=1)
    report = sampler.check_parity(rollout)
    assert report.token_count == 120 and report.max_abs < 2e-5 and report.k3 < 1e-9
    assert report.pearson > 0.99999
    wrong = dataclasses.replace(rollout, temperature=0.9)
    assert sampler.check_parity(wrong).max_abs > 0.01
    with pytest.raises(ValueError, match="'processed' at temperature 0.8 is not compared"):
        sampler.check_parity(dataclasses.replace(rollout, logprobs_mode="processed"))
    change(module)
    sampler.update()
    with pytest.raises(ValueError, match="of weight versions"):
        sampler.check_parity(rollout)


def test_a_trainers_module_is_sampled_from(path):
    module = make_module(path)
    theirs = Holder(in_layout("tunix", module, path))
    sampler = make_sampler(theirs, path)
    try:
        rollout = sampler.generate(PROMPTS, PARAMS, seed=1)
        np.testing.assert_allclose(
            rollout.logprobs[rollout.mask], dense_logprobs(module, rollout, 0.8), atol=2e-5
        )
        assert sampler.check_parity(rollout).max_abs < 2e-5
        batch, forward = rollout.to_padded(), sampler.logprob_fn()
        gradient = jax.jit(jax.grad(lambda params: forward(params, batch, 0.8).sum()))
        grads = gradient(nnx.state(theirs))
        assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))
        with pytest.raises(ValueError, match="params lack"):
            forward({}, batch)
        change(module), change(theirs)
        rollout = sampler.generate(PROMPTS, PARAMS, seed=1)
        np.testing.assert_allclose(
            rollout.logprobs[rollout.mask], dense_logprobs(module, rollout, 0.8), atol=2e-5
        )
        assert sampler.stats().num_recompiles == 0 and not rollout.num_cached.any()
    finally:
        sampler.shutdown()


def test_a_module_on_another_device_is_copied_by_update(path):
    module = make_module(path)
    away = jax.local_devices()[1]
    for variable in variables(module).values():
        variable.set_value(jax.device_put(variable.get_value(), away))
    sampler = make_sampler(module, path)
    try:
        first = sampler.generate(PROMPTS, PARAMS, seed=1)
        change(module)
        assert_same(first, sampler.generate(PROMPTS, PARAMS, seed=1))
        assert sampler.update() == 1
        rollout = sampler.generate(PROMPTS, PARAMS, seed=1)
        np.testing.assert_allclose(
            rollout.logprobs[rollout.mask], dense_logprobs(module, rollout, 0.8), atol=2e-5
        )
        assert sampler.stats().num_recompiles == 0
    finally:
        sampler.shutdown()


def test_options_that_make_no_sense_are_refused(path):
    module = make_module(path)
    for options, match in [
        ({"quantization": "int8"}, "quantization='int8' is not supported by samplers"),
        ({"kv_offload_dir": "/tmp/x", "swap_space": 1}, "kv_offload_dir"),
        ({"data_parallel_size": 2}, "one engine in one process"),
    ]:
        with pytest.raises(ValueError, match=match):
            Sampler(module, str(path), **options)


def test_given_tokens_are_scored(bound):
    module, sampler = bound
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 250, length).tolist() for length in (100, 7, 2)]
    targets = [rng.integers(0, 250, len(each)).tolist() for each in sequences]
    scored = sampler.score(sequences, top_k=3)
    of_targets = sampler.score(sequences, targets)
    assert scored.lengths.tolist() == [100, 7, 2] and of_targets.top_logprobs.shape == (3, 100, 0)
    # No token depends on the padding behind it.
    batch = jnp.asarray([tokens + [0] * (100 - len(tokens)) for tokens in sequences], jnp.int32)
    dense = nnx.jit(lambda module, batch: jax.nn.log_softmax(module(batch), -1))(module, batch)
    for row, tokens in enumerate(sequences):
        expected = np.asarray(dense[row, : len(tokens) - 1])
        places = np.arange(len(tokens) - 1)
        found = scored.logprobs[row, 1 : len(tokens)]
        np.testing.assert_allclose(found, expected[places, tokens[1:]], atol=2e-5)
        found = of_targets.logprobs[row, 1 : len(tokens)]
        np.testing.assert_allclose(found, expected[places, targets[row][1:]], atol=2e-5)
        best = -np.sort(-expected, axis=-1)[:, :3]
        found = scored.top_logprobs[row, 1 : len(tokens)]
        np.testing.assert_allclose(found, best, atol=2e-5)
        ids = scored.top_token_ids[row, 1 : len(tokens)]
        np.testing.assert_allclose(expected[places[:, None], ids], best, atol=2e-5)
    assert not scored.logprobs[:, 0].any() and not scored.logprobs[1, 7:].any()


def test_scores_that_cannot_be_had_are_refused(bound):
    _, sampler = bound
    for arguments, match in [
        (([[1, 2]], None, 0, 0.5), "temperature=0.5"),
        (([],), "token_ids are empty"),
        (([[1, 2]], [[1]]), "sequence 0 has 2 tokens and 1 targets"),
        (([[1, 2]], []), "0 targets for 1 sequences"),
        (([[1] * 128],), "128"),
        (([[1, 2]], None, -1), "top_k must be at least 0, got -1"),
    ]:
        with pytest.raises(ValueError, match=match):
            sampler.score(*arguments)


LONG = SamplingParams(max_tokens=100, ignore_eos=True)


@pytest.fixture
def running(bound):
    """A sampler with a long call under way, and the future of its rollout."""
    module, sampler = bound
    num_tokens = sampler.stats().generation_tokens
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(sampler.generate, PROMPTS, LONG, 2, 9)
        while sampler.stats().generation_tokens == num_tokens:
            time.sleep(0.0005)
        yield module, sampler, future
        if sampler.is_paused:
            sampler.wake()


def test_what_is_kept_over_pauses_has_the_tokens_it_would_have_had(bound):
    _, sampler = bound
    expected = sampler.generate(PROMPTS, LONG, n=2, seed=9)
    rng = np.random.default_rng(0)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(sampler.generate, PROMPTS, LONG, 2, 9)
        num_pauses = 0
        while not future.done():
            sampler.pause("keep")
            num_pauses += 1
            if num_pauses % 3 == 0:
                sampler.reset_prefix_cache(recompute=True)
            sampler.resume()
            time.sleep(rng.random() * 0.01)
        rollout = future.result()
    assert num_pauses > 1
    np.testing.assert_array_equal(rollout.token_ids, expected.token_ids)
    np.testing.assert_allclose(rollout.logprobs, expected.logprobs, atol=2e-5)


def test_a_partial_rollout_goes_on_under_new_weights(running):
    module, sampler, future = running
    sampler.pause("keep")
    first = sampler.version
    change(module)
    sampler.update(version=first + 50)
    assert not future.done()
    sampler.resume()
    rollout = future.result()
    assert (rollout.lengths == 100).all()
    for spans in rollout.weight_versions:
        assert [version for version, _, _ in spans] in ([first, first + 50], [first + 50])
    assert any(len(spans) == 2 for spans in rollout.weight_versions)


def test_abort_returns_what_there_is(running):
    _, sampler, future = running
    sampler.abort()
    rollout = future.result(timeout=20)
    assert set(rollout.finish_reasons) <= {"abort", "length"} and rollout.lengths.sum() < 600
    assert not sampler.is_paused and sampler.stats().num_running == 0
    for row, spans in enumerate(rollout.weight_versions):
        assert spans == () or spans[-1][2] == rollout.lengths[row]
    assert (sampler.generate(PROMPTS, PARAMS).lengths == 10).all()


def test_abort_ends_calls_that_are_still_being_prepared_and_none_that_come_later(bound):
    _, sampler = bound
    goes_on = threading.Event()
    sampler._tasks.with_inputs(lambda _: goes_on.wait(20))
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(sampler.generate, PROMPTS, LONG)
        while not (sampler._tasks._input_thread._work_queue.qsize() or future.done()):
            time.sleep(0.001)
        sampler.abort()
        goes_on.set()
        rollout = future.result(timeout=20)
    assert set(rollout.finish_reasons) == {"abort"}
    assert (sampler.generate(PROMPTS, PARAMS).lengths == 10).all()


def test_abort_ends_no_pause_of_another_thread(bound):
    _, sampler = bound
    is_over = threading.Event()

    def abort():
        while not is_over.is_set():
            sampler.abort()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(abort)
        try:
            for _ in range(100):
                sampler.pause("keep")
                time.sleep(0.001)
                assert sampler.is_paused
                sampler.resume()
        finally:
            is_over.set()
            sampler.resume()
        future.result()


def test_pause_wait_answers_what_runs_and_holds_what_comes(running):
    _, sampler, future = running
    sampler.pause("wait")
    assert (future.result(timeout=20).lengths == 100).all()
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(sampler.generate, PROMPTS, PARAMS)
        time.sleep(0.1)
        assert not later.done()
        sampler.resume()
        assert (later.result(timeout=20).lengths == 10).all()
    with pytest.raises(ValueError, match="mode must be one of abort, wait, keep"):
        sampler.pause("now")


def test_asleep_no_pause_lets_suspended_requests_run(running):
    _, sampler, future = running
    sampler.sleep()
    with pytest.raises(RuntimeError, match="asleep.*wake"):
        sampler.pause("wait")
    sampler.pause("keep")
    assert not future.done()
    sampler.wake()
    assert (future.result(timeout=20).lengths == 100).all()


def test_a_sampler_that_was_resumed_meanwhile_does_not_sleep(running, monkeypatch):
    _, sampler, future = running
    pause = sampler.pause

    def pause_and_resume(mode):
        pause(mode)
        sampler.resume()  # as another thread may

    monkeypatch.setattr(sampler, "pause", pause_and_resume)
    with pytest.raises(RuntimeError, match="resumed.*sleep again"):
        sampler.sleep()
    assert (future.result(timeout=20).lengths == 100).all()


def live_bytes():
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_sleep_gives_the_pool_back_and_wake_compiles_nothing(running):
    _, sampler, future = running
    spec = sampler._runner.pool_spec
    sampler.pause()  # a step under way has the pool, donated
    size, before = spec.num_blocks * spec.bytes_per_block, live_bytes()
    sampler.sleep()
    sampler.sleep()
    assert before - live_bytes() > 0.95 * size and not future.done()
    with pytest.raises(RuntimeError, match="asleep"):
        sampler.resume()
    start = time.perf_counter()
    sampler.wake()
    assert time.perf_counter() - start < 1
    rollout, again = future.result(timeout=20), sampler.generate(PROMPTS, LONG, n=2, seed=9)
    np.testing.assert_array_equal(rollout.token_ids, again.token_ids)
    assert sampler.stats().num_recompiles == 0
    with pytest.raises(ValueError, match="weights=True"):
        sampler.sleep(weights=True)
