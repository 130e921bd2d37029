"""`numerics="strict"`: a request gives the same bits, whatever shares its batch and however the engine is set."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpage import SamplingParams
from jaxpage.checkpoint_config import load_hf_config
from jaxpage.config import EngineConfig
from jaxpage.models import registry
from jaxpage.runner.strict import GPU_FLAG, check_strict
from tests import checkpoints, dense_families
from tests.end_to_end.test_invariance import answers, assert_nothing_leaked, assert_same, make_llm
from tests.end_to_end.test_invariance import workload as any_workload
from tests.few_programs import few_programs

NUM_REQUESTS = 16
DTYPES = ["bfloat16", pytest.param("float32", marks=pytest.mark.deep)]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return checkpoints.build("qwen2", 0, tmp_path_factory.mktemp("qwen2"))


def workload(number=NUM_REQUESTS):
    return any_workload(number)


def make_strict(path, dtype, **options):
    return make_llm(path, dtype=dtype, **(options | {"numerics": "strict"}))


def test_the_scores_of_a_prompt_do_not_depend_on_chunks(path):
    """Nor on the size of the pieces that are scored, and a token sampled has the score that it has as a prompt."""
    prompt = workload()[0][3]
    found = []
    for chunk in (64, 7):
        with few_programs():
            llm = make_strict(path, "float32", max_num_batched_tokens=chunk, max_num_seqs=5)
        params = SamplingParams(max_tokens=12, temperature=0, logprobs=0, prompt_logprobs=2)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        completion = output.outputs[0]
        longer = [*prompt, *completion.token_ids]
        scores = SamplingParams(max_tokens=1, prompt_logprobs=2)
        (scored,) = llm.generate([longer], scores, use_tqdm=False)
        by_token = [
            row[t].logprob for row, t in zip(scored.prompt_logprobs[1:], longer[1:], strict=True)
        ]
        sampled = [
            row[t].logprob for row, t in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
        assert by_token[len(prompt) - 1 :] == sampled
        found.append(by_token)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "family",
    [
        "gemma3",
        *(
            pytest.param(f, marks=pytest.mark.deep)
            for f in ("cohere2", "olmo3", "ministral3", "gpt2")
        ),
    ],
)
def test_families(family, tmp_path):
    """Windows, norms after their layers, parallel layers: alone, and in chunks among others. And it is the model."""
    builder = dense_families if family in dense_families.VARIANTS else checkpoints
    path = builder.build(family, 0, tmp_path)
    prompts, params = workload(6)
    expected = None
    for num_tokens, together in ((64, 1), (17, 6)):
        with few_programs():
            sizes = {"max_num_seqs": 6, "max_num_batched_tokens": num_tokens}
            llm = make_strict(path, "float32", **sizes)
        outputs = []
        for i in range(0, len(prompts), together):
            some = slice(i, i + together)
            outputs += llm.generate(prompts[some], params[some], use_tqdm=False)
        found = answers(outputs)
        assert found == (expected or found)
        expected = found
    prompt = prompts[0] * 3
    greedy = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    (output,) = llm.generate([prompt], greedy, use_tqdm=False)
    logits = checkpoints.torch_logits(path, np.array([prompt]))[0].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for row, token, scores in zip(
        output.prompt_logprobs[1:], prompt[1:], logprobs[:-1], strict=True
    ):
        assert row[token].logprob == pytest.approx(scores[token], abs=1e-4)


def test_several_devices_compute_the_same_model(path):
    prompts, params = workload(4)
    found = []
    for num_devices in (1, 2):
        with few_programs():
            sizes = {"max_num_seqs": 5, "max_num_batched_tokens": 64}  # as for the scores above
            llm = make_strict(path, "float32", tensor_parallel_size=num_devices, **sizes)
        found.append(answers(llm.generate(prompts, params, use_tqdm=False)))
    assert_same(*found)


# The rest is compiled as users have it.


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request, production_compiler):
    return request.param


def answers_alone(path, dtype, **options):
    """Of one request after another, alone in the engine: the plain loop, one token a step, no cache."""
    options |= {"enable_prefix_caching": False, "async_scheduling": False, "decode_steps": 1}
    with few_programs():
        llm = make_strict(path, dtype, **options, max_num_seqs=1, max_num_batched_tokens=64)
    return answers(
        llm.generate([prompt], params, use_tqdm=False)[0]
        for prompt, params in zip(*workload(), strict=True)
    )


@pytest.fixture(scope="module")
def expected(dtype, path):
    return answers_alone(path, dtype)


@pytest.fixture(scope="module", params=[2, 4, 8])
def num_devices(request):
    """Of two each has a KV head, of four and eight several have the same one; of eight some have padding only."""
    return request.param


@pytest.fixture(scope="module")
def expected_of_several(num_devices, dtype, path):
    return answers_alone(path, dtype, tensor_parallel_size=num_devices)


SETTINGS = {
    "among-15-others, chunks-of-33": {"max_num_batched_tokens": 33, "max_num_seqs": 16},
    "preempted, chunks-of-7, blocks-of-4": {
        "max_num_seqs": 16,  # two tiles of rows
        "num_gpu_blocks_override": 42,
        "block_size": 4,
        "max_num_batched_tokens": 7,
    },
    "swapped": {
        "num_gpu_blocks_override": 22,
        "swap_space": 0.01,
        "preemption_mode": "swap",
    },
    "all sizes of programs": {"max_num_seqs": 64},
}
SLOW = "preempted, chunks-of-7, blocks-of-4"  # most at once


@pytest.mark.parametrize(
    "name", [n if n == SLOW else pytest.param(n, marks=pytest.mark.deep) for n in SETTINGS]
)
def test_no_bit_depends_on_settings_or_neighbours(name, dtype, path, expected):
    check_settings(name, dtype, path, expected)


@pytest.mark.deep
@pytest.mark.parametrize("name", SETTINGS)
def test_nor_on_several_devices(name, num_devices, dtype, path, expected_of_several):
    check_settings(name, dtype, path, expected_of_several, tensor_parallel_size=num_devices)


def check_settings(name, dtype, path, expected, **options):
    with nullcontext() if name == "all sizes of programs" else few_programs():
        llm = make_strict(path, dtype, **SETTINGS[name], **options)
    prompts, params = workload()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert answers(outputs) == expected
    if "preempted" in name or "swapped" in name:
        assert sum(output.metrics.num_preemptions > 0 for output in outputs) > 5
    if name == "all sizes of programs":
        for few in (1, 2, 3, 5, 9):
            some = llm.generate(prompts[:few], params[:few], use_tqdm=False)
            assert answers(some) == expected[:few]
    assert answers(llm.generate(prompts, params, use_tqdm=False)) == expected  # cache warm
    assert llm.stats().prefix_cache_hits > 0
    assert_nothing_leaked(llm)


@pytest.fixture(scope="module")
def shared(dtype, path):
    with few_programs():
        sizes = {"max_num_seqs": 9, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 60}
        return make_strict(path, dtype, scheduling_policy="priority", **sizes)


@pytest.mark.deep
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    order=st.permutations(range(NUM_REQUESTS)),
    arrivals=st.lists(st.integers(0, 4), min_size=1, max_size=20),
)
def test_no_bit_depends_on_the_order_of_arrivals(order, arrivals, shared, expected):
    """`arrivals`: how many come before each step."""
    prompts, params = workload()
    waiting = list(order[: sum(arrivals)])
    finished = {}
    for number in [*arrivals, *[0] * 1000]:
        for _ in range(min(number, len(waiting))):
            i = waiting.pop()
            shared.add_request(str(i), prompts[i], params[i], priority=i % 3)
        for output in shared.step():
            if output.finished:
                finished[int(output.request_id)] = output
        if not waiting and not shared.has_unfinished_requests():
            break
    shared.abort_request(
        [str(i) for i in range(NUM_REQUESTS)]
    )  # none is left, unless the test fails
    assert len(finished) == min(sum(arrivals), NUM_REQUESTS)
    different = [i for i, output in finished.items() if answers([output]) != [expected[i]]]
    assert not different


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, "quantization='int8'"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8'"),
        ({"enable_lora": True}, "enable_lora=True"),
        ({"numerics": "exact"}, "numerics must be one of fast, strict, got 'exact'"),
    ],
)
def test_what_is_not_computed_by_tiles_is_refused(options, message, path):
    with pytest.raises(ValueError, match=message):
        make_llm(path, **({"numerics": "strict"} | options))


def test_a_gpu_needs_a_flag_of_its_compiler(path, monkeypatch):
    hf_config = load_hf_config(path)
    hardware = {"platform": "gpu", "device_kind": "NVIDIA H200", "device_memory": 1 << 37}
    config = EngineConfig(model=path, numerics="strict").resolve(hf_config, **hardware)
    model = registry.build(hf_config, dtype=config.dtype, max_model_len=64).config
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4")
    with pytest.raises(ValueError, match="XLA_FLAGS=--xla_gpu_autotune_level=0 on a GPU"):
        check_strict(config, model, "gpu")
    check_strict(config, model, "tpu")
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=x {GPU_FLAG}")
    check_strict(config, model, "gpu")


@pytest.mark.parametrize("variant", [0, 2])
def test_layers_that_share_keys_are_refused(variant, tmp_path):
    """Also where all layers have the same heads (2)."""
    path = dense_families.build("gemma4", variant, tmp_path)
    with pytest.raises(ValueError, match='numerics="strict" is not for Gemma 4; take'):
        make_strict(path, "float32")
