"""`LLM` gives the devices' memory back, wakes up, and has other weights."""

from __future__ import annotations

import jax
import pytest

from jaxpage import LLM, EngineAsleepError, SamplingParams, tiny
from tests.few_programs import few_programs

PARAMS = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, detokenize=False)
PROMPTS = [{"prompt_token_ids": ids} for ids in (list(range(5, 30)), [7, 8, 9])]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two checkpoints of one model."""
    root = tmp_path_factory.mktemp("weights")
    return [str(tiny.write_checkpoint(root / str(i), tiny.TINY_CONFIG, seed=i)) for i in range(2)]


def make(folder, **options) -> LLM:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128, "block_size": 8}
    with few_programs():
        return LLM(
            folder,
            dtype="float32",
            skip_tokenizer_init=True,
            kv_cache_memory_bytes="1M",
            **(sizes | options),
        )


@pytest.fixture(scope="module")
def llm(folders):
    return make(folders[0])


@pytest.fixture(scope="module")
def expected(folders, llm):
    """The tokens of each checkpoint."""
    found = [tokens(llm), tokens(make(folders[1]))]
    assert found[0] != found[1]
    return found


def tokens(llm):
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def bytes_on_device() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def finish(llm):
    found = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            found[output.request_id] = output.outputs[0]
    return found


def test_sleep_frees_pool_and_weights_and_waking_compiles_nothing(llm, expected):
    before, pool = bytes_on_device(), 2**20
    llm.sleep()
    asleep = bytes_on_device()
    assert llm.is_sleeping() and before - asleep > 0.95 * pool
    with pytest.raises(EngineAsleepError, match="wake_up before generation goes on"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert llm.wake_up(["weights"]) is False
    assert llm.is_sleeping()
    assert llm.wake_up() is True
    assert not llm.is_sleeping()
    assert tokens(llm) == expected[0] and llm.stats().num_recompiles == 0


def test_waking_on_several_devices_compiles_nothing(folders):
    llm = make(folders[0], tensor_parallel_size=2)
    expected = tokens(llm)
    llm.wait_until_warm()
    for _ in range(2):
        llm.sleep()
        llm.wake_up()
        assert tokens(llm) == expected and llm.stats().num_recompiles == 0


def test_other_weights_and_none(llm, folders, expected):
    version = llm.weight_version()
    assert llm.update_weights(folders[1]) == version + 1
    assert tokens(llm) == expected[1]
    llm.sleep(level=2)
    with pytest.raises(EngineAsleepError, match="discarded"):
        llm.wake_up()
    llm.update_weights(folders[0])
    llm.wake_up()
    assert tokens(llm) == expected[0] and llm.stats().num_recompiles == 0


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@pytest.mark.parametrize("overlap", [True, False])
def test_requests_that_run_when_it_falls_asleep(folders, expected, mode, overlap):
    llm = make(folders[0], async_scheduling=overlap, decode_steps=1)
    for number, prompt in enumerate(PROMPTS):
        llm.add_request(str(number), prompt, PARAMS)
    for _ in range(4):
        llm.step()
    llm.sleep(mode=mode)
    if mode == "keep":
        with pytest.raises(EngineAsleepError):
            llm.step()
    llm.wake_up()
    found = finish(llm)
    ends = {completion.finish_reason for completion in found.values()}
    whole = [list(found[str(i)].token_ids) for i in range(len(PROMPTS))]
    if mode == "abort":
        assert ends == {"abort"}
        assert all(ids == some[: len(ids)] for ids, some in zip(whole, expected[0], strict=True))
    else:
        assert ends == {"length"} and whole == expected[0]
    assert tokens(llm) == expected[0]


def test_what_cannot_be_done_is_refused(llm, folders, tmp_path, expected):
    with pytest.raises(ValueError, match="level must be 1 or 2"):
        llm.sleep(level=3)
    with pytest.raises(ValueError, match="mode must be one of"):
        llm.sleep(mode="now")
    with pytest.raises(ValueError, match="got 'cache'"):
        llm.wake_up(["cache"])
    with pytest.raises(ValueError):
        llm.update_weights(tmp_path)
    assert tokens(llm) == expected[0]
    replicas = make(folders[0], data_parallel_size=2, enforce_eager=True)
    with pytest.raises(ValueError, match="one replica on one host"):
        replicas.sleep()
