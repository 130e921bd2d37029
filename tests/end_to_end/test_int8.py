"""`quantization="int8"` and `"fp8"` through the engine: the tokens of a plain loop over the same rounded weights, no
pool.
"""

import numpy as np
import pytest
from flax import nnx

from jaxpage import SamplingParams
from jaxpage.device import Device
from jaxpage.models.registry import build
from jaxpage.ops.matmul import choose
from jaxpage.weights.load import load
from jaxpage.weights.transform import join_projections, quantize
from tests import checkpoints, mixtures

PROMPTS = [[5, 9, 13], [7] * 20, list(range(3, 40))]
NUM_TOKENS = 12


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize(
    "family", ["qwen2", "qwen2_moe", pytest.param("glm4_moe", marks=pytest.mark.deep)]
)
def test_the_engine_computes_what_the_rounded_model_computes(family, quantization, tmp_path):
    path = (mixtures if family in mixtures.VARIANTS else checkpoints).build(family, 0, tmp_path)
    llm = checkpoints.make_llm(
        path,
        quantization=quantization,
        max_model_len=64,
        max_num_seqs=4,
        num_gpu_blocks_override=64,
        enforce_eager=True,
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)

    model = build(checkpoints.config(path), dtype="float32", max_model_len=64)
    load(model, path, use_tqdm=False)
    join_projections(model)
    quantize(model, quantization, lambda weight, *_: choose(weight, Device(platform="cpu")))
    forward = nnx.jit(lambda model, token_ids: model(token_ids))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert len(tokens) == NUM_TOKENS
        # One length, hence one program: a token sees nothing of the padding after it.
        padded = np.zeros(64, np.int32)
        padded[: len(prompt) + NUM_TOKENS] = prompt + tokens
        logits = np.asarray(forward(model, padded))[len(prompt) - 1 :][:NUM_TOKENS]
        # A row's scale is a maximum over float32 sums: rounding at the border of two integers may differ, so the
        # sampled token may be beaten by as little as that moves a logit.
        taken = logits[np.arange(NUM_TOKENS), tokens]
        assert (logits.max(axis=-1) - taken).max() < 0.05 * logits.std()


@pytest.mark.slow
def test_fp8_on_two_devices_and_with_new_weights(tmp_path):
    """New weights are floats, as those from the start, and are rounded alike."""
    first = checkpoints.build("qwen2", 0, tmp_path / "first")
    second = checkpoints.save(checkpoints.config(first), tmp_path / "second", seed="other")
    options = {"enforce_eager": True, "num_gpu_blocks_override": 64}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    one, two, other = (
        checkpoints.make_llm(path, quantization=name, tensor_parallel_size=n, **options)
        for path, name, n in (
            (first, "fp8", 1),
            (first, "fp8_per_tensor", 2),
            (second, "fp8_per_channel", 1),
        )
    )
    assert {llm.config.quantization for llm in (one, two, other)} == {"fp8"}
    expected = checkpoints.answers(one, PROMPTS, params)
    checkpoints.assert_same_answers(checkpoints.answers(two, PROMPTS, params), expected, atol=1e-4)
    expected = checkpoints.answers(other, PROMPTS, params)
    for llm in (one, two):
        llm.update_weights(second)
        checkpoints.assert_same_answers(
            checkpoints.answers(llm, PROMPTS, params), expected, atol=1e-4
        )
