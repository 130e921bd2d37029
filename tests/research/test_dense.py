"""Values inside a model against those of transformers, and what happens when they are changed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.research import points, run_with_cache, run_with_hooks
from jaxpage.rl import load_module
from tests import checkpoints, dense_families, mixtures

TOKENS = np.random.default_rng(0).integers(3, checkpoints.VOCAB_SIZE, (2, 20))


SLOW = [
    pytest.param(family, marks=pytest.mark.slow)
    for family in (
        "qwen3",
        "gemma4",
        "qwen3_5",
        "nemotron_h",
        "lfm2",
        "falcon_h1",
        "gpt_neox",
        "gpt2",
        "phi",
    )
]


@pytest.fixture(scope="module", params=[*SLOW, "gemma2"])
def case(request, tmp_path_factory):
    """A module, and what transformers says of its inside."""
    builder = dense_families if request.param in dense_families.VARIANTS else checkpoints
    path = builder.build(request.param, 0, tmp_path_factory.mktemp(request.param))
    return load_module(str(path)), inside(path)


def inside(path):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model(torch.tensor(TOKENS), output_hidden_states=True, output_attentions=True)


@pytest.mark.slow
def test_values_are_those_of_transformers(case):
    module, theirs = case
    logits, cache = run_with_cache(module, TOKENS)
    np.testing.assert_allclose(logits, theirs.logits, atol=1e-4)
    assert list(cache) == points(module.config)
    last = module.config.num_layers - 1
    attentions = dict(zip(module.config.attention_layers, theirs.attentions, strict=True))
    for index in range(module.config.num_layers):
        block = f"blocks.{index}"
        pairs = {f"{block}.hook_resid_pre": theirs.hidden_states[index]}
        if index in attentions:
            pairs[f"{block}.attn.hook_pattern"] = attentions[index]
        if index < last:
            pairs[f"{block}.hook_resid_post"] = theirs.hidden_states[index + 1]
        for name, value in pairs.items():
            np.testing.assert_allclose(cache[name], value, atol=1e-4, err_msg=name)
        if index not in attentions:
            continue
        z = cache[f"{block}.attn.hook_z"]
        head_dim = module.config.kv_heads(index).head_dim
        assert z.shape == (2, 20, module.config.num_heads, head_dim)
    np.testing.assert_allclose(
        cache["ln_final.hook_normalized"], theirs.hidden_states[-1], atol=1e-4
    )
    alone, few = run_with_cache(module, TOKENS[0], "blocks.*.hook_mlp_out")
    np.testing.assert_allclose(alone, logits[0], atol=1e-5)
    mixers = module.config.mixers or ("mlp",) * (last + 1)
    with_mlp = [index for index, mixer in enumerate(mixers) if mixer == "mlp"]
    assert sorted(few) == [f"blocks.{i}.hook_mlp_out" for i in with_mlp]


@pytest.mark.slow
def test_what_a_hook_returns_goes_on(case):
    """A vector as an argument: another one compiles nothing. Patching a layer's result patches all that follows."""
    module, _ = case
    traced = []

    @jax.jit
    def steered(vector):
        traced.append(1)
        hook = lambda value, name: value.at[..., 5:, :].add(vector[None, None])  # noqa: E731
        return run_with_hooks(module, TOKENS, [("blocks.0.hook_resid_post", hook)])

    plain, clean = run_with_cache(module, TOKENS)
    size = module.config.hidden_size
    np.testing.assert_allclose(steered(jnp.zeros(size)), plain, atol=1e-4)
    changed = steered(jnp.linspace(-1, 1, size))  # a LayerNorm removes what is constant
    assert len(traced) == 1
    np.testing.assert_allclose(changed[:, :5], plain[:, :5], atol=1e-4)
    assert np.abs(changed[:, 5:] - plain[:, 5:]).max() > 0.01
    other, unclean = run_with_cache(module, (TOKENS + 1) % checkpoints.VOCAB_SIZE)
    assert np.abs(other - plain).max() > 0.1
    last = f"blocks.{module.config.num_layers - 1}.hook_resid_post"
    patched = run_with_hooks(module, TOKENS, [(last, lambda value, name: unclean[name])])
    np.testing.assert_allclose(patched, other, atol=1e-4)
    looked = run_with_hooks(module, TOKENS, [("*", lambda value, name: None)])
    np.testing.assert_allclose(looked, plain, atol=1e-4)


@pytest.mark.slow
def test_latents_are_the_keys_and_values_of_all_heads(tmp_path):
    """Multi-head latent attention as it is computed: queries and sums are of latents, weights those of the heads."""
    path = mixtures.build("deepseek_v3", 1, tmp_path)
    theirs = inside(path)
    logits, cache = run_with_cache(load_module(str(path)), TOKENS)
    np.testing.assert_allclose(logits, theirs.logits, atol=1e-4)
    for index, weights in enumerate(theirs.attentions):
        block = f"blocks.{index}.attn.hook_"
        np.testing.assert_allclose(cache[f"{block}pattern"], weights, atol=1e-4)
        shapes = {name: cache[f"{block}{name}"].shape[2:] for name in "qkvz"}
        assert shapes == {"q": (8, 28), "k": (1, 28), "v": (1, 20), "z": (8, 20)}
        np.testing.assert_array_equal(cache[f"{block}k"][..., :20], cache[f"{block}v"])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma4"], indirect=True)
def test_a_change_of_keys_reaches_all_layers_that_read_them(case):
    """Layers 3 and 4 read those of layer 1."""
    module, _ = case
    _, clean = run_with_cache(module, TOKENS)
    seen = []

    def turn(value, name):
        seen.append(name)
        return -value

    def keep(value, name):
        return clean[name]

    # What layers 3 and 4 get is the same: only layer 1's weights and theirs may change.
    hooks = [("blocks.1.attn.hook_k", turn), ("blocks.*.hook_resid_post", keep)]
    _, changed = run_with_cache(module, TOKENS, hooks=hooks)
    assert seen == ["blocks.1.attn.hook_k"]
    differ = [
        index
        for index in range(6)
        if not np.allclose(*(x[f"blocks.{index}.attn.hook_pattern"] for x in (clean, changed)))
    ]
    assert differ == [1, 3, 4]


@pytest.mark.slow
def test_heads_are_removed_and_effects_differentiated(case):
    """The gradient by a factor on each head is what a small change of the factor does."""
    module, _ = case
    shape = (module.config.num_layers, module.config.num_heads)

    def score(factors):
        def scale(value, name):
            return value * factors[int(name.split(".")[1])][None, None, :, None]

        logits = run_with_hooks(module, TOKENS, [("blocks.*.attn.hook_z", scale)])
        return jax.nn.log_softmax(logits[0, -1])[7]

    ones = jnp.ones(shape)
    gradient = jax.jit(jax.grad(score))(ones)
    step = 1e-2
    first, last = module.config.attention_layers[0], module.config.attention_layers[-1]
    for layer, head in ((first, 1), (last, 0)):
        apart = score(ones.at[layer, head].add(step)) - score(ones.at[layer, head].add(-step))
        assert float(apart) / (2 * step) == pytest.approx(
            float(gradient[layer, head]), rel=0.05, abs=1e-3
        )
    assert float(score(ones.at[first, 1].set(0))) != pytest.approx(float(score(ones)))


def test_names_and_shapes_are_checked(case):
    module, _ = case
    with pytest.raises(
        ValueError, match=r"no point is called 'blocks\.9\*'; there are blocks\.0\.hook"
    ):
        run_with_cache(module, TOKENS, "blocks.9*")
    with pytest.raises(ValueError, match="no point is called 'resid'"):
        run_with_hooks(module, TOKENS, [("resid", lambda value, name: value)])
    hooks = [("blocks.0.hook_resid_post", lambda value, name: value[..., 0])]
    with pytest.raises(ValueError, match=r"returned \[2, 20\] in the place of \[2, 20, "):
        jax.eval_shape(lambda: run_with_hooks(module, TOKENS, hooks))
