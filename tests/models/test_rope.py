"""Frequencies of every RoPE type against transformers' own functions, and the rotation against
complex numbers.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxpage.models.rope import Rope, layer_ropes, rotate

_TRAINED = {"original_max_position_embeddings": 4096}
_FACTORS = {"short_factor": [1.0] * 31 + [1.5], "long_factor": [1.0 + i for i in range(32)]}
PARAMETERS = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.25},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | _TRAINED,
    {"rope_type": "yarn", "factor": 8.0} | _TRAINED,
    {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2, "truncate": False}
    | _TRAINED,
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5} | _TRAINED,
    {"rope_type": "yarn", "factor": None} | _TRAINED,
    {"rope_type": "longrope", "factor": 8.0} | _FACTORS | _TRAINED,
    {"rope_type": "longrope", "attention_factor": 1.1} | _FACTORS | _TRAINED,
    {"rope_type": "longrope"} | _FACTORS | _TRAINED,
]


@pytest.mark.parametrize("max_model_len", [4096, 20_000, 60_000])
@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda p: p["rope_type"])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_frequencies_are_those_of_transformers_at_max_model_len(parameters, max_model_len, theta):
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=16_384
    )
    config.rope_parameters = parameters | {"rope_theta": theta}
    compute = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    inv_freq, scale = compute(config, "cpu", seq_len=max_model_len)
    rope = layer_ropes(config, ["full_attention"], head_dim=64, max_model_len=max_model_len)[0]
    np.testing.assert_allclose(rope.inv_freq, inv_freq.numpy(), rtol=3e-7)
    assert rope.scale == pytest.approx(scale, rel=1e-6)


def test_rotation_multiplies_complex_numbers_and_passes_the_rest():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, 10)).astype(np.float32)
    rope = Rope((1.0, 0.5, 0.01), scale=1.25)
    positions = np.array([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]], np.int32)
    cos, sin = rope.angles(jnp.asarray(positions), jnp.float32)
    turns = 1.25 * np.exp(1j * positions[..., None, None] * np.array(rope.inv_freq))
    turned = (x[..., :3] + 1j * x[..., 3:6]) * turns
    expected = np.concatenate([turned.real, turned.imag, x[..., 6:]], axis=-1)
    np.testing.assert_allclose(rotate(jnp.asarray(x), cos, sin), expected, atol=1e-5)
