"""Engines whose devices share weights and heads answer as one device does, whatever else is on."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxpage import BeamSearchParams, SamplingParams
from tests import checkpoints
from tests.end_to_end.test_parity import prompts_of

# What may be on besides -> options. With few blocks sequences are preempted, and their blocks leave the device.
WAYS = {
    "plain": {},
    "decode steps one by one": {"decode_steps": 1},
    "quantised pool": {"kv_cache_dtype": "int8"},
    "int8 weights": {"quantization": "int8"},
    "no prefix cache": {"enable_prefix_caching": False},
    "preempted": {"num_gpu_blocks_override": 45, "preemption_mode": "recompute"},
    "swapped": {"num_gpu_blocks_override": 45, "preemption_mode": "swap", "swap_space": 0.01},
}


def params(prompt: int) -> SamplingParams:
    """Greedy, and two sequences drawn by one seed."""
    drawn = prompt % 3 == 2
    return SamplingParams(
        temperature=0.9 if drawn else 0.0,
        n=2 if drawn else 1,
        seed=prompt,
        max_tokens=24,
        ignore_eos=True,
        logprobs=2,
        detokenize=False,
    )


def all_answers(path, **options) -> list[checkpoints.Answer]:
    """Of prompts that are answered together, and of a beam search."""
    prompts = prompts_of((1, 30, 7, 64, 90, 30, 11))
    prompts[5] = prompts[4][:60] + prompts[5]
    llm = checkpoints.make_llm(path, enforce_eager=True, **options)
    found = checkpoints.answers(llm, prompts, [params(i) for i in range(len(prompts))])
    searches = llm.beam_search(prompts[1:3], BeamSearchParams(beam_width=3, max_tokens=9))
    found += [(s.tokens, [s.cum_logprob]) for search in searches for s in search.sequences]
    return found


@pytest.fixture(scope="module")
def answers_of_one():
    """What one device answers, kept for all numbers of devices that are compared with it."""
    kept: dict[tuple, list[checkpoints.Answer]] = {}

    def answers(family, variant, way, path):
        key = (family, variant, way)
        if key not in kept:
            kept.clear()
            kept[key] = all_answers(path, **WAYS[way])
        return kept[key]

    return answers


def cases():
    """All; those that are not `deep` have each family once, and each way."""
    families, sizes = list(checkpoints.VARIANTS), (2, 4, 8)
    sampled = {("qwen2", 0, 2, "plain")} | {
        (family, i % 2, sizes[i % 3], list(WAYS)[2 * i % len(WAYS)])
        for i, family in enumerate(families)
    }
    for family, variant in checkpoints.CASES:
        for way, num_devices in itertools.product(WAYS, sizes):
            case = (family, variant, num_devices, way)
            marks = pytest.mark.slow if case in sampled else pytest.mark.deep
            name = f"{family}-{variant}-{num_devices}-{way}"
            yield pytest.param(*case, marks=marks, id=name)


@pytest.mark.parametrize(("family", "variant", "num_devices", "way"), list(cases()))
def test_tokens_are_those_of_one_device(
    family, variant, num_devices, way, tmp_path, answers_of_one
):
    path = checkpoints.build(family, variant, tmp_path)
    one = answers_of_one(family, variant, way, path)
    several = all_answers(path, tensor_parallel_size=num_devices, **WAYS[way])
    # The last bit of a sum over devices decides which way a number is rounded to int8.
    rounds = way in ("quantised pool", "int8 weights")
    checkpoints.assert_same_answers(several, one, atol=3e-2 if rounds else 1e-4)


def test_a_mesh_of_the_user_is_taken_and_nothing_is_whole_on_a_device(tmp_path):
    path = checkpoints.build("llama", 0, tmp_path)
    mesh = Mesh(np.array(jax.devices()[4:8]).reshape(2, 2), ("data", "model"))
    llm = checkpoints.make_llm(path, mesh=mesh)
    built = llm._engine.runner
    arrays = [*built._leaves(), *jax.tree.leaves((built._kv_pool, built._state))]
    for array in arrays:
        assert set(array.sharding.device_set) == set(mesh.devices.flat)
    pool = jax.tree.leaves(built._kv_pool)[0]
    assert pool.sharding.shard_shape(pool.shape)[2] == pool.shape[2] // 4
    assert len(checkpoints.answers(llm, [[5, 6]], [params(0)])) == 1
    assert llm.stats().num_recompiles == 0


@pytest.mark.slow
def test_an_equal_start_finds_its_programs(tmp_path, fresh_cache):
    path, cache = checkpoints.build("llama", 0, tmp_path / "model"), str(tmp_path / "cache")
    found = []
    for first in (0, 6, 0, 6):
        mesh = Mesh(np.array(jax.devices()[first : first + 2]), ("x",))
        llm = checkpoints.make_llm(path, mesh=mesh, compilation_cache_dir=cache)
        llm._engine.runner.wait_until_warm()
        origins = {program.origin for program in llm.programs()}
        found.append(checkpoints.answers(llm, [[5, 6]], [params(0)]))
        assert origins == {"stored"} or len(found) <= 2
    assert found[0] == found[1] == found[2] == found[3]


def test_devices_that_are_not_there_are_asked_for(tmp_path):
    path = checkpoints.build("llama", 0, tmp_path)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=16, but .* has 8 .*count=16"):
        checkpoints.make_llm(path, tensor_parallel_size=16)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    with pytest.raises(ValueError, match="tensor_parallel_size=4, but mesh has 2 devices"):
        checkpoints.make_llm(path, tensor_parallel_size=4, mesh=mesh)
