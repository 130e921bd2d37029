"""An EAGLE-3 head computes what it computes in torch; end_to_end/test_eagle3.py does the same in engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxpage.checkpoint_config import load_hf_config
from jaxpage.models.attention import DenseAttention
from jaxpage.models.eagle3 import EagleHead, eagle3_config, eagle3_name
from jaxpage.models.inputs import ForwardInput
from jaxpage.weights.load import load
from jaxpage.weights.safetensors import open_checkpoint
from tests.eagle_heads import CONFIG, Head

TARGET: Any = SimpleNamespace(architecture="A", num_layers=8, hidden_size=32, vocab_size=250)


def config_of(folder, tensors=(), target=TARGET):
    hf_config = load_hf_config(str(folder))
    return eagle3_config(hf_config, target, tensors=tensors, dtype="float32", max_model_len=64)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain"),
        pytest.param({"norm_before_residual": True, "num_hidden_layers": 2}, id="two layers"),
        pytest.param({"norm_before_fc": True}, id="a norm of all"),
        pytest.param({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 1]}}, id="M-RoPE"),
        pytest.param({"fc_norm": True, "norm_output": True}, id="norms of each"),
        pytest.param(
            {"hidden_size": 48, "target_hidden_size": 32, "draft_vocab_size": None},
            id="all tokens",
            marks=pytest.mark.slow,
        ),
        pytest.param({"model_type": "qwen3", "head_dim": 16}, id="Qwen 3", marks=pytest.mark.slow),
    ],
)
def test_its_logits_and_features_are_those_of_torch(changes, tmp_path):
    """At three positions of each token, of which a head without M-RoPE reads the first."""
    rng = np.random.default_rng(0)
    theirs = Head(CONFIG | changes, torch.tensor(rng.normal(size=(250, 32)), dtype=torch.float32))
    theirs.save(tmp_path)
    ours = EagleHead(config_of(tmp_path, open_checkpoint(tmp_path)))
    load(ours, tmp_path, use_tqdm=False)
    tokens, hidden = rng.integers(0, 250, 7), rng.normal(size=(7, 96)).astype(np.float32)
    positions = rng.integers(0, 9, (3, 7))
    with torch.no_grad():
        read = theirs.features(torch.tensor(hidden))
        their_logits, their_features = theirs(torch.tensor(tokens), read, torch.tensor(positions))
    features = ours.features(jnp.asarray(hidden))
    inputs = ForwardInput(
        token_ids=jnp.asarray(tokens),
        positions=jnp.asarray(positions),
        attention=DenseAttention(jnp.arange(7)),
    )
    embeds = jnp.asarray(theirs.embedding.numpy())[tokens]
    states, found = ours.propose(inputs, features, embeds)
    np.testing.assert_allclose(found, their_features, atol=1e-4)
    expected = np.full((7, 250), -np.inf, np.float32)
    expected[:, theirs.d2t.numpy() + np.arange(len(theirs.d2t))] = their_logits
    np.testing.assert_allclose(ours.logits(states), expected, atol=1e-4)


def test_layers_are_counted_by_their_inputs(tmp_path):
    def layers(**changes):
        Head(CONFIG, torch.zeros(250, 32)).save(tmp_path, **changes)
        return config_of(tmp_path).eagle.layers

    ids = "eagle_aux_hidden_state_layer_ids"
    assert layers(**{ids: [3, 8]}) == (3, 8)
    assert layers(**{ids: None}) == (2, 4, 5)
    assert layers(**{ids: None}, eagle_config={ids: [1, 7]}) == (2, 8)
    assert layers(**{ids: None}, eagle_config={"use_aux_hidden_state": False}) == ()
    with pytest.raises(ValueError, match="layers 0, 9 of a model that has layers 0 .. 7"):
        layers(**{ids: [0, 9]})


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("midlayer.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("d2t", "d2t"),
        ("t2d", None),
    ],
)
def test_names_of_tensors(theirs, ours):
    assert eagle3_name(theirs) == ours
