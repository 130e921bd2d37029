"""Every family against transformers' torch model: logits, gradients, and what the attention is
told.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpage.checkpoint_config import load_hf_config
from jaxpage.models.attention import DenseAttention
from jaxpage.models.inputs import ForwardInput
from jaxpage.models.registry import REGISTRY, Family, build
from jaxpage.weights.load import load
from tests import checkpoints

MAX_LEN = 300


# The last variant of a family has most of its options; the fast core runs some of those only.
LAST = {family: (family, len(variants) - 1) for family, variants in checkpoints.VARIANTS.items()}
FAST = {
    "logits": [LAST["llama"], LAST["qwen3"], LAST["phi3"], LAST["gemma3"]],
    "bfloat16": [LAST["gemma3"]],
    "gradient": [],
    "prefix": [("llama", 3)],
}


def cases(test: str, all_cases: list[tuple[str, int]]) -> list:
    """All cases, those outside FAST marked slow."""
    slow = {case: () if case in FAST[test] else pytest.mark.slow for case in all_cases}
    return [pytest.param(case, marks=slow[case], id="{}-{}".format(*case)) for case in all_cases]


def tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, checkpoints.VOCAB_SIZE, shape).astype(np.int32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    @functools.cache
    def make(family: str, variant: int) -> Path:
        return checkpoints.build(family, variant, tmp_path_factory.mktemp(f"{family}-{variant}"))

    return make


def loaded(path: Path, dtype: str = "float32", max_model_len: int | None = MAX_LEN) -> nnx.Module:
    hf_config = checkpoints.config(path)
    return load(build(hf_config, dtype=dtype, max_model_len=max_model_len), path, use_tqdm=False)


def logits(model: nnx.Module, token_ids: np.ndarray, *positions: jax.Array) -> np.ndarray:
    graphdef, state = nnx.split(model)
    run = jax.jit(lambda state, *inputs: nnx.merge(graphdef, state)(*inputs))
    return np.asarray(run(state, token_ids, *positions))


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2)))


@pytest.mark.parametrize("case", cases("logits", checkpoints.CASES))
def test_float32_logits_equal_transformers(case, checkpoint):
    path = checkpoint(*case)
    token_ids = tokens(2, MAX_LEN)
    expected = checkpoints.torch_logits(path, token_ids)
    assert rms(expected) > 1  # else a mistake would not show
    np.testing.assert_allclose(logits(loaded(path), token_ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", cases("bfloat16", checkpoints.CASES))
def test_bfloat16_logits_are_as_close_to_float32_as_those_of_torch(case, checkpoint):
    path = checkpoint(*case)
    token_ids = tokens(1, 100)
    exact = checkpoints.torch_logits(path, token_ids)
    torch_error = rms(checkpoints.torch_logits(path, token_ids, dtype="bfloat16") - exact)
    model = loaded(path, "bfloat16", max_model_len=100)
    assert rms(logits(model, token_ids) - exact) < 1.2 * torch_error


@pytest.mark.parametrize("case", cases("prefix", [("llama", 3), ("phi3", 2), ("gemma3", 1)]))
def test_logits_of_a_prefix_do_not_depend_on_what_follows(case, checkpoint):
    # transformers fails this for dynamic and longrope RoPE: there the length of the input counts.
    model = loaded(checkpoint(*case))
    token_ids = tokens(MAX_LEN)
    prefix = logits(model, token_ids[:70])
    np.testing.assert_allclose(logits(model, token_ids)[:70], prefix, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("case", "max_model_len"), [(("llama", 3), 200), (("phi3", 2), 128)])
def test_rope_of_short_models_is_that_of_pretraining(case, max_model_len, checkpoint):
    path = checkpoint(*case)
    token_ids = tokens(1, max_model_len)
    expected = checkpoints.torch_logits(path, token_ids)
    got = logits(loaded(path, max_model_len=max_model_len), token_ids)
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_batch_axes_and_positions_are_free(checkpoint):
    model = loaded(checkpoint("qwen2", 1))
    token_ids = tokens(2, 3, 20)
    single = logits(model, token_ids[1, 2])
    shifted = logits(model, token_ids[1, 2], jnp.arange(100, 120, dtype=jnp.int32))
    np.testing.assert_allclose(logits(model, token_ids)[1, 2], single, atol=1e-5, rtol=0)
    np.testing.assert_allclose(shifted, single, atol=1e-4, rtol=0)  # RoPE is relative


class RecordingAttention:
    """Dense attention that writes down how it is called."""

    def __init__(self, positions):
        self.dense, self.calls = DenseAttention(positions), []

    def __call__(self, layer, q, k, v, *, scale, window, soft_cap):
        self.calls.append((layer, q.shape, k.shape, v.shape, q.dtype, scale, window, soft_cap))
        return self.dense(layer, q, k, v, scale=scale, window=window, soft_cap=soft_cap)


def test_attention_is_told_layer_scale_window_and_cap(checkpoint):
    model = loaded(checkpoint("gemma2", 1), "bfloat16")
    positions = jnp.arange(5, dtype=jnp.int32)
    attention = RecordingAttention(positions)

    @jax.jit
    def hidden_states(token_ids, positions):
        inputs = ForwardInput(token_ids=token_ids, positions=positions, attention=attention)
        return model.hidden_states(inputs)

    hidden = hidden_states(tokens(5), positions)
    assert hidden.shape == (5, 32) and hidden.dtype == jnp.bfloat16
    assert model.logits(hidden).dtype == jnp.float32
    shapes = ((5, 4, 16), (5, 4, 16), (5, 4, 16), jnp.bfloat16)
    scale = 24**-0.5
    assert attention.calls == [
        (0, *shapes, scale, 40, 3.0),
        (1, *shapes, scale, None, 3.0),
        (2, *shapes, scale, 40, 3.0),
    ]


def loss(state, graphdef, token_ids):
    log_probs = jax.nn.log_softmax(nnx.merge(graphdef, state)(token_ids[:-1]))
    return -jnp.mean(jnp.take_along_axis(log_probs, token_ids[1:, None], axis=-1))


def first_weight(state) -> nnx.Param:
    """Of the queries of the first layer."""
    layer = state.model.layers[0]
    if "mixer" in layer:
        return layer.mixer.in_proj_C.weight
    if "self_attn" in layer:
        return layer.self_attn.q_proj.weight
    if "mamba" in layer:
        return layer.mamba.in_proj_C.weight
    if "conv" in layer:
        return layer.conv.in_proj_C.weight
    return layer.linear_attn.in_proj_q.weight


GRADIENT_CASES = [(family, 0) for family in checkpoints.VARIANTS]


@pytest.mark.slow
@pytest.mark.parametrize("case", cases("gradient", GRADIENT_CASES))
def test_gradient_is_finite_and_equals_a_finite_difference(case, checkpoint):
    graphdef, state = nnx.split(loaded(checkpoint(*case)))
    value = jax.jit(functools.partial(loss, graphdef=graphdef, token_ids=jnp.asarray(tokens(40))))
    gradient = jax.jit(jax.grad(value))(state)
    assert all(np.isfinite(leaf).all() and np.any(leaf) for leaf in jax.tree.leaves(gradient))
    slope = np.asarray(first_weight(gradient)[...])
    length = np.linalg.norm(slope)
    step = jnp.asarray(slope / length) * 0.01  # along the gradient, where the difference is largest

    def moved(sign: float) -> float:
        changed = jax.tree.map(lambda leaf: leaf, state)
        weight = first_weight(changed)
        weight.set_value(weight[...] + sign * step)
        return float(value(changed))

    assert (moved(1) - moved(-1)) / 0.02 == pytest.approx(length, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_trainer_can_split_update_and_merge_the_model(dtype, checkpoint):
    graphdef, state = nnx.split(loaded(checkpoint("qwen3", 0), dtype))
    token_ids = jnp.asarray(tokens(30))

    @jax.jit
    def step(state):
        value, gradient = jax.value_and_grad(loss)(state, graphdef, token_ids)
        return value, jax.tree.map(lambda p, g: p - (0.05 * g).astype(p.dtype), state, gradient)

    losses = []
    for _ in range(5):
        value, state = step(state)
        losses.append(float(value))
    assert losses[-1] < losses[0] - 0.1
    assert logits(nnx.merge(graphdef, state), token_ids).shape == (30, checkpoints.VOCAB_SIZE)


def test_a_family_is_added_by_one_registry_entry(tmp_path, monkeypatch):
    from transformers import CwmConfig

    config = CwmConfig(
        **checkpoints.shape(4, 2, layers=3, head_dim=16),
        vocab_size=checkpoints.VOCAB_SIZE,
        intermediate_size=48,
        max_position_embeddings=512,
        sliding_window=11,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    path = checkpoints.save(config, tmp_path, seed="cwm")
    with pytest.raises(ValueError, match="CwmForCausalLM is not supported"):
        loaded(path)
    monkeypatch.setitem(REGISTRY, "CwmForCausalLM", Family())
    token_ids = tokens(1, 120)
    expected = checkpoints.torch_logits(path, token_ids)
    np.testing.assert_allclose(logits(loaded(path), token_ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "edit"),
    [
        # Llama has no window, and its activation is `hidden_act`.
        ("llama", {"sliding_window": 7, "use_sliding_window": False}),
        ("llama", {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}),
        ("llama", {"hidden_activation": "gelu"}),
        *(("llama", {"hidden_act": name}) for name in ("relu", "gelu_new", "swish")),
        # Phi-3 has one window for all layers.
        ("phi3", {"sliding_window": 7, "layer_types": ["full_attention"] * 2}),
    ],
    ids=str,
)
def test_a_config_is_read_as_transformers_reads_it(family, edit, tmp_path):
    path = checkpoints.build(family, 0, tmp_path, **edit)
    token_ids = tokens(1, 40)
    expected = checkpoints.torch_logits(path, token_ids)
    np.testing.assert_allclose(logits(loaded(path), token_ids), expected, atol=1e-4, rtol=0)


def test_a_mistral_with_layer_types_has_a_window_in_these_layers_only(tmp_path):
    kinds = ["full_attention", "sliding_attention"]
    path = checkpoints.build("mistral", 0, tmp_path, sliding_window=7, layer_types=kinds)
    model = build(load_hf_config(str(path)), dtype="float32")
    assert model.config.windows == (None, 7)
    token_ids = tokens(1, 40)
    expected = checkpoints.torch_logits(path, token_ids)
    found = logits(load(model, path, use_tqdm=False), token_ids)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
