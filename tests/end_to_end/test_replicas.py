"""Engines side by side on devices of their own answer as one, also while one of them fails."""

from __future__ import annotations

import asyncio
import json
import urllib.request

import jax
import pytest

from jaxpage import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from jaxpage.config import EngineConfig
from tests import checkpoints
from tests.end_to_end.test_parity import prompts_of
from tests.end_to_end.test_tensor_parallel import params
from tests.few_programs import few_programs
from tests.server.conftest import serving
from tests.server.stubs import Scrape

LENGTHS = (1, 30, 7, 64, 90, 30, 11, 5, 40, 3)


class Killed(BaseException):
    """Ends a thread."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With one layer: replicas exchange nothing."""
    return checkpoints.build("qwen2", 0, tmp_path_factory.mktemp("qwen2"), num_hidden_layers=1)


def make(folder, **options) -> LLM:
    return checkpoints.make_llm(folder, **({"enforce_eager": True} | options))


def all_answers(llm: LLM) -> list[checkpoints.Answer]:
    """Of prompts that are answered together, and of a beam search."""
    prompts = prompts_of(LENGTHS)
    found = checkpoints.answers(llm, prompts, [params(i) for i in range(len(prompts))])
    searches = llm.beam_search(prompts[1:3], BeamSearchParams(beam_width=3, max_tokens=9))
    return found + [(s.tokens, [s.cum_logprob]) for search in searches for s in search.sequences]


@pytest.fixture(scope="module")
def wanted(folder) -> list[checkpoints.Answer]:
    """What one engine answers."""
    return all_answers(make(folder))


def devices_of(llm: LLM) -> list[set[jax.Device]]:
    """Where the arrays of each replica are."""
    found = []
    for replica in llm._engine._all:
        runner = replica.engine.runner
        arrays = [*runner._leaves(), *jax.tree.leaves((runner._kv_pool, runner._state))]
        found.append(set().union(*(array.sharding.device_set for array in arrays)))
    return found


@pytest.mark.slow
def test_two_replicas_answer_as_one_engine(folder, wanted):
    llm = make(folder, data_parallel_size=2)
    assert devices_of(llm) == [{jax.devices()[0]}, {jax.devices()[1]}]
    checkpoints.assert_same_answers(all_answers(llm), wanted, atol=1e-4)
    stats = llm.stats()
    assert stats.num_requests_finished == len(LENGTHS) + 2
    assert all(part.num_requests_finished for part in stats.replicas)
    assert stats.num_steps == sum(part.num_steps for part in stats.replicas)
    assert {record.replica for record in llm.programs()} == {0, 1}
    assert llm.kv_snapshot(replica=1).num_steps == stats.replicas[1].num_steps
    assert llm.reset_prefix_cache()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_two_replicas_of_two_devices_answer_as_one_engine(folder, wanted, overlap):
    llm = make(folder, data_parallel_size=2, tensor_parallel_size=2, async_scheduling=overlap)
    assert devices_of(llm) == [set(jax.devices()[:2]), set(jax.devices()[2:4])]
    checkpoints.assert_same_answers(all_answers(llm), wanted, atol=1e-4)


@pytest.mark.slow
def test_few_blocks_and_swapping(folder, wanted):
    options = {"num_gpu_blocks_override": 45, "preemption_mode": "swap", "swap_space": 0.01}
    llm = make(folder, data_parallel_size=2, **options)
    checkpoints.assert_same_answers(all_answers(llm), wanted, atol=1e-4)
    assert llm.stats().num_preemptions


@pytest.mark.slow
@pytest.mark.parametrize("when", [2, 9])
def test_a_replica_that_is_killed_under_load_costs_no_request(folder, wanted, when, monkeypatch):
    llm = make(folder, data_parallel_size=2)
    runner = llm._engine._all[0].engine.runner
    collect, num_left = runner.collect, [when]

    def collect_or_kill(launched):
        num_left[0] -= 1
        if num_left[0] < 0:
            raise Killed
        return collect(launched)

    monkeypatch.setattr(runner, "collect", collect_or_kill)
    checkpoints.assert_same_answers(all_answers(llm), wanted, atol=1e-4)
    assert llm.stats().num_failed_replicas == 1


@pytest.mark.slow
def test_an_equal_start_finds_the_programs_of_each_replica(folder, tmp_path, fresh_cache):
    cache = str(tmp_path)
    found = []
    for num_replicas in (1, 2, 2):
        llm = checkpoints.make_llm(
            folder, data_parallel_size=num_replicas, compilation_cache_dir=cache
        )
        llm.wait_until_warm()
        found.append(checkpoints.answers(llm, [[5, 6], [7]], [params(0), params(2)]))
        origins = {program.origin for program in llm.programs()}
        assert origins == {"stored"} or len(found) <= 2
        assert llm.stats().num_recompiles == 0
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_replicas_share_a_folder_of_blocks(folder, tmp_path):
    options = {"swap_space": 0.1, "kv_offload_dir": str(tmp_path), "data_parallel_size": 2}
    prompts, one = prompts_of((90, 64, 40, 90)), SamplingParams(temperature=0, max_tokens=6)
    prompts[3] = prompts[0]
    llm = make(folder, **options)
    first = llm.generate(prompts, one, use_tqdm=False)
    llm.save_prefix_cache()
    assert len(list(tmp_path.iterdir())) == 1
    later = make(folder, **options)
    again = later.generate(prompts, one, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in first]
    assert [o.num_cached_tokens for o in again] == [(len(p) - 1) // 8 * 8 for p in prompts]
    assert all(part.num_disk_hit_blocks for part in later.stats().replicas)


def test_what_replicas_cannot_do_is_refused(folder):
    with pytest.raises(
        ValueError, match=r"data_parallel_size=3 times tensor_parallel_size=4, .* has 8 .*count=12"
    ):
        make(folder, data_parallel_size=3, tensor_parallel_size=4)
    for name in ("mesh", "record_calls"):
        with pytest.raises(ValueError, match=f"{name} is for one engine, but data_parallel_size=2"):
            EngineConfig(model="m", data_parallel_size=2, **{name: "x"})


@pytest.mark.slow
def test_a_server_of_two_replicas(tiny_folder):
    """Its metrics and its view tell of both; it is healthy until the last one has failed."""
    with few_programs():
        llm = AsyncLLM(
            tiny_folder,
            data_parallel_size=2,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            num_gpu_blocks_override=100,
            enforce_eager=True,
        )
    with serving(llm, served_model_name=("tiny",)) as url:
        for number in range(4):
            body = {"model": "tiny", "prompt": f"{number} dogs", "max_tokens": 4}
            request = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            assert json.load(urllib.request.urlopen(request, timeout=60))["choices"]
        found = Scrape(urllib.request.urlopen(f"{url}/metrics", timeout=60).read())
        tokens = [found["vllm:generation_tokens_total", f"engine={i}"] for i in (0, 1)]
        assert all(tokens) and sum(tokens) == llm.stats().generation_tokens
        assert found.label_values("jaxpage:replica_up", "engine") == ["0", "1"]
        view = json.load(urllib.request.urlopen(f"{url}/page/engine", timeout=60))
        assert view["pool"]["blocks"] == 2 * 99 and len(view["stats"]["replicas"]) == 2
        names = [program["name"] for program in view["programs"]]
        assert len(names) == len(set(names))
        asyncio.run(llm.check_health())
    llm.shutdown()
