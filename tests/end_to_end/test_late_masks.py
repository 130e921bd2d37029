"""Rows whose mask comes late, on real programs: they wait, nobody else does, and their tokens are those of the plain
loop with masks at hand.
"""

from __future__ import annotations

import pytest

from jaxpage import SamplingParams
from jaxpage.sampling.constraints import pack_mask
from tests import checkpoints

pytestmark = pytest.mark.slow

PROMPTS = [[5, 9, 2 + n] * (3 + 5 * n) for n in range(6)]
NUM_TOKENS = 12


class SlowMasks:
    """Token t may be followed by tokens whose id is even if t's is odd, and odd if it is even.

    A mask is ready only when it has been asked for `delay` times.
    """

    def __init__(self, delay: int):
        self.delay = delay
        self.num_waits = 0
        self._asked: dict[tuple[int, int], int] = {}

    def mask(self, index, output_token_ids):
        key = (index, len(output_token_ids))
        self._asked[key] = self._asked.get(key, 0) + 1
        if self._asked[key] <= self.delay:
            return None
        parity = (output_token_ids[-1] + 1) % 2 if output_token_ids else 0
        return pack_mask(range(parity, checkpoints.VOCAB_SIZE, 2), checkpoints.VOCAB_SIZE)

    def forced(self, index, output_token_ids):
        return []

    def error(self, index):
        return None

    def wait(self, seconds):
        self.num_waits += 1


def answers(llm, delays, **params):
    """Tokens of each prompt and the steps it took; prompts with a delay of None have no masks."""
    params = {"temperature": 0.8, "seed": 1, "max_tokens": NUM_TOKENS, "ignore_eos": True} | params
    make = llm._inputs.requests

    def with_masks(*args, **kwargs):
        requests = make(*args, **kwargs)
        for request, delay in zip(requests, delays, strict=True):
            if delay is not None:
                request.mask_source = SlowMasks(delay)
                request.features = llm_features(request)
        return requests

    llm._inputs.requests = with_masks
    try:
        outputs = llm.generate(PROMPTS, SamplingParams(**params), use_tqdm=False)
    finally:
        llm._inputs.requests = make
    return [completion.token_ids for output in outputs for completion in output.outputs]


def llm_features(request):
    from jaxpage.sampling.features import features_of

    return features_of(request)


def alternates(token_ids):
    return all((a + b) % 2 for a, b in zip([1, *token_ids], token_ids, strict=False))


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": False},
        {},
        {"num_gpu_blocks_override": 18},
        {"max_num_batched_tokens": 7},
        {"tensor_parallel_size": 4},
    ],
    ids=["plain", "overlap", "preempted", "chunks-of-7", "four-devices"],
)
def test_masks_that_come_late_change_no_token(options, tmp_path_factory):
    path = checkpoints.build("qwen2", 0, tmp_path_factory.mktemp("model"))
    llm = checkpoints.make_llm(path, async_scheduling=False, enforce_eager=True)
    free = answers(llm, [None] * 6)
    prompt = answers(llm, [0] * 6)
    llm = checkpoints.make_llm(path, **options)
    delays = [0, 1, None, 3, None, 9]
    got = answers(llm, delays)
    for delay, tokens, masked, unmasked in zip(delays, got, prompt, free, strict=True):
        assert tokens == (unmasked if delay is None else masked)
        assert delay is None or alternates(tokens)
    assert not all(map(alternates, free))
    if "num_gpu_blocks_override" in options:
        assert llm.stats().num_preemptions > 0
    assert llm.stats().num_recompiles == 0


def test_several_continuations_have_masks_of_their_own(tmp_path_factory):
    path = checkpoints.build("qwen2", 0, tmp_path_factory.mktemp("model"))
    llm = checkpoints.make_llm(path, enforce_eager=True)  # with fewer slots than sequences
    masked = answers(llm, [0] * 6, n=2)
    assert answers(llm, [0, 2, 0, 1, 3, 0], n=2) == masked
    assert all(map(alternates, masked)) and len(set(map(tuple, masked))) > 6


def test_others_are_not_held_back(tmp_path_factory):
    """While one waits for each of its masks, the others take the steps that they take without it."""
    path = checkpoints.build("qwen2", 0, tmp_path_factory.mktemp("model"))
    llm = checkpoints.make_llm(path, async_scheduling=False, enforce_eager=True)
    answers(llm, [None] * 6)
    without = llm.stats().num_steps
    answers(llm, [None] * 5 + [2])
    num_steps = llm.stats().num_steps - without
    # Each of its tokens waits for three questions, asked one a step; the others end after `without` steps.
    assert without < num_steps <= 3 * NUM_TOKENS + without
