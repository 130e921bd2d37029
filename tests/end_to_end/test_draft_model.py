"""A draft model guesses: a request has the tokens that it has without, and a model that is the model itself is right.

The latter is the strongest check of the draft model's KV: one wrong key or value anywhere, and some guess is wrong.
"""

import dataclasses
import shutil

import pytest
from safetensors.numpy import load_file, save_file

from jaxpage import LLM, SamplingParams
from jaxpage.config import EngineConfig
from jaxpage.engine_spec import EngineSpec
from tests import checkpoints, picture_models
from tests.checkpoints import VOCAB_SIZE, answers, assert_same_answers, make_llm
from tests.end_to_end import test_speculation

ONE_LAYER = {"num_hidden_layers": 1}


def requests() -> tuple[list[dict], list[SamplingParams]]:
    """Those of prompt lookup without the one that ends at a stop id: drafts after it count as wrong."""
    prompts, params = test_speculation.requests()
    kept = [i for i, each in enumerate(params) if not each.stop_token_ids]
    assert len(kept) == len(params) - 1
    return [prompts[i] for i in kept], [params[i] for i in kept]


def drafts_of(folder, number: int = 4) -> dict:
    return {"speculative_config": {"model": str(folder), "num_speculative_tokens": number}}


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    return checkpoints.build("qwen2", 0, tmp_path_factory.mktemp("qwen2"), **ONE_LAYER)


@pytest.fixture(scope="module")
def expected(qwen2):
    return answers(make_llm(qwen2, enforce_eager=True), *requests())


def check_all_right(llm: LLM) -> None:
    stats = llm.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 150
    assert not stats.num_blocks_used


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"num_gpu_blocks_override": 24}, id="preempted"),
        pytest.param(
            {"num_gpu_blocks_override": 24, "swap_space": 0.01, "preemption_mode": "swap"},
            id="swapped",
        ),
        pytest.param({"max_num_batched_tokens": 16}, id="chunks"),
        pytest.param({"block_size": 4}, id="small blocks"),
        pytest.param({"tensor_parallel_size": 2}, id="two devices"),
    ],
)
def test_the_model_itself_drafts_what_it_samples(options, qwen2, expected):
    """Random rows too: both draw with the same numbers. Two sequences of a prompt share a block, and copy it."""
    llm = make_llm(qwen2, enforce_eager=True, **drafts_of(qwen2), **options)
    assert_same_answers(answers(llm, *requests()), expected, atol=2e-4)
    check_all_right(llm)
    few_blocks = "num_gpu_blocks_override" in options
    assert (llm.stats().num_preemptions > 0) == few_blocks
    # Prompts are found in the prefix cache now, the draft model's KV with them.
    assert_same_answers(answers(llm, *requests()), expected, atol=2e-4)
    assert llm.stats().prefix_cache_hits > 0 or few_blocks
    check_all_right(llm)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.deep), "int8"])
def test_blocks_on_disk_have_the_kv_of_both_models(dtype, qwen2, expected, tmp_path):
    """Two engines, the second of which finds what the first has left; one with another draft model finds nothing."""
    options = {"enforce_eager": True, "swap_space": 0.01, "kv_offload_dir": str(tmp_path / "kv")}
    options |= {"kv_cache_dtype": dtype}
    plain = answers(make_llm(qwen2, enforce_eager=True, kv_cache_dtype=dtype), *requests())
    for _ in range(2):
        llm = make_llm(qwen2, **drafts_of(qwen2), **options)
        assert_same_answers(answers(llm, *requests()), plain, atol=2e-4)
        check_all_right(llm)
        hits = llm.stats().prefix_cache_hits
        llm.save_prefix_cache()
    assert hits > 0
    other = checkpoints.build("qwen2", 2, tmp_path / "other")
    llm = make_llm(qwen2, **drafts_of(other), **options)
    assert_same_answers(answers(llm, *requests()), plain, atol=2e-4)
    assert llm.stats().prefix_cache_hits == 0


@pytest.mark.slow
def test_any_other_model_may_draft(qwen2, expected, tmp_path):
    """Of another family, with other heads; most of its guesses are wrong."""
    other = checkpoints.build("llama", 1, tmp_path)
    llm = make_llm(qwen2, enforce_eager=True, **drafts_of(other))
    assert_same_answers(answers(llm, *requests()), expected, atol=2e-4)
    stats = llm.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens / 2 and not stats.num_blocks_used


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_int8",
    [
        pytest.param(False, id="floats", marks=pytest.mark.deep),
        pytest.param(True, id="int8 pool and weights"),
    ],
)
def test_windows_of_both_models(is_int8, tmp_path):
    path = checkpoints.build("gemma3", 0, tmp_path)
    options = {"quantization": "int8", "kv_cache_dtype": "int8"} if is_int8 else {}
    options |= {"enforce_eager": True, "enable_prefix_caching": False}
    expected = answers(make_llm(path, **options), *requests())
    llm = make_llm(path, **drafts_of(path), **options)
    assert_same_answers(answers(llm, *requests()), expected, atol=2e-4)
    check_all_right(llm)


@pytest.mark.slow
def test_nothing_compiles_after_start_up(qwen2, expected):
    """Rows without drafts share steps with others, and the weights leave the device for a while."""
    llm = make_llm(qwen2, **drafts_of(qwen2))
    llm.wait_until_warm()
    whole = SamplingParams(temperature=0, max_tokens=6, logprobs=-1, ignore_eos=True)
    llm.add_request("whole vocabulary", {"prompt_token_ids": [5, 6, 7]}, whole)
    llm.step()
    assert_same_answers(answers(llm, *requests()), expected, atol=2e-4)
    llm.sleep()
    llm.wake_up()
    assert_same_answers(answers(llm, *requests()), expected, atol=2e-4)
    assert llm.stats().num_recompiles == 0
    check_all_right(llm)


@pytest.mark.slow
def test_update_weights_does_not_replace_the_draft_model(qwen2, tmp_path):
    shape = checkpoints.VARIANTS["qwen2"][0] | ONE_LAYER
    new = checkpoints.build_from("Qwen2Config", shape, tmp_path, seed="new")
    prompts, params = requests()
    expected = answers(make_llm(new, enforce_eager=True), prompts, params)
    llm = make_llm(qwen2, enforce_eager=True, **drafts_of(new))
    llm.sleep(level=2)
    llm.update_weights(str(new))
    llm.wake_up()
    assert_same_answers(answers(llm, prompts, params), expected, atol=2e-4)
    check_all_right(llm)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE + 8, VOCAB_SIZE - 8])
def test_vocabularies_may_be_padded_differently(vocab_size, qwen2, expected, tmp_path):
    other = checkpoints.build("qwen2", 0, tmp_path, **ONE_LAYER, vocab_size=vocab_size)
    llm = make_llm(qwen2, enforce_eager=True, **drafts_of(other, 2))
    assert_same_answers(answers(llm, *requests()), expected, atol=2e-4)


def spec_of(path, **options) -> EngineSpec:
    from jaxpage.composition import spec_of_this_machine

    return spec_of_this_machine(EngineConfig(model=str(path), dtype="float32", **options))


@pytest.mark.parametrize(
    ("family", "changes", "options", "message"),
    [
        ("qwen2", {}, {"numerics": "strict"}, "not for a draft model"),
        ("qwen2", {"vocab_size": 4000}, {}, "vocabulary of 4,000 tokens"),
        (None, {}, {}, "draft model of speculative_config: .*config.json does not exist"),
    ],
)
def test_what_cannot_draft_is_refused(family, changes, options, message, qwen2, tmp_path):
    if family is not None:
        checkpoints.build(family, 0, tmp_path, **ONE_LAYER, **changes)
    with pytest.raises(ValueError, match=message):
        spec_of(qwen2, **drafts_of(tmp_path), **options)


def test_damaged_weights_are_said_to_be_the_draft_models(qwen2, tmp_path):
    other = shutil.copytree(qwen2, tmp_path / "drafts")
    weights = load_file(other / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, other / "model.safetensors")
    message = "the draft model of speculative_config: .* it lacks model.norm.weight"
    with pytest.raises(ValueError, match=message):
        make_llm(qwen2, enforce_eager=True, **drafts_of(other))


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [pytest.param("gemma3_config", marks=pytest.mark.deep), "qwen3_vl_config"]
)
def test_of_a_model_that_takes_pictures_the_text_part_drafts(config, tmp_path):
    path = picture_models.save(getattr(picture_models, config)(), tmp_path, seed="drafts")
    prompts, params = requests()
    options = {"enforce_eager": True, "limit_mm_per_prompt": {"image": 0, "video": 0}}
    expected = answers(make_llm(path, **options), prompts, params)
    for limits in (options, {"enforce_eager": True}):
        llm = make_llm(path, **drafts_of(path), **limits)
        assert_same_answers(answers(llm, prompts, params), expected, atol=2e-4)
        check_all_right(llm)


def test_a_draft_model_must_not_see_more_than_the_model_keeps(qwen2, tmp_path):
    path = checkpoints.build("mistral", 0, tmp_path)
    spec = spec_of(path, max_model_len=128)
    assert None not in spec.groups.windows
    with pytest.raises(ValueError, match="sees 128 tokens, and the model keeps the KV of"):
        spec_of(path, max_model_len=128, **drafts_of(qwen2))


def test_memory_is_that_of_both_models(qwen2):
    spec, both = spec_of(qwen2), spec_of(qwen2, **drafts_of(qwen2))
    assert both.block_bytes == 2 * spec.block_bytes
    assert sum(both.weight_bytes.values()) == 2 * sum(spec.weight_bytes.values())
    assert both.with_blocks(7).draft_model.pool.num_blocks == 7
    facts = both.fingerprint()
    other = dataclasses.replace(both, draft_model=None).fingerprint()
    assert facts.items() > {k: v for k, v in other.items() if k != "steps"}.items()


def test_windows_share_the_arrays_of_both_pools(tmp_path):
    """The draft model's layers are spread over the groups of the model's, and so a block is as large as necessary."""
    path = checkpoints.build("gemma3", 0, tmp_path)
    spec, both = spec_of(path), spec_of(path, **drafts_of(path))
    assert len(spec.groups.windows) == 3
    assert sorted(both.draft_model.layer_locations) == sorted(spec.groups.layer_locations)
    assert both.block_bytes == 2 * spec.block_bytes
