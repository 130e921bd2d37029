"""What towers are made of, and configs that cannot be served."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from jaxpage.models import vision
from jaxpage.models.registry import build
from jaxpage.models.vision import attend_near, attend_within
from tests import picture_models


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        ("qwen2_5_vl", {"out_hidden_size": 40}, "embeddings of 40 values, the decoder has 48"),
        ("qwen2_5_vl", {"hidden_act": "tanh"}, "activation 'tanh'"),
        ("qwen2_5_vl", {"num_heads": 16}, "16 heads for hidden_size 32"),
        ("qwen3_vl", {"deepstack_visual_indexes": [2, 4]}, r"\[2, 4\] must ascend within the 4"),
        ("gemma3", {"num_attention_heads": 5}, "5 heads for hidden_size 24"),
        ("gemma3", {"image_size": 60}, "does not pool evenly to 16"),
    ],
)
def test_configs_that_cannot_be_served_are_refused(make, change, message):
    config = getattr(picture_models, f"{make}_config")(**change)
    architectures = {
        "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
        "qwen3_vl": "Qwen3VLForConditionalGeneration",
        "gemma3": "Gemma3ForConditionalGeneration",
    }
    config.architectures = [architectures[make]]
    with pytest.raises(ValueError, match=message):
        build(config, dtype="float32")


@pytest.mark.parametrize("most_near", [16, pytest.param(4096, marks=pytest.mark.slow)])
def test_attention_in_tiles_sees_exactly_its_segment(most_near, monkeypatch):
    monkeypatch.setattr(vision, "_MOST_NEAR", most_near)
    rng = np.random.default_rng(0)
    lengths = [8, 1, 5, 8, 3, 8, 8, 2, 7]  # longest 8
    segments = np.repeat(np.arange(len(lengths)), lengths)
    q, k, v = (rng.normal(size=(len(segments), 2, 4)).astype(np.float32) for _ in range(3))
    near = jax.jit(partial(attend_near, scale=0.5, longest=8))(q, k, v, segments=segments)
    within = jax.jit(partial(attend_within, scale=0.5))(q, k, v, segments=segments)
    near, within = np.asarray(near), np.asarray(within)
    for segment in range(len(lengths)):
        own = segments == segment
        scores = 0.5 * np.einsum("qhd,khd->hqk", q[own], k[own])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v[own])
        np.testing.assert_allclose(near[own], expected, atol=1e-6)
        np.testing.assert_allclose(within[own], expected, atol=1e-6)
