"""Memory pressure changes speed, never tokens: swapping, the host tier and the disk, on real models."""

from __future__ import annotations

import random

import pytest

from jaxpage import LLM, SamplingParams
from tests import checkpoints

MAX_MODEL_LEN = 128
LARGE, SMALL = 400, 17  # blocks: all there is to hold, and room for one of the longest sequences


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoints.build("llama", 0, tmp_path_factory.mktemp("llama"))


def make_llm(folder, num_blocks, **options):
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=8,
        num_gpu_blocks_override=num_blocks,
        **options,
    )


def work(seed=0):
    """Prompts and params: greedy, seeded sampling, n = 4; half of the prompts begin alike."""
    rng = random.Random(seed)

    def ids(count):
        return [rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(count)]

    common = ids(40)
    prompts = [(common if i % 2 else []) + ids(rng.randrange(5, 40)) for i in range(12)]
    params = [
        SamplingParams(
            temperature=(0.0, 0.8, 1.0)[i % 3],
            n=4 if i % 3 == 2 else 1,
            seed=i,
            logprobs=0,
            max_tokens=rng.randrange(10, 40),
            ignore_eos=True,
            detokenize=False,
        )
        for i in range(12)
    ]
    return prompts, params


def answers(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (
            c.token_ids,
            [round(p[t].logprob, 3) for p, t in zip(c.logprobs, c.token_ids, strict=True)],
        )
        for output in outputs
        for c in output.outputs
    ]


@pytest.fixture(scope="module")
def unpressured(folder):
    return answers(make_llm(folder, LARGE), *work())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"swap_space": 0.1, "preemption_mode": "recompute"},
        {"swap_space": 0.1, "preemption_mode": "swap"},
        {"swap_space": 0.1, "preemption_mode": "swap", "enable_prefix_caching": False},
        {"swap_space": 0.1, "disk": True},
        {"swap_space": 0.1, "preemption_mode": "swap", "async_scheduling": False},
    ],
    ids=["recompute", "tier", "swap", "swap-alone", "disk", "plain-loop"],
)
@pytest.mark.slow
def test_a_pool_of_a_tenth_gives_the_same_tokens_and_logprobs(
    folder, unpressured, options, tmp_path
):
    options = dict(options)
    if options.pop("disk", False):
        options["kv_offload_dir"] = str(tmp_path)
    llm = make_llm(folder, SMALL, **options)
    assert answers(llm, *work()) == unpressured
    stats = llm.stats()
    assert stats.num_preemptions > 0 and stats.num_recompiles == 0
    if options.get("preemption_mode") == "swap":
        assert stats.num_blocks_swapped_in > 0
    # Once more, now that host and disk hold what was evicted.
    assert answers(llm, *work()) == unpressured
    assert llm.stats().kv_cache_usage == 0


def test_a_prefix_is_found_on_the_host_and_after_a_restart_on_the_disk(folder, tmp_path):
    prompts, params = work()
    prompt = prompts[1]
    one = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    options = {"swap_space": 0.1, "kv_offload_dir": str(tmp_path)}
    llm = make_llm(folder, SMALL, **options)
    (first,) = llm.generate([prompt], one, use_tqdm=False)
    llm.generate(prompts[::2], one, use_tqdm=False)
    (again,) = llm.generate([prompt], one, use_tqdm=False)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.num_cached_tokens == (len(prompt) - 1) // 8 * 8
    assert llm.stats().num_host_hit_blocks > 0 and llm.stats().num_disk_hit_blocks == 0
    llm.save_prefix_cache()

    later = make_llm(folder, SMALL, **options)
    (third,) = later.generate([prompt], one, use_tqdm=False)
    assert third.outputs[0].token_ids == first.outputs[0].token_ids
    assert third.num_cached_tokens == (len(prompt) - 1) // 8 * 8
    assert later.stats().num_disk_hit_blocks == (len(prompt) - 1) // 8
    for file in tmp_path.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-40])
    torn = make_llm(folder, SMALL, **options)
    (fourth,) = torn.generate([prompt], one, use_tqdm=False)
    assert fourth.outputs[0].token_ids == first.outputs[0].token_ids
    assert fourth.num_cached_tokens == 0 and torn.stats().num_disk_hit_blocks == 0


def test_options_that_need_host_blocks_say_so(folder):
    for options in ({"preemption_mode": "swap"}, {"kv_offload_dir": "x"}):
        with pytest.raises(ValueError, match="give swap_space"):
            make_llm(folder, SMALL, **options)
    with pytest.raises(ValueError, match="holds no block"):
        make_llm(folder, SMALL, swap_space=1e-9)
    with pytest.raises(ValueError, match="number of GiB"):
        make_llm(folder, SMALL, swap_space=-1)
