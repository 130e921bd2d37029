"""Frequencies of every RoPE type against transformers' own functions, and the rotation against
complex numbers.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxpage.checkpoint_config import load_hf_config
from jaxpage.models.rope import Rope, layer_ropes
from pallas_kernels.rope.xla import rotate

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
    # Of a family that may rotate a part of the head.
    config = transformers.GlmConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=16_384
    )
    config.rope_parameters = parameters | {"rope_theta": theta}
    compute = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    inv_freq, scale = compute(config, "cpu", seq_len=max_model_len)
    rope = layer_ropes(config, ["full_attention"], head_dim=64, max_model_len=max_model_len)[0]
    np.testing.assert_allclose(rope.inv_freq, inv_freq.numpy(), rtol=3e-7)
    assert rope.scale == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize("inside", [{}, {"original_max_position_embeddings": 1024}], ids=str)
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "longrope"} | _FACTORS,
    ],
    ids=lambda p: p["rope_type"],
)
def test_the_length_of_pretraining_beside_the_parameters_counts(parameters, inside, tmp_path):
    stored = {
        "model_type": "llama",
        "hidden_size": 256,
        "num_attention_heads": 4,
        "max_position_embeddings": 16_384,
        "rope_theta": 10_000.0,
        "rope_scaling": parameters | inside,
        **_TRAINED,
    }
    (tmp_path / "config.json").write_text(json.dumps(stored))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    inv_freq, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=3000)
    read = load_hf_config(str(tmp_path))
    (rope,) = layer_ropes(read, ["full_attention"], head_dim=64, max_model_len=3000)
    np.testing.assert_allclose(rope.inv_freq, inv_freq.numpy(), rtol=3e-7)
    assert rope.scale == pytest.approx(scale, rel=1e-6)


def test_rotation_multiplies_complex_numbers_and_passes_the_rest():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, 10)).astype(np.float32)
    rope = Rope((1.0, 0.5, 0.01), scale=1.25)
    positions = np.array([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]], np.int32)
    cos, sin = jax.jit(lambda positions: rope.angles(positions, jnp.float32))(positions)
    turns = 1.25 * np.exp(1j * positions[..., None, None] * np.array(rope.inv_freq))
    turned = (x[..., :3] + 1j * x[..., 3:6]) * turns
    expected = np.concatenate([turned.real, turned.imag, x[..., 6:]], axis=-1)
    (found,) = jax.jit(rotate)([x], cos, sin)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_three_positions_turn_their_own_frequencies_as_in_transformers(interleaved):
    """Qwen2-VL has sections one after another, Qwen3-VL interleaves them."""
    rng = np.random.default_rng(0)
    positions = rng.integers(0, 100, (3, 2, 7)).astype(np.int32)
    x = rng.standard_normal((2, 7, 4, 32)).astype(np.float32)
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    parameters["mrope_interleaved"] = interleaved
    config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=4)
    config.rope_parameters = parameters
    (rope,) = layer_ropes(config, ["full_attention"], head_dim=32, max_model_len=4096)
    angles = jax.jit(lambda positions: rope.angles(positions, jnp.float32, three=True))(positions)
    (rotated,) = jax.jit(rotate)([x], *angles)
    expected = rotated_by_transformers(x, positions, config, interleaved)
    np.testing.assert_allclose(rotated, expected, atol=1e-5)


def rotated_by_transformers(x, positions, config, interleaved):
    import torch
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2
    from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3

    q, ids = torch.tensor(x).transpose(1, 2), torch.tensor(positions, dtype=torch.long)
    if interleaved:
        cos, sin = qwen3.Qwen3VLTextRotaryEmbedding(config)(q, ids)
        turned, _ = qwen3.apply_rotary_pos_emb(q, q, cos, sin)
    else:
        cos, sin = qwen2.Qwen2VLRotaryEmbedding(config)(q, ids)
        turned, _ = qwen2.apply_rotary_pos_emb(q, q, cos, sin)
    return turned.transpose(1, 2).numpy()


@pytest.mark.slow
def test_three_equal_positions_are_one():
    positions = jnp.arange(9, dtype=jnp.int32)
    three = jnp.stack([positions] * 3)
    plain, sectioned = Rope((1.0, 0.3, 0.1)), Rope((1.0, 0.3, 0.1), sections=(0, 1, 2))
    for rope in (plain, sectioned):
        for part, expected in zip(
            rope.angles(three, jnp.float32, three=True),
            plain.angles(positions, jnp.float32),
            strict=True,
        ):
            np.testing.assert_array_equal(part, expected)


def test_sections_that_do_not_fit_the_head_are_refused():
    config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=4)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 7]}
    with pytest.raises(ValueError, match=r"mrope_section \[4, 6, 7\] .* sum 16"):
        layer_ropes(config, ["full_attention"], head_dim=32, max_model_len=4096)
