"""With drafts a request has the tokens that it has without, in fewer steps."""

import numpy as np
import pytest

from jaxpage import SamplingParams
from jaxpage.runner.logits import Division
from jaxpage.runner.step import Step
from tests import checkpoints, dense_families
from tests.checkpoints import VOCAB_SIZE, answers, assert_same_answers, make_llm

LOOKUP = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


def requests() -> tuple[list[dict], list[SamplingParams]]:
    """Prompts that repeat themselves, and each kind of parameter that looks at earlier tokens."""
    rng = np.random.default_rng(0)
    kinds = [
        {},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.1},
        {"temperature": 0.6, "seed": 1, "n": 2},
        {"temperature": 1.0, "seed": 2, "top_k": 3, "min_p": 0.01},
        {"min_tokens": 20, "stop_token_ids": [*range(0, VOCAB_SIZE, 2)]},
        {"allowed_token_ids": [*range(3, 12)]},
        {"max_tokens": 2},
        {"max_tokens": None},
    ]
    prompts, params = [], []
    for i, kind in enumerate(kinds):
        words = rng.integers(3, VOCAB_SIZE, 2 + i).tolist()
        prompts.append({"prompt_token_ids": (words * 20)[: 12 + 3 * i]})
        options = {"temperature": 0, "max_tokens": 40, "logprobs": 1} | kind
        params.append(SamplingParams(ignore_eos=True, **options))
    return prompts, params


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("qwen2", {}, id="plain"),
        pytest.param("qwen2", {"num_gpu_blocks_override": 24}, id="preempted"),
        pytest.param("gemma3", {"enable_prefix_caching": False}, id="windows"),
        pytest.param("qwen2", {"kv_cache_dtype": "int8"}, id="int8 pool", marks=pytest.mark.deep),
        pytest.param("qwen2", {"tensor_parallel_size": 2}, id="two devices"),
        pytest.param("qwen3_5", {}, id="delta rule"),
        pytest.param("qwen3_5", {"num_gpu_blocks_override": 24}, id="delta rule, preempted"),
        pytest.param("granite_hybrid", {"tensor_parallel_size": 2}, id="Mamba-2, two devices"),
        pytest.param("lfm2", {"num_gpu_blocks_override": 24}, id="convolutions, preempted"),
        pytest.param("falcon_h1", {"tensor_parallel_size": 3}, id="Mamba-2 and attention, three"),
    ],
)
def test_tokens_are_those_without_drafts(family, options, tmp_path):
    # Answers of these repeat themselves.
    kinds = [dense_families.RECURRENT, dense_families.FULL]
    few_layers = {
        "qwen2": {"num_hidden_layers": 1},
        "qwen3_5": {"num_hidden_layers": 2, "layer_types": kinds},
        "lfm2": {
            "num_hidden_layers": 2,
            "layer_types": [dense_families.CONVOLUTION, dense_families.FULL],
        },
        "falcon_h1": {"num_hidden_layers": 1},
    }
    build = checkpoints.build if family in ("qwen2", "gemma3") else dense_families.build
    path = build(family, int(family == "qwen3_5"), tmp_path, **few_layers.get(family, {}))
    prompts, params = requests()
    options = {"enforce_eager": True} | options
    expected = answers(make_llm(path, **options), prompts, params)
    llm = make_llm(path, speculative_config=LOOKUP, **options)
    assert_same_answers(answers(llm, prompts, params), expected, atol=2e-4)
    stats = llm.stats()
    assert 20 < stats.num_accepted_tokens < stats.num_draft_tokens and not stats.num_blocks_used
    assert (stats.num_preemptions > 0) == ("num_gpu_blocks_override" in options)
    # Drafts are uploaded with their step.
    assert not any(each.num_calls for each in llm.programs() if each.name == "set tokens")


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2, 5, 4])
def test_all_drafts_are_checked_at_once_on_accelerators(num_devices, tmp_path, monkeypatch):
    """With five devices rows are padded; four cannot share the vocabulary, and check the drafts one by one."""
    path = checkpoints.build("qwen2", 0, tmp_path, num_hidden_layers=1)
    prompts, params = requests()
    options = {"enforce_eager": True, "tensor_parallel_size": num_devices}
    expected = answers(make_llm(path, **options), prompts, params)
    check, shapes = Division.stacked_row_logits, set()

    def check_at_once(*args):
        logits = check(*args)
        shapes.add(logits.shape)
        return logits

    monkeypatch.setattr(Step, "_platform", "tpu")
    monkeypatch.setattr(Division, "stacked_row_logits", check_at_once)
    llm = make_llm(path, speculative_config=LOOKUP, **options)
    assert_same_answers(answers(llm, prompts, params), expected, atol=2e-4)
    assert llm.stats().num_accepted_tokens > 20
    rows = -(-8 // num_devices) * num_devices
    assert shapes == ({(5, rows, VOCAB_SIZE)} if VOCAB_SIZE % num_devices == 0 else set())


@pytest.mark.slow
def test_in_strict_numerics_no_bit_depends_on_drafts(tmp_path, as_users_compile):
    path = checkpoints.build("qwen2", 0, tmp_path, num_hidden_layers=1)
    prompts, params = requests()
    prompts, params = prompts[2:5], params[2:5]
    with as_users_compile():
        options = {"numerics": "strict", "enforce_eager": True}
        expected = answers(make_llm(path, **options), prompts, params)
        llm = make_llm(path, speculative_config=LOOKUP, **options)
        assert answers(llm, prompts, params) == expected
    assert llm.stats().num_accepted_tokens > 10


@pytest.mark.slow
def test_rows_without_drafts_share_steps_with_others(tmp_path):
    """One that ends early, one with the logprobs of the whole vocabulary; nothing compiles for either."""
    path = checkpoints.build("qwen2", 0, tmp_path, num_hidden_layers=1)
    prompts, params = requests()
    expected = answers(make_llm(path, enforce_eager=True), prompts, params)
    llm = make_llm(path, speculative_config=LOOKUP)
    llm.wait_until_warm()
    llm.add_request("aborted", prompts[0], params[0])
    whole = SamplingParams(temperature=0, max_tokens=6, logprobs=-1)
    llm.add_request("whole vocabulary", prompts[1], whole)
    for i, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        llm.add_request(str(i), prompt, each)
    outputs = {}
    for step in range(1000):
        if not llm.has_unfinished_requests():
            break
        if step == 3:
            llm.abort_request("aborted")
        outputs |= {output.request_id: output for output in llm.step() if output.finished}
    got = [
        (
            list(c.token_ids),
            [row[t].logprob for row, t in zip(c.logprobs, c.token_ids, strict=True)],
        )
        for i in range(len(prompts))
        for c in outputs[str(i)].outputs
    ]
    assert_same_answers(got, expected, atol=2e-4)
    assert len(outputs["whole vocabulary"].outputs[0].logprobs[0]) == VOCAB_SIZE
    stats = llm.stats()
    assert stats.num_recompiles == 0 and stats.num_blocks_used == 0 and stats.num_accepted_tokens
