"""What is done to an engine for all requests at once: its weights are replaced, and it sleeps."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpage import SamplingParams, tiny
from jaxpage.async_llm import AsyncLLM, EngineAsleepError
from tests.few_programs import few_programs

PARAMS = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)
PROMPTS = [list(range(5, 30)), [7, 8, 9]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two checkpoints of one model, which has one layer."""
    root, config = tmp_path_factory.mktemp("weights"), tiny.TINY_CONFIG | {"num_hidden_layers": 1}
    return [tiny.write_checkpoint(root / str(i), config, seed=i) for i in range(2)]


def make(folder, **options) -> AsyncLLM:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128, "block_size": 8}
    with few_programs():
        return AsyncLLM(
            str(folder),
            dtype="float32",
            skip_tokenizer_init=True,
            kv_cache_memory_bytes="1M",
            **(sizes | options),
        )


@pytest.fixture(scope="module")
def llm(folders):
    llm = make(folders[0])
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def expected(folders, llm):
    """The tokens of each checkpoint."""
    second = make(folders[1])
    found = [tokens(llm), tokens(second)]
    second.shutdown()
    assert found[0] != found[1]
    return found


def tokens(llm, params=PARAMS):
    futures = [llm.submit({"prompt_token_ids": p}, params) for p in PROMPTS]
    return [list(f.result().outputs[0].token_ids) for f in futures]


def run(coroutine):
    return asyncio.run(coroutine)


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8", "enable_lora": True, "max_loras": 2},
        {"tensor_parallel_size": 2, "quantization": "int8"},
    ],
    ids=["int8 and adapters", "two devices"],
)
def test_replaced_weights_are_those_of_a_new_engine(folders, options):
    llm, second = (make(folder, enforce_eager=True, **options) for folder in folders)
    try:
        before, num_compiled = tokens(llm), llm.stats().num_recompiles
        assert run(llm.update_weights(folders[1])) == 1 == run(llm.weight_version())
        assert tokens(llm) == tokens(second) != before
        assert llm.stats().num_recompiles == num_compiled > 0
    finally:
        llm.shutdown()
        second.shutdown()


def test_there_and_back(llm, folders, expected):
    run(llm.wait_until_warm())
    assert tokens(llm) == expected[0]
    for i in (1, 0):
        version = run(llm.update_weights(folders[i]))
        output = llm.submit({"prompt_token_ids": PROMPTS[0]}, PARAMS).result()
        assert output.num_cached_tokens == 0
        assert output.outputs[0].weight_versions == [(version, 0, 10)]
        assert tokens(llm) == expected[i]
    assert llm.stats().num_recompiles == 0


def test_while_requests_run(llm, folders, expected):
    """So many that they take longer than reading a checkpoint, and of different lengths: they do not end together."""
    lengths = [31 + 37 * i % 60 for i in range(180)]
    futures = [
        llm.submit({"prompt_token_ids": PROMPTS[0]}, dataclasses.replace(LONG, max_tokens=length))
        for length in lengths
    ]
    version = run(llm.update_weights(folders[1]))
    spans = [future.result().outputs[0].weight_versions for future in futures]
    run(llm.update_weights(folders[0]))
    assert tokens(llm) == expected[0]
    found = [[v for v, _, _ in each] for each in spans]
    assert [version - 1, version] in found
    assert all(each in ([version - 1], [version - 1, version], [version]) for each in found)
    assert [each[-1][2] for each in spans] == lengths


def damaged(folder, kind):
    file = folder / "model.safetensors"
    match kind:
        case "truncated":
            file.write_bytes(file.read_bytes()[:-100])
        case "gone":
            file.unlink()
        case "lacks":
            arrays = load_file(file)
            del arrays["model.norm.weight"]
            save_file(arrays, file)
        case "shape":
            arrays = load_file(file)
            arrays["model.norm.weight"] = np.ones(32, np.float32)
            save_file(arrays, file)


@pytest.mark.parametrize("kind", ["truncated", "gone", "lacks", "shape", "none"])
def test_a_checkpoint_that_does_not_fit_changes_nothing(llm, folders, expected, tmp_path, kind):
    folder = tmp_path / "broken"
    if kind != "none":
        shutil.copytree(folders[1], folder)
        damaged(folder, kind)
    version = run(llm.weight_version())
    with pytest.raises(ValueError):
        run(llm.update_weights(folder))
    assert tokens(llm) == expected[0] and run(llm.weight_version()) == version


def on_device(llm):
    """Bytes of weights, and of the pool, that are on the devices between two steps."""
    runner = llm._tasks.engine.runner

    def count():
        leaves = [leaf for leaf in runner._leaves() if isinstance(leaf, jax.Array)]
        pool = [leaf for leaf in jax.tree.leaves(runner._kv_pool) if not leaf.is_deleted()]
        return sum(leaf.nbytes for leaf in leaves), sum(leaf.nbytes for leaf in pool)

    # A step that begins takes the pool: another thread may find it gone.
    return run(llm._call(count))


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_asleep_there_is_nothing_on_the_devices(llm, expected, mode):
    awake, version = on_device(llm), run(llm.weight_version())
    alone = tokens(llm, LONG)
    assert min(awake) > 0 and not run(llm.is_sleeping())
    futures = [llm.submit({"prompt_token_ids": p}, LONG) for p in PROMPTS]
    run(llm.sleep(mode=mode))
    assert on_device(llm) == (0, 0) and run(llm.is_sleeping()) and run(llm.is_paused())
    for verb in (llm.resume_generation, llm.pause_generation):
        with pytest.raises(EngineAsleepError, match="asleep: wake_up"):
            run(verb())
    waiting = llm.submit({"prompt_token_ids": PROMPTS[0]}, PARAMS)
    assert run(llm.wake_up(["weights"])) is False
    assert on_device(llm) == (awake[0], 0) and run(llm.is_sleeping())
    assert run(llm.wake_up(["kv_cache"])) is True
    assert on_device(llm) == awake and not run(llm.is_sleeping()) and not run(llm.is_paused())
    answers = [list(f.result().outputs[0].token_ids) for f in futures]
    for answer, whole in zip(answers, alone, strict=True):
        assert answer == (whole[: len(answer)] if mode == "abort" else whole)
    assert list(waiting.result().outputs[0].token_ids) == expected[0][0]
    assert run(llm.weight_version()) == version and llm.stats().num_recompiles == 0


def test_discarded_weights_must_come_again(llm, folders, expected):
    run(llm.sleep(1))
    run(llm.sleep(2))
    with pytest.raises(EngineAsleepError, match=r"level=2.* update_weights, then wake_up"):
        run(llm.wake_up())
    assert run(llm.is_paused())
    run(llm.update_weights(folders[0]))
    run(llm.wake_up())
    assert tokens(llm) == expected[0] and not run(llm.is_paused())
    assert run(llm.wake_up()) is True  # it is awake already


def test_what_cannot_be_asked(llm, expected):
    with pytest.raises(ValueError, match="level must be 0, 1 or 2, got 3"):
        run(llm.sleep(3))
    with pytest.raises(ValueError, match="tags are of weights, kv_cache, got 'all'"):
        run(llm.wake_up(["all"]))
    with pytest.raises(ValueError, match="mode must be one of"):
        run(llm.sleep(mode="now"))
    assert tokens(llm) == expected[0]


def test_replicas_keep_their_weights(folders):
    llm = make(folders[0], data_parallel_size=2, enforce_eager=True)
    try:
        for verb in (llm.sleep, llm.wake_up, llm.weight_version, lambda: llm.update_weights("x")):
            with pytest.raises(ValueError, match="one replica on one host"):
                run(verb())
        assert not run(llm.is_sleeping())
    finally:
        llm.shutdown()
