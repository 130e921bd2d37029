"""Phi: the names of its checkpoints survive a conversion, and the head's bias is used with each kind of weights."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpage import SamplingParams
from jaxpage.weights.convert import convert
from tests import checkpoints, dense_families
from tests.weights.test_convert import assert_bitwise


@pytest.mark.parametrize("variant", [0, 1])
def test_names_survive_a_conversion(variant, tmp_path):
    hf = dense_families.build("phi", variant, tmp_path / "hf")
    convert(convert(hf, tmp_path / "orbax"), tmp_path / "back")
    assert_bitwise(tmp_path / "back", hf)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_the_head_has_a_bias_beside_rounded_weights(quantization, tmp_path):
    """Rounding moves logits by far less than the bias does."""
    path = dense_families.build("phi", 0, tmp_path)
    prompt = np.arange(5, 25).tolist()
    llm = checkpoints.make_llm(
        path,
        quantization=quantization,
        enforce_eager=True,
        max_logprobs=checkpoints.VOCAB_SIZE,
    )
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=checkpoints.VOCAB_SIZE)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].logprobs is not None
    row = output.outputs[0].logprobs[0]
    found = np.array([row[token].logprob for token in range(checkpoints.VOCAB_SIZE)])
    logits = checkpoints.torch_logits(path, np.array([prompt]))[0, -1]
    expected = logits - np.log(np.exp(logits).sum())
    # The bias has a standard deviation of 0.5.
    assert np.std(found - expected) < 0.15
