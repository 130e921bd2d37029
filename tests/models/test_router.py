"""Routers with corrections and groups: their gradients, their dtype, and what of a config is refused."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from jaxpage.models.config import ExpertsConfig, Routing
from jaxpage.models.registry import build
from jaxpage.models.router import Router
from jaxpage.weights.spec import variables
from tests import mixtures
from tests.models import test_families as families

EXPERTS = ExpertsConfig(
    layers=(0,),
    num_experts=8,
    experts_per_token=3,
    intermediate_size=4,
    shares_add_up_to_one=True,
    routing=Routing(scores="sigmoid", has_correction=True, num_groups=4, chosen_groups=2),
)


def router(settings: ExpertsConfig, dtype: str = "float32", seed: int = 0) -> Router:
    """Of a model with 16 dimensions, with random weights."""
    config = transformers.LlamaConfig(
        hidden_size=16, num_attention_heads=2, architectures=["LlamaForCausalLM"]
    )
    made = Router(build(config, dtype=dtype).config, settings)
    rng = np.random.default_rng(seed)
    for variable in variables(made).values():
        shape = variable.get_value()
        variable.set_value(jnp.asarray(rng.standard_normal(shape.shape), shape.dtype))
    return made


def test_a_token_goes_to_the_best_experts_of_the_best_groups():
    """By loops; shares know nothing of the corrections."""
    made = router(EXPERTS)
    rows = np.random.default_rng(1).standard_normal((30, 16)).astype(np.float32)
    chosen, shares = made.choose(jnp.asarray(rows))
    assert chosen.dtype == jnp.int32 and shares.dtype == jnp.float32
    values = {name: np.asarray(each.get_value()) for name, each in variables(made).items()}
    weight, correction = values["weight"], values["e_score_correction_bias"]
    scores = 1 / (1 + np.exp(-rows @ weight.T))
    for row, experts, given in zip(scores, chosen, shares, strict=True):
        wanted = row + correction
        groups = np.argsort([-np.sort(wanted[2 * i : 2 * i + 2]).sum() for i in range(4)])[:2]
        allowed = [2 * i + j for i in groups for j in range(2)]
        best = sorted(allowed, key=lambda expert: -wanted[expert])[:3]
        assert best == list(experts)
        np.testing.assert_allclose(given, row[best] / row[best].sum(), rtol=1e-5)


def test_the_divisor_of_shares_may_have_a_part_of_its_own():
    """LFM2-MoE's is small; here it is not."""
    plain = replace(EXPERTS, routing=Routing(scores="sigmoid"))
    more = replace(EXPERTS, routing=Routing(scores="sigmoid", added_to_sum=0.5))
    rows = jnp.asarray(np.random.default_rng(1).standard_normal((30, 16)), jnp.float32)
    (chosen, expected), (same, shares) = (router(each).choose(rows) for each in (plain, more))
    np.testing.assert_array_equal(chosen, same)
    scores = 1 / (1 + np.exp(-np.asarray(rows) @ np.asarray(router(plain).weight[...]).T))
    sums = np.take_along_axis(scores, np.asarray(chosen), axis=1).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(shares, expected * sums / (sums + 0.5), rtol=1e-5)


def test_a_group_may_be_as_good_as_its_best_expert():
    """DeepSeek-V2: shares are parts of a softmax over all experts, times a factor."""
    grouped = Routing(num_groups=4, chosen_groups=2, num_best=1, factor=2.5)
    made = router(replace(EXPERTS, shares_add_up_to_one=False, routing=grouped))
    rows = np.random.default_rng(1).standard_normal((30, 16)).astype(np.float32)
    chosen, shares = made.choose(jnp.asarray(rows))
    exponentials = np.exp(rows @ np.asarray(made.weight[...]).T)
    for row, experts, given in zip(exponentials, chosen, shares, strict=True):
        groups = np.argsort([-row[2 * i : 2 * i + 2].max() for i in range(4)])[:2]
        allowed = [2 * i + j for i in groups for j in range(2)]
        best = sorted(allowed, key=lambda expert: -row[expert])[:3]
        assert best == list(experts)
        np.testing.assert_allclose(given, 2.5 * row[best] / row.sum(), rtol=1e-5)


def test_the_weight_may_be_float32_in_any_model():
    """Then logits are those of float32, which decide between experts that are nearly equal."""
    wide = replace(EXPERTS, routing=replace(EXPERTS.routing, in_float32=True))
    assert router(EXPERTS, "bfloat16").weight[...].dtype == jnp.bfloat16
    assert router(wide, "bfloat16").weight[...].dtype == jnp.float32
    rows = jnp.asarray(np.random.default_rng(1).standard_normal((30, 16)), jnp.bfloat16)
    narrow = router(wide, "bfloat16").choose(rows)
    exact = router(wide, "float32").choose(rows.astype(jnp.float32))
    np.testing.assert_array_equal(narrow[0], exact[0])
    np.testing.assert_allclose(narrow[1], exact[1], rtol=1e-6)


@pytest.mark.parametrize(
    ("groups", "chosen", "message"),
    [
        (3, 1, "8 experts cannot be in 3 equal groups"),
        (8, 4, "8 experts cannot be in 8 equal groups of at least 2, of which 4"),
        (4, 5, "of which 5 are chosen: check n_group and topk_group"),
        (0, 1, "8 experts cannot be in 0 equal groups"),
        (4, 1, "3 experts for each token in 1 groups of 2"),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups, chosen, message):
    routing = replace(EXPERTS.routing, num_groups=groups, chosen_groups=chosen)
    with pytest.raises(ValueError, match=message):
        replace(EXPERTS, routing=routing)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "variant"),
    [
        *(("glm4_moe", 1), ("glm4_moe", 2), ("minimax_m2", 0), ("ernie4_5_moe", 0)),
        *(("deepseek_v2", 0), ("deepseek_v2", 1), ("deepseek_v3", 1)),
    ],
)
def test_gradients_are_those_of_torch(family, variant, tmp_path):
    """Of every parameter; with experts stacked both have the same names."""
    path = mixtures.build(family, variant, tmp_path)
    token_ids = families.tokens(40)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.tensor(token_ids, dtype=torch.long)
    logits = theirs(tokens[None, :-1]).logits[0]
    torch.nn.functional.cross_entropy(logits, tokens[1:]).backward()
    gradients = ((name, each.grad) for name, each in theirs.named_parameters())
    expected = {name: slope for name, slope in gradients if slope is not None}
    graphdef, state = nnx.split(families.loaded(path))
    gradient = jax.jit(
        jax.grad(lambda state: families.loss(state, graphdef, jnp.asarray(token_ids)))
    )(state)
    found = {".".join(map(str, name)): leaf[...] for name, leaf in nnx.to_flat_state(gradient)}
    for name, slope in found.items():
        if name.endswith("e_score_correction_bias"):
            assert name not in expected and not np.any(slope)
            continue
        largest = float(expected[name].abs().max())
        np.testing.assert_allclose(
            slope, expected[name].numpy(), atol=1e-4 * largest, rtol=0, err_msg=name
        )
    assert set(expected) <= set(found) | {"lm_head.weight"}
