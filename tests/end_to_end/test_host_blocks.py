"""Memory pressure changes speed, never an answer: preemption, swapping, the host tier and the disk, on real models."""

from __future__ import annotations

import functools
import random

import pytest

from jaxpage import BeamSearchParams, SamplingParams
from tests import checkpoints

BLOCK_SIZE = 8
LARGE = 1000  # blocks: all there is to hold
# By family: how far its KV-cache groups see; room for its longest sequence or widest search; how much work.
WINDOWS = {"llama": (None,), "gemma3": (8, 8, None)}
SMALL = {"llama": 17, "gemma3": 49}
TIMES = {"llama": 1, "gemma3": 2}
BEAMS = BeamSearchParams(beam_width=4, max_tokens=19, ignore_eos=True)
SEARCHED = (5, 20, 33, 38, 12, 9, 27, 17, 3, 25, 36, 14)  # lengths of prompts that beams continue


def make_llm(folder, num_blocks, **options):
    limits = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": num_blocks}
    return checkpoints.make_llm(folder, **limits, **options)


def random_ids(rng, count):
    return [rng.randrange(3, checkpoints.VOCAB_SIZE) for _ in range(count)]


def work(times=1):
    """15 prompts, or a multiple, and params: greedy, seeded sampling, n = 4; half of the prompts begin alike."""
    rng = random.Random(0)
    common = random_ids(rng, 40)
    prompts = [
        (common if i % 2 else []) + random_ids(rng, rng.randrange(5, 40)) for i in range(15 * times)
    ]
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
        for i in range(15 * times)
    ]
    return prompts, params


def beam_answers(llm, times):
    """Of all searches, beside which someone else is answered."""
    rng = random.Random(1)
    prompts = [random_ids(rng, length) for length in SEARCHED * times]
    beside = SamplingParams(
        temperature=1.0, n=3, seed=1, max_tokens=40, ignore_eos=True, logprobs=0
    )
    llm.add_request("beside", prompts[0], beside)
    searches = llm.beam_search(prompts, BEAMS)
    while llm.has_unfinished_requests():
        outputs = llm.step()
    found = [
        (sequence.tokens, [sequence.cum_logprob]) for s in searches for sequence in s.sequences
    ]
    return found + [(list(c.token_ids), [c.cumulative_logprob]) for c in outputs[-1].outputs]


def num_blocks(windows, prompt_len, num_tokens, width):
    """What so many continuations want at their end, at least, beside what they share."""
    shared = prompt_len // BLOCK_SIZE
    total = -(-(prompt_len + num_tokens - 1) // BLOCK_SIZE)
    return sum(width if w else shared + width * (total - shared) for w in windows)


@pytest.mark.parametrize("family", WINDOWS)
def test_the_small_pool_is_a_tenth_of_what_the_work_wants(family):
    times, windows = TIMES[family], WINDOWS[family]
    sampled = [(len(p), x.max_tokens, x.n) for p, x in zip(*work(times), strict=True)]
    searched = [(length, BEAMS.max_tokens, BEAMS.beam_width) for length in SEARCHED * times]
    for sizes in (sampled, searched):
        assert sum(num_blocks(windows, *size) for size in sizes) >= 10 * (SMALL[family] - 1)


@pytest.fixture(scope="module")
def unpressured(tmp_path_factory):
    """Of a family: its checkpoint, bytes of a block, and the answers to sampled and searched prompts."""

    @functools.cache
    def answer(family):
        folder = checkpoints.build(family, 0, tmp_path_factory.mktemp(family))
        llm = make_llm(folder, LARGE, enforce_eager=True)
        assert llm._engine.runner.groups.windows == WINDOWS[family]
        expected = checkpoints.answers(llm, *work(TIMES[family])), beam_answers(llm, TIMES[family])
        assert llm.stats().num_preemptions == 0
        return folder, llm._engine.runner.pool_spec.bytes_per_block, expected

    return answer


# Host blocks: many, or so few that what is evicted goes on to the disk.
MANY, FEW = 400, 60
# What gives way is recomputed or swapped; nothing is behind the pool, or the host tier, or the disk behind that.
VARIANTS = {
    "recompute": (0, False, {}),
    "recompute-host": (MANY, False, {"preemption_mode": "recompute"}),
    "recompute-disk": (FEW, True, {"preemption_mode": "recompute"}),
    "swap": (MANY, False, {"preemption_mode": "swap", "enable_prefix_caching": False}),
    "swap-host": (MANY, False, {"preemption_mode": "swap"}),
    "swap-disk": (FEW, True, {"preemption_mode": "swap"}),
    "either-disk": (FEW, True, {}),
    "plain-loop": (MANY, False, {"preemption_mode": "swap", "async_scheduling": False}),
}
# Of others the disk is behind the host tier, or the loop is plain; gemma3 has the last one.
DEEP = ("recompute-host", "swap-host", "recompute-disk")


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        *(
            pytest.param("llama", v, marks=pytest.mark.deep if v in DEEP else pytest.mark.slow)
            for v in VARIANTS
        ),
        pytest.param("gemma3", "recompute-disk", marks=pytest.mark.slow),
        pytest.param("gemma3", "swap-disk", marks=pytest.mark.deep),  # see `test_soak.py`
    ],
)
def test_a_pool_of_a_tenth_gives_the_same_tokens_and_logprobs(
    unpressured, family, variant, tmp_path
):
    folder, bytes_per_block, (sampled, searched) = unpressured(family)
    num_host_blocks, disk, options = VARIANTS[variant]
    options = dict(options)
    if num_host_blocks:
        options["swap_space"] = num_host_blocks * bytes_per_block / 2**30
    if disk:
        options["kv_offload_dir"] = str(tmp_path)
    llm = make_llm(folder, SMALL[family], **options)
    for _ in range(2):  # the second time host and disk hold what was evicted
        before = llm.stats()
        found = checkpoints.answers(llm, *work(TIMES[family]))
        checkpoints.assert_same_answers(found, sampled, atol=1e-4)
        between = llm.stats()
        found = beam_answers(llm, TIMES[family])
        checkpoints.assert_same_answers(found, searched, atol=1e-4)
        after = llm.stats()
        for earlier, later in ((before, between), (between, after)):
            assert later.num_preemptions > earlier.num_preemptions
            if options.get("preemption_mode") == "swap":
                assert later.num_blocks_swapped_in > earlier.num_blocks_swapped_in
    assert (after.num_host_hit_blocks > 0) == (
        num_host_blocks > 0 and options.get("enable_prefix_caching", True)
    )
    assert (after.num_disk_hit_blocks > 0) == disk
    assert after.kv_cache_usage == 0 and after.num_recompiles == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a model with one layer."""
    return checkpoints.build("llama", 0, tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_prefix_is_found_on_the_host_and_after_a_restart_on_the_disk(
    num_devices, folder, tmp_path
):
    prompts, params = work()
    prompt = prompts[1]
    one = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    options = {"swap_space": 0.1, "kv_offload_dir": str(tmp_path), "enforce_eager": True}
    options["tensor_parallel_size"] = num_devices
    llm = make_llm(folder, 17, **options)
    (first,) = llm.generate([prompt], one, use_tqdm=False)
    llm.generate(prompts[::2], one, use_tqdm=False)
    (again,) = llm.generate([prompt], one, use_tqdm=False)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert again.num_cached_tokens == (len(prompt) - 1) // 8 * 8
    assert llm.stats().num_host_hit_blocks > 0 and llm.stats().num_disk_hit_blocks == 0
    llm.save_prefix_cache()

    later = make_llm(folder, 17, **options)
    (third,) = later.generate([prompt], one, use_tqdm=False)
    assert third.outputs[0].token_ids == first.outputs[0].token_ids
    assert third.num_cached_tokens == (len(prompt) - 1) // 8 * 8
    assert later.stats().num_disk_hit_blocks == (len(prompt) - 1) // 8
    for file in tmp_path.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-40])
    torn = make_llm(folder, 17, **options)
    (fourth,) = torn.generate([prompt], one, use_tqdm=False)
    assert fourth.outputs[0].token_ids == first.outputs[0].token_ids
    assert fourth.num_cached_tokens == 0 and torn.stats().num_disk_hit_blocks == 0


@pytest.mark.slow
def test_strict_numerics_do_not_read_what_other_programs_computed(folder, tmp_path):
    options = {"swap_space": 0.1, "kv_offload_dir": str(tmp_path), "enforce_eager": True}
    prompt = work()[0][1]
    one = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    found = []
    for numerics in ("fast", "strict", "strict"):
        llm = make_llm(folder, 17, numerics=numerics, **options)
        found.append(llm.generate([prompt], one, use_tqdm=False)[0].num_cached_tokens)
        llm.save_prefix_cache()
    assert found == [0, 0, (len(prompt) - 1) // 8 * 8]


@pytest.mark.slow
def test_options_that_need_host_blocks_say_so(folder):
    for options in ({"preemption_mode": "swap"}, {"kv_offload_dir": "x"}):
        with pytest.raises(ValueError, match="give swap_space"):
            make_llm(folder, 17, **options)
    with pytest.raises(ValueError, match="holds no block"):
        make_llm(folder, 17, swap_space=1e-9)
    with pytest.raises(ValueError, match="number of GiB"):
        make_llm(folder, 17, swap_space=-1)
