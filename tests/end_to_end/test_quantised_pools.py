"""Quantised KV pools from end to end: the same tokens however they were cached, and close to the unquantised ones.

The engine writes keys and values before anyone reads them, so a prompt computed at once, in chunks or found in the
prefix cache attends to the same rounded values.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage import SamplingParams
from jaxpage.models.attention import DenseAttention
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.registry import build
from jaxpage.weights.load import load
from pallas_kernels.kv_write.quantized import FLOATS, FORMATS
from tests import checkpoints

VOCAB = checkpoints.VOCAB_SIZE
# Those of the fp8 formats differ in the rounding of a number only, which `kernels/` tests of each.
EACH_FORMAT = [
    pytest.param(f, marks=pytest.mark.deep if f == "fp8_e5m2" else pytest.mark.slow)
    for f in FORMATS
]
# Rounding moves with the last bit of K and V, which another chunk's matrix product may change: by a step of one value.
STEP = 0.05


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return checkpoints.build("qwen2", 0, tmp_path_factory.mktemp("qwen2"))


def make_llm(path, kv_cache_dtype, **options):
    sizes = {"max_model_len": 256, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 600}
    options = {"enforce_eager": True} | sizes | options
    return checkpoints.make_llm(path, kv_cache_dtype=kv_cache_dtype, **options)


def workload():
    """12 requests, two thirds of which share 50 tokens; greedy, seeded and n = 3 (with copied blocks)."""
    rng = random.Random(0)
    shared = [rng.randrange(3, VOCAB) for _ in range(50)]
    prompts, params = [], []
    for i in range(12):
        own = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(3, 25))]
        prompts.append((shared if i % 3 else []) + own)
        params.append(
            SamplingParams(
                temperature=0.8 if i % 2 else 0.0,
                seed=i,
                n=3 if i % 4 == 1 else 1,
                max_tokens=25,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
        )
    return prompts, params


def answers(llm):
    return checkpoints.answers(llm, *workload())


def assert_same(got, expected):
    checkpoints.assert_same_answers(got, expected, atol=STEP)


@pytest.mark.parametrize("kv_cache_dtype", EACH_FORMAT)
def test_cache_hits_chunks_and_preemption_give_the_same_tokens(kv_cache_dtype, path):
    llm = make_llm(path, kv_cache_dtype, enable_prefix_caching=False)
    expected = answers(llm)
    assert llm.stats().prefix_cache_hits == 0

    cached = make_llm(path, kv_cache_dtype)
    assert_same(answers(cached), expected)
    cold = cached.stats().prefix_cache_hits
    assert_same(answers(cached), expected)
    assert cached.stats().prefix_cache_hits > 2 * cold

    pressed = make_llm(
        path, kv_cache_dtype, max_num_batched_tokens=13, num_gpu_blocks_override=40, decode_steps=1
    )
    assert_same(answers(pressed), expected)
    assert pressed.stats().num_preemptions > 0


def rounded(x, format):
    """float32[..., D] after a round trip through the format, in NumPy."""
    if format in FLOATS:
        limit = float(jnp.finfo(FLOATS[format]).max)
        return np.clip(x, -limit, limit).astype(FLOATS[format]).astype(np.float32)
    levels = {"int8": 255, "int4": 15}[format]
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    scale = (high - low) / np.float32(levels)
    zero = -low / scale
    return (np.clip(np.floor(x / scale + zero + 0.5), 0, levels) - zero) * scale


class RoundedAttention(DenseAttention):
    """Of a model that knows no pool: its own keys and values, rounded."""

    def __init__(self, positions, format):
        super().__init__(positions)
        self.format = format

    def __call__(self, layer, q, k, v, **options):
        k, v = (jnp.asarray(rounded(np.asarray(x), self.format)) for x in (k, v))
        return super().__call__(layer, q, k, v, **options)


@pytest.mark.parametrize("kv_cache_dtype", EACH_FORMAT)
def test_logprobs_are_those_of_a_dense_model_with_rounded_keys_and_values(kv_cache_dtype, path):
    llm = make_llm(path, kv_cache_dtype)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in (1, 15, 16, 17, 60)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    found = checkpoints.answers(llm, prompts, params)

    model = build(checkpoints.config(path), dtype="float32", max_model_len=256)
    load(model, path, use_tqdm=False)

    rounding, total = [], []
    for prompt, (answer, got) in zip(prompts, found, strict=True):
        tokens = prompt + answer
        positions = jnp.arange(len(tokens), dtype=jnp.int32)
        for attention, differences in (
            (RoundedAttention(positions, kv_cache_dtype), rounding),
            (DenseAttention(positions), total),
        ):
            ids = jnp.asarray(tokens, jnp.int32)
            inputs = ForwardInput(token_ids=ids, positions=positions, attention=attention)
            hidden = model.hidden_states(inputs)
            expected = np.asarray(jax.nn.log_softmax(model.logits(hidden)))[len(prompt) - 1 : -1]
            taken = expected[np.arange(20), answer]
            differences.append(np.abs(taken - got).max())
    assert max(rounding) < STEP, (rounding, total)
    assert max(total) > 4 * max(rounding), (rounding, total)  # the oracle's rounding is the reason
