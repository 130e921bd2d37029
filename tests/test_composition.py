"""Sizing: the step between an engine's shapes and its programs."""

from __future__ import annotations

import dataclasses
import json
import logging

import jax
import pytest

from jaxpage import kernel_choice
from jaxpage.composition import (
    executable_cache,
    size,
    size_from_cache,
    spec_of_this_machine,
    specs_of_this_machine,
)
from jaxpage.config import EngineConfig
from jaxpage.device import Device
from jaxpage.engine_spec import make_engine_spec
from jaxpage.research_config import ResearchConfig
from pallas_kernels.paged_attention.tpu_layout import MOST_BLOCKS
from tests import checkpoints


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(checkpoints.build("qwen2", 0, tmp_path_factory.mktemp("qwen2")))


def make_spec(path, **options):
    small = dict(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=1024, dtype="float32")
    config = EngineConfig.from_options(model=path, **(small | options))
    spec = make_engine_spec(config, device=jax.devices("cpu")[0], device_memory=None)
    spec.transform_weights()
    return spec


def sized(spec, num_bytes, per_token=0, **options):
    return size(
        spec,
        available=lambda temp_bytes: num_bytes - temp_bytes,
        step_memory=lambda bucket: per_token * bucket.num_tokens,
        **options,
    )


def test_a_sized_engine_has_its_blocks_and_its_limits(path):
    spec = make_spec(path)
    assert spec.pool.num_blocks == 0
    found = sized(spec, 10**9)
    assert found.pool.num_blocks == found.config.num_gpu_blocks_override == 2 * 64 // 16 + 1
    assert (found.config.max_model_len, found.config.max_num_batched_tokens) == (64, 1024)
    assert found.groups is spec.groups and found.model is spec.model


def test_a_smaller_step_makes_room(path):
    spec = make_spec(path)
    # Two sequences fill 8 blocks, besides the null block. Of 10 blocks steps of 1024, 512, 256 and 128 tokens leave
    # 2, 6, 8 and 9.
    found = sized(spec, 10 * spec.block_bytes, per_token=spec.block_bytes // 128)
    assert found.config.max_num_batched_tokens == 128 and found.pool.num_blocks == 9


def test_what_does_not_fit_is_refused_or_returned(path):
    spec = make_spec(path)
    with pytest.raises(ValueError, match="largest max_model_len that fits is 32"):
        sized(spec, 3 * spec.block_bytes)
    assert sized(spec, 3 * spec.block_bytes, must_fit=False).pool.num_blocks == 3
    assert sized(spec, -5, must_fit=False).pool.num_blocks == 0


def test_no_more_blocks_than_the_tpu_kernel_can_name(path):
    spec = make_spec(path, num_gpu_blocks_override=MOST_BLOCKS + 5)
    assert sized(spec, 0).pool.num_blocks == MOST_BLOCKS + 5
    on_tpu = dataclasses.replace(spec, pool=dataclasses.replace(spec.pool, layout="tpu"))
    assert sized(on_tpu, 0).pool.num_blocks == MOST_BLOCKS


def test_nor_than_the_kernel_of_the_draft_model_can(path):
    drafts = {"model": path, "num_speculative_tokens": 2}
    most = {"num_gpu_blocks_override": MOST_BLOCKS + 5}
    spec = make_spec(path, speculative_config=drafts, **most)
    pool = dataclasses.replace(spec.draft_model.pool, layout="tpu")
    on_tpu = dataclasses.replace(spec.draft_model, pool=pool)
    found = sized(dataclasses.replace(spec, draft_model=on_tpu), 0)
    assert [pool.num_blocks for pool in found.pools] == [MOST_BLOCKS] * 2


def test_what_sizing_measured_is_kept(path, tmp_path, monkeypatch):
    spec = make_spec(path, compilation_cache_dir=str(tmp_path))
    cache = executable_cache(spec, flags="")
    available = 12 * spec.block_bytes
    measured = []

    def measure(spec, bucket):
        measured.append(bucket.name)
        return 0

    monkeypatch.setattr("jaxpage.composition.measured_step_memory", measure)
    first = size_from_cache(spec, cache, lambda temp_bytes: available)
    assert measured == ["forward T=1024"]
    # A little more memory is no reason to compile for another number of blocks.
    second = size_from_cache(spec, cache, lambda temp_bytes: available + spec.block_bytes // 2)
    assert measured == ["forward T=1024"]
    assert first.pool == second.pool and first.fingerprint() == second.fingerprint()
    assert make_spec(path, enforce_eager=True).config.enforce_eager
    eager = make_spec(path, enforce_eager=True, compilation_cache_dir=str(tmp_path))
    assert executable_cache(eager, flags="").store(first) is None


@pytest.mark.parametrize("architecture", ["JambaForCausalLM", "Qwen2VLForConditionalGeneration"])
def test_an_unknown_architecture_is_refused_before_anything_else(tmp_path, architecture):
    """Even where config.json lacks what a known one would be asked for, here the length of sequences."""
    values = {"architectures": [architecture], "model_type": "mamba", "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"{architecture} is not supported; supported are"):
        make_spec(str(tmp_path), max_model_len=None)


def test_several_hosts_are_no_matter_of_one_process(path):
    with pytest.raises(ValueError, match="nnodes=2, but this process sees 1"):
        spec_of_this_machine(EngineConfig(model=str(path), nnodes=2))


@pytest.mark.parametrize(("num_replicas", "most"), [(1, 8), (2, 4)])
def test_weights_too_many_for_one_device_are_shared_by_all_of_a_replica(
    num_replicas, most, path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    weights, of = sum(make_spec(path).weight_bytes.values()), Device.of
    options = {"model": path, "dtype": "float32", "data_parallel_size": num_replicas}
    for memory, num_devices in ((2 * weights, 1), (weights, most)):
        monkeypatch.setattr(
            Device, "of", lambda device, memory=memory, **_: of(device, memory_bytes=memory)
        )
        specs = specs_of_this_machine(EngineConfig.from_options(**options))
        assert [spec.num_devices for spec in specs] == [num_devices] * num_replicas
        assert (f"too many for one device: {most} share them" in caplog.text) is (num_devices > 1)


def test_experts_are_counted_where_there_are_some(path):
    with pytest.raises(ValueError, match="record_expert_load=True .* Qwen2ForCausalLM has none"):
        make_spec(path, record_expert_load=True)


@pytest.mark.parametrize(
    ("options", "join", "has_kernels"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"numerics": "strict"}, True, False),
        ({"research": ResearchConfig(captures=["blocks.0.hook_resid_pre"])}, True, False),
    ],
    ids=str,
)
def test_products_that_have_a_gradient_or_are_strict_stay_those_of_xla(
    options, join, has_kernels, path, monkeypatch
):
    chosen = []
    monkeypatch.setattr(kernel_choice, "choose_products", lambda model, _: chosen.append(model))
    config = EngineConfig.from_options(model=path, max_model_len=64, dtype="float32", **options)
    spec = make_engine_spec(config, device=jax.devices("cpu")[0], device_memory=None)
    spec.transform_weights(join=join)
    assert chosen == [spec.model] * has_kernels
