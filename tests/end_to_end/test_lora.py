"""LoRA adapters in whole engines: against transformers with merged weights, many in one batch, coming and going."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxpage import BeamSearchParams, SamplingParams
from jaxpage.replay import replay
from tests import checkpoints, dense_families, mixtures
from tests.adapters import lora, merged, save_adapter
from tests.end_to_end.test_parity import log_softmax, prompts_of, torch_logits_of
from tests.few_programs import few_programs

NUM_TOKENS = 16
# Of the adapters of a checkpoint. Numbers count from 1, as ids do.
KINDS = [
    {"rank": 8, "alpha": 16},
    {"rank": 2, "alpha": 5, "targets": ("q_proj", "v_proj")},
    {"rank": 4, "use_rslora": True, "targets": ("gate_proj", "down_proj", "o_proj")},
    {"rank": 3, "rank_pattern": {"model.layers.1.mlp.up_proj": 7}, "targets": ("up_proj",)},
    {"rank": 1, "alpha_pattern": {"model.layers.0.self_attn.k_proj": 3}},
    {"rank": 8, "alpha": 1, "targets": ("k_proj", "up_proj"), "strength": 4.0},
    {"rank": 5, "targets": ("o_proj",), "strength": 2.0},
    {"rank": 6, "alpha": 12, "targets": ("down_proj",)},
]
OPTIONS = {"enable_lora": True, "max_lora_rank": 8}
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3, detokenize=False
)


class Adapted:
    """A checkpoint with an adapter of each kind. Number 0 is the model itself."""

    def __init__(self, folder, family="qwen2", variant=0, kinds=KINDS, build=checkpoints.build):
        self.base = build(family, variant, folder / "base")
        self.folder = folder
        self.paths = [
            save_adapter(folder / str(number), self.base, seed=number, **kind)
            for number, kind in enumerate(kinds, start=1)
        ]

    def request(self, number, **fields):
        return lora(number, self.paths[number - 1], **fields) if number else None

    def merged(self, number):
        path = self.folder / f"merged {number}"
        if number and not path.exists():
            merged(path, self.base, self.paths[number - 1])
        return path if number else self.base


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    return Adapted(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def llm(adapted):
    """Room for three adapters at a time."""
    return checkpoints.make_llm(adapted.base, max_loras=3, max_cpu_loras=8, **OPTIONS)


def some_slow(cases, count):
    """The first `count` are slow tests, the others deep ones."""
    marks = [pytest.mark.slow if i < count else pytest.mark.deep for i in range(len(cases))]
    return [pytest.param(case, marks=mark) for case, mark in zip(cases, marks, strict=True)]


def generate(llm, adapted, prompts, numbers, params=PARAMS):
    requests = [adapted.request(number) for number in numbers]
    return llm.generate(prompts, params, lora_request=requests, use_tqdm=False)


def answers(outputs):
    """(tokens, their logprobs) of each."""
    completions = [output.outputs[0] for output in outputs]
    return [
        (c.token_ids, [x[t].logprob for x, t in zip(c.logprobs, c.token_ids, strict=True)])
        for c in completions
    ]


def assert_merged(adapted, prompts, numbers, outputs, atol=1e-4):
    """Each answer is that of transformers with the adapter merged into the weights."""
    for prompt, number, (tokens, logprobs) in zip(prompts, numbers, answers(outputs), strict=True):
        (logits,) = torch_logits_of(adapted.merged(number), [prompt], [list(tokens)])
        expected = log_softmax(logits)
        assert list(tokens) == expected.argmax(axis=-1).tolist()
        np.testing.assert_allclose(logprobs, expected.max(axis=-1), atol=atol)


def test_the_model_and_adapters_in_one_batch(adapted, llm):
    prompts, numbers = prompts_of((30, 7, 1, 12, 30)), [0, 1, 2, 3, 1]
    outputs = generate(llm, adapted, prompts, numbers)
    assert_merged(adapted, prompts, numbers, outputs)
    assert len({tuple(tokens) for tokens, _ in answers(outputs)}) == 5
    assert [o.lora_request for o in outputs] == [adapted.request(n) for n in numbers]
    llm.wait_until_warm()
    assert llm.stats().num_recompiles == 0


def test_adapters_share_no_blocks(adapted, llm):
    prompt = prompts_of((40,), seed=5)[0]
    cached = [generate(llm, adapted, [prompt], [n])[0].num_cached_tokens for n in (0, 1, 2, 1, 0)]
    assert cached == [0, 0, 0, 32, 32]


def test_adapters_are_checked_before_anything_runs(adapted, llm, tmp_path):
    with pytest.raises(ValueError, match="exceeds max_lora_rank=8"):
        large = save_adapter(tmp_path / "large", adapted.base, seed=0, rank=9)
        llm.generate([[5], [6]], lora_request=[None, lora(90, large)])
    with pytest.raises(ValueError, match="is not a folder"):
        llm.add_lora(lora(91, tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="lora_int_id=1 is the adapter 'adapter 1'.*load_inplace"):
        llm.add_lora(adapted.request(1))
        llm.generate([[5]], lora_request=lora(1, adapted.paths[1]))
    assert not llm.has_unfinished_requests() and not llm.list_loras() & {90, 91}


def alone(llm, adapted, prompts, numbers, params=PARAMS):
    outputs = [
        generate(llm, adapted, [prompt], [number], params)[0]
        for prompt, number in zip(prompts, numbers, strict=True)
    ]
    return answers(outputs)


@pytest.mark.slow
def test_eight_adapters_and_the_model_give_each_what_it_gives_alone(adapted):
    prompts = prompts_of([3 + 5 * i for i in range(18)], seed=1)
    numbers = [i % 9 for i in range(18)]
    options = {"max_num_seqs": 18, "max_num_batched_tokens": 64, **OPTIONS}
    llm = checkpoints.make_llm(adapted.base, max_loras=8, **options)
    outputs = generate(llm, adapted, prompts, numbers)
    assert_merged(adapted, prompts, numbers, outputs)
    expected = alone(llm, adapted, prompts, numbers)
    checkpoints.assert_same_answers(answers(outputs), expected, atol=1e-4)
    llm.wait_until_warm()
    assert llm.stats().num_recompiles == 0
    # With room for two of them, some wait.
    few = checkpoints.make_llm(
        adapted.base, max_loras=2, max_cpu_loras=3, enforce_eager=True, **OPTIONS
    )
    got = answers(generate(few, adapted, prompts, numbers))
    checkpoints.assert_same_answers(got, expected, atol=1e-4)


@pytest.mark.slow
def test_other_adapters_in_the_batch_change_no_bit(adapted):
    """Of the logprobs, on the programs that users get."""
    prompts = prompts_of((9, 17, 5, 30), seed=2)
    options = {"max_loras": 5, "enable_prefix_caching": False, "enforce_eager": True, **OPTIONS}
    llm = checkpoints.make_llm(adapted.base, **options)
    found = []
    for company in ([0, 0, 0], [2, 3, 4], [4, 2, 0], [5, 1, 1]):
        found.append(answers(generate(llm, adapted, prompts, [1, *company]))[0])
    assert all(answer == found[0] for answer in found)


@pytest.mark.slow
def test_adapters_come_and_go_under_load(adapted, tmp_path):
    """Removed, replaced under their id, and read again, while requests run; each request keeps what it began with."""
    llm = checkpoints.make_llm(adapted.base, max_loras=2, max_cpu_loras=2, **OPTIONS)
    prompts = prompts_of([4 + i for i in range(24)], seed=3)
    numbers = [i % 5 for i in range(24)]
    expected = alone(llm, adapted, prompts, numbers)
    finished = {}
    for i, (prompt, number) in enumerate(zip(prompts, numbers, strict=True)):
        prompt = {"prompt_token_ids": prompt}
        llm.add_request(str(i), prompt, PARAMS, lora_request=adapted.request(number))
        finished |= {o.request_id: o for o in llm.step() if o.finished}
        if i % 3 == 0:
            for loaded in llm.list_loras():
                assert llm.remove_lora(loaded)
            assert llm.list_loras() == set() and not llm.remove_lora(1)
        assert len(llm.list_loras()) <= 2
    while llm.has_unfinished_requests():
        finished |= {o.request_id: o for o in llm.step() if o.finished}
    got = answers([finished[str(i)] for i in range(24)])
    checkpoints.assert_same_answers(got, expected, atol=1e-4)
    # Another one under the same id: who came before keeps the old one, also in the cache.
    assert llm.add_lora(adapted.request(1)) is True
    prompt = prompts_of((40,), seed=4)[0]
    numbers = [1, 2]
    old, new = alone(llm, adapted, [prompt] * 2, numbers)
    llm.add_request("old", {"prompt_token_ids": prompt}, PARAMS, lora_request=adapted.request(1))
    llm.step()
    replaced = lora(1, adapted.paths[1], load_inplace=True)
    llm.add_request("new", {"prompt_token_ids": prompt}, PARAMS, lora_request=replaced)
    while llm.has_unfinished_requests():
        finished |= {o.request_id: o for o in llm.step() if o.finished}
    got = answers([finished["old"], finished["new"]])
    checkpoints.assert_same_answers(got, [old, new], atol=1e-4)
    llm.wait_until_warm()
    assert llm.stats().num_recompiles == 0
    assert llm.stats().num_blocks_used == 0


SMALL_POOL = {"num_gpu_blocks_override": 17}
WAYS = {
    "swapped": SMALL_POOL | {"preemption_mode": "swap", "swap_space": 0.01},
    "two devices": {"tensor_parallel_size": 2},
    # The rest is deep.
    "one step at a time": {"decode_steps": 1, "async_scheduling": False},
    "preempted": SMALL_POOL | {"preemption_mode": "recompute"},
    "no cache": {"enable_prefix_caching": False},
    "four devices": {"tensor_parallel_size": 4},
    "two replicas": {"data_parallel_size": 2},
}


@pytest.mark.parametrize("way", some_slow(WAYS, 2))
def test_other_ways_to_compute_give_the_same(adapted, way):
    prompts, numbers = prompts_of((30, 7, 20, 12, 30, 41), seed=6), [1, 2, 3, 1, 0, 5]
    options = {"max_loras": 2, "enforce_eager": True, **OPTIONS, **WAYS[way]}
    llm = checkpoints.make_llm(adapted.base, **options)
    params = replace(PARAMS, max_tokens=40)
    outputs = generate(llm, adapted, prompts, numbers, params)
    assert_merged(adapted, prompts, numbers, outputs)
    if "num_gpu_blocks_override" in WAYS[way]:
        assert llm.stats().num_preemptions > 0
    again = generate(llm, adapted, prompts, numbers, params)
    checkpoints.assert_same_answers(answers(again), answers(outputs), atol=1e-4)


# The first is slow, the rest is deep.
FAMILIES = [("gemma3", 0), ("llama", 2), ("mistral", 0), ("qwen3", 0), ("gemma2", 0)]


@pytest.mark.parametrize("family_and_variant", some_slow(FAMILIES, 1))
def test_families(family_and_variant, tmp_path):
    adapted = Adapted(tmp_path, *family_and_variant, KINDS[:2])
    check_family(adapted)


@pytest.mark.slow
def test_a_family_whose_checkpoints_join_projections(tmp_path):
    """An adapter of Phi-3 has one pair of halves for q, k and v."""
    kinds = [
        {"rank": 4, "targets": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")},
        {"rank": 3, "targets": ("qkv_proj",)},
    ]
    check_family(Adapted(tmp_path, "phi3", 0, kinds))


@pytest.mark.slow
def test_a_family_with_names_of_its_own(tmp_path):
    """Phi-2."""
    kinds = [
        {"rank": 4, "targets": ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2")},
        {"rank": 3, "targets": ("fc1",)},
    ]
    check_family(Adapted(tmp_path, "phi", 0, kinds, dense_families.build))


@pytest.mark.slow
def test_a_family_whose_mlp_has_no_gate(tmp_path):
    """StarCoder 2, with biases."""
    kinds = [
        {"rank": 4, "targets": ("q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj")},
        {"rank": 3, "targets": ("c_proj",)},
    ]
    check_family(Adapted(tmp_path, "starcoder2", 0, kinds, dense_families.build))


@pytest.mark.slow
def test_a_family_with_rows_of_each_head_in_one_tensor(tmp_path):
    """GPT-NeoX has one pair of halves for q, k and v, whose rows take turns by head."""
    joined = "query_key_value"
    kinds = [
        {"rank": 4, "targets": (joined, "dense", "dense_h_to_4h", "dense_4h_to_h")},
        {"rank": 3, "targets": (joined,)},
    ]
    check_family(Adapted(tmp_path, "gpt_neox", 0, kinds, dense_families.build))


@pytest.mark.slow
def test_a_family_with_transposed_weights(tmp_path):
    """GPT-2, where PEFT sets `fan_in_fan_out`, on which its halves do not depend."""
    kinds = [
        {"rank": 4, "targets": ("c_attn", "c_proj", "c_fc"), "fan_in_fan_out": True},
        {"rank": 3, "targets": ("c_attn",), "fan_in_fan_out": True},
    ]
    check_family(Adapted(tmp_path, "gpt2", 0, kinds, dense_families.build))


@pytest.mark.slow
def test_a_family_with_experts(tmp_path):
    """GLM-4.5: adapters of its attention, without its experts."""
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    kinds = [{"rank": 4, "targets": attention}, {"rank": 3, "targets": ("v_proj",)}]
    check_family(Adapted(tmp_path, "glm4_moe", 0, kinds, mixtures.build))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "queries"), [("deepseek_v2", "q_proj"), ("deepseek_v3", "q_b_proj")]
)
def test_a_family_with_latent_attention(family, queries, tmp_path):
    """Adapters of all projections but that of latents to heads, which no token multiplies."""
    latents = ("q_a_proj", "kv_a_proj_with_mqa")
    kinds = [
        {"rank": 4, "targets": (queries, *latents, "o_proj")},
        {"rank": 3, "targets": ("kv_a_proj_with_mqa",)},
    ]
    adapted = Adapted(tmp_path, family, 0, kinds, mixtures.build)
    check_family(adapted)
    of_heads = save_adapter(tmp_path / "heads", adapted.base, seed=1, targets=("kv_b_proj",))
    llm = checkpoints.make_llm(adapted.base, enforce_eager=True, **OPTIONS)
    with pytest.raises(ValueError, match="kv_b_proj.* is of no layer that can be adapted here"):
        llm.add_lora(lora(9, of_heads))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "projections"),
    [
        ("qwen3_5", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")),
        ("qwen3_5_moe", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")),
        ("qwen3_next", ("in_proj_qkvz", "in_proj_ba")),
        ("granite_hybrid", ("in_proj",)),
        ("nemotron_h", ("in_proj", "up_proj", "down_proj")),
        ("lfm2", ("in_proj", "w1", "w2", "w3")),
        ("falcon_h1", ("in_proj", "gate_proj", "up_proj", "down_proj")),
    ],
)
def test_a_family_with_a_recurrent_state(family, projections, tmp_path):
    """An adapter has one pair of halves for q, k and v of such a layer, for more in Qwen3-Next, and q_proj has gates
    beside queries.
    """
    build = mixtures.build if family in mixtures.VARIANTS else dense_families.build
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    kinds = [
        {"rank": 4, "targets": (*attention, *projections, "out_proj")},
        {"rank": 3, "targets": projections[:1]},
    ]
    check_family(Adapted(tmp_path, family, 0, kinds, build))


@pytest.mark.slow
def test_projections_around_experts(tmp_path):
    """Of Nemotron-H, whose experts read fewer numbers than a hidden state has."""
    latent = ("fc1_latent_proj", "fc2_latent_proj")
    kinds = [{"rank": 4, "targets": (*latent, "q_proj")}, {"rank": 3, "targets": latent[:1]}]
    check_family(Adapted(tmp_path, "nemotron_h_moe", 1, kinds, mixtures.build))


def check_family(adapted):
    prompts, numbers = prompts_of((30, 7, 12)), [1, 2, 0]
    llm = checkpoints.make_llm(adapted.base, max_loras=2, enforce_eager=True, **OPTIONS)
    assert_merged(adapted, prompts, numbers, generate(llm, adapted, prompts, numbers))


@pytest.mark.slow
def test_adapters_beside_rounded_weights(adapted, tmp_path):
    """With int8 weights the distance to merged ones is no larger than that of the rounded model to the model, though
    the adapter changes more than that.
    """
    path = save_adapter(tmp_path / "mild", adapted.base, seed=1, strength=0.2)
    whole = merged(tmp_path / "whole", adapted.base, path)
    prompts = prompts_of((30, 12, 7, 25, 18), seed=7)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, detokenize=False)
    options = {"max_loras": 1, "enforce_eager": True, "quantization": "int8", **OPTIONS}
    llm = checkpoints.make_llm(adapted.base, **options)

    def error(request, checkpoint):
        """The largest, of the likely tokens."""
        outputs = llm.generate(prompts, params, lora_request=request, use_tqdm=False)
        errors = []
        for prompt, output in zip(prompts, outputs, strict=True):
            expected = log_softmax(checkpoints.torch_logits(checkpoint, np.array([prompt]))[0, -1])
            found = output.outputs[0].logprobs[0]
            errors += [abs(x.logprob - expected[token]) for token, x in found.items()]
        return max(errors)

    rounding = error(None, adapted.base)
    assert 0 < error(lora(1, path), whole) < 2 * rounding
    assert error(None, whole) > 5 * rounding


@pytest.mark.slow
def test_several_sequences_and_beams(adapted):
    options = {"max_loras": 1, "enforce_eager": True, **OPTIONS}
    llm = checkpoints.make_llm(adapted.base, **options)
    whole = checkpoints.make_llm(adapted.merged(1), enforce_eager=True)
    prompts = prompts_of((20, 9), seed=8)
    params = SamplingParams(n=3, temperature=0.8, seed=3, max_tokens=8, ignore_eos=True)
    ours, theirs = (
        [[c.token_ids for c in o.outputs] for o in each.generate(prompts, params, **extra)]
        for each, extra in ((llm, {"lora_request": adapted.request(1)}), (whole, {}))
    )
    assert ours == theirs
    search = BeamSearchParams(beam_width=3, max_tokens=6)
    ours, theirs = (
        [[s.tokens for s in o.sequences] for o in each.beam_search(prompts, search, **extra)]
        for each, extra in ((llm, {"lora_request": adapted.request(1)}), (whole, {}))
    )
    assert ours == theirs


@pytest.mark.slow
def test_recorded_calls_bring_the_adapters(adapted, tmp_path):
    file = tmp_path / "run.calls"
    options = {"max_loras": 1, "enforce_eager": True, **OPTIONS}
    llm = checkpoints.make_llm(adapted.base, record_calls=str(file), **options)
    generate(llm, adapted, prompts_of((20, 9, 5)), [1, 2, 0])
    del llm
    with few_programs(), file.open("rb") as recording:
        found = replay(recording)
    assert found.num_results > 0 and found.different == ()


@pytest.mark.slow
def test_engines_without_adapters_have_no_traces_of_them(adapted):
    llm = checkpoints.make_llm(adapted.base, enforce_eager=True)
    assert "load adapter" not in {record.name for record in llm.programs()}
