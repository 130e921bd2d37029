"""Adapters beside linear layers: what is added, and that it does not depend on other slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx

from jaxpage.models import registry
from jaxpage.models.layers import Linear, Normal
from jaxpage.models.lora import (
    Adapters,
    adapter_arrays,
    attach_adapters,
    with_adapters,
    write_slot,
)
from jaxpage.weights.transform import join_projections
from tests import dense_families

SLOTS, RANK, IN = 3, 4, 24
PARTS = {"q_proj": 16, "k_proj": 8}


class OneLayer(nnx.Module):
    def __init__(self, parts, dtype):
        shape = (sum(parts.values()), IN)
        init = Normal(0.1)
        layer = Linear(shape, axes=("heads", "embed"), bias=True, init=init, dtype=dtype)
        rng = np.random.default_rng(0)
        layer.weight.set_value(jax.device_put(rng.normal(size=shape).astype(dtype)))
        layer.bias.set_value(jax.device_put(rng.normal(size=shape[:1]).astype(dtype)))
        layer.adapters = nnx.data(Adapters(layer, parts, num_slots=SLOTS, rank=RANK, dtype=dtype))
        adapters = layer.adapters
        for variable in (adapters.a, *adapters.b):
            struct = variable.get_value()
            variable.set_value(jax.device_put(rng.normal(size=struct.shape).astype(struct.dtype)))
        self.layer = layer

    def __call__(self, x):
        return self.layer(x)


def expected(model, parts, x, slots):
    """Token by token, in float64."""
    layer, adapters = model.layer, model.layer.adapters
    weight, bias = (np.asarray(v.get_value(), np.float64) for v in (layer.weight, layer.bias))
    a = np.asarray(adapters.a.get_value(), np.float64).reshape(SLOTS, len(parts), RANK, IN)
    rows = []
    for token, slot in zip(np.asarray(x, np.float64), slots, strict=True):
        y = weight @ token + bias
        if slot:
            halves = [np.asarray(b.get_value(), np.float64) for b in adapters.b]
            own = slice((slot - 1) * RANK, slot * RANK)
            y += np.concatenate([b[:, own] @ a[slot - 1, i] @ token for i, b in enumerate(halves)])
        rows.append(y)
    return np.stack(rows)


@pytest.mark.parametrize("parts", [PARTS, {"o_proj": 10}])
def test_each_token_gets_its_own_adapter(parts):
    model = OneLayer(parts, jnp.float32)
    x = np.random.default_rng(1).normal(size=(7, IN)).astype(np.float32)
    slots = np.array([0, 3, 1, 2, 2, 0, 1], np.int32)
    x = jax.device_put(x)
    got = with_adapters(model, jax.device_put(slots))(x)
    np.testing.assert_allclose(got, expected(model, parts, x, slots), atol=1e-4)
    plain = with_adapters(model, None)(x)
    np.testing.assert_allclose(plain, expected(model, parts, x, 0 * slots), atol=1e-4)
    assert model.layer.adapters.slots is None  # the copy had them


@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16])
def test_what_other_slots_hold_changes_no_bit(dtype):
    """Not even values that overflow for tokens that they are not for."""
    model = OneLayer(PARTS, dtype)
    x = jax.device_put(np.random.default_rng(1).normal(size=(9, IN)).astype(dtype))
    slots = jax.device_put(np.array([0, 3, 1, 2, 2, 0, 1, 1, 2], np.int32))
    before = with_adapters(model, slots)(x)
    adapters, largest = model.layer.adapters, float(jnp.finfo(dtype).max)
    a = adapters.a[...].reshape(SLOTS, -1, IN).at[1].set(largest)
    adapters.a.set_value(a.reshape(-1, IN))
    for b in adapters.b:
        b.set_value(b[...].at[:, RANK : 2 * RANK].set(largest))
    after = with_adapters(model, slots)(x)
    others = np.asarray(slots) != 2
    np.testing.assert_array_equal(
        np.asarray(before, np.float32)[others], np.asarray(after, np.float32)[others]
    )


def test_a_slot_is_written_and_no_other():
    rng = np.random.default_rng(2)
    weights = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((6, 5), (7, 9))]
    contents = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 5), (7, 3))]
    a, b = jax.jit(write_slot, static_argnames="axes")(weights, jnp.int32(2), contents, axes=(0, 1))
    np.testing.assert_array_equal(a, weights[0].at[2:4].set(contents[0]))
    np.testing.assert_array_equal(b, weights[1].at[:, 3:6].set(contents[1]))


def test_an_mlp_without_a_gate_has_adapters(tmp_path):
    """StarCoder 2's."""
    hf = transformers.AutoConfig.from_pretrained(dense_families.build("starcoder2", 0, tmp_path))
    model = registry.build(hf, dtype="float32")
    attach_adapters(model, num_slots=2, rank=4, mesh=None)
    shapes = {a.layers: a.shape for a in adapter_arrays(model, 2) if not a.is_a}
    assert shapes["model.layers.1.mlp.c_fc",] == (hf.intermediate_size, 4)
    assert shapes["model.layers.1.mlp.c_proj",] == (hf.hidden_size, 4)


def test_a_joined_layer_of_another_size_has_adapters_of_its_size():
    """The expert that all tokens share is smaller than the config's MLP."""
    hf = transformers.Qwen2MoeConfig(
        architectures=["Qwen2MoeForCausalLM"],
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        vocab_size=128,
        max_position_embeddings=64,
    )
    model = registry.build(hf, dtype="float32")
    join_projections(model)
    attach_adapters(model, num_slots=2, rank=4, mesh=None)
    shapes = {a.layers: a.shape for a in adapter_arrays(model, 2) if not a.is_a}
    for name in ("gate_proj", "up_proj"):
        assert shapes[f"model.layers.0.mlp.shared_expert.{name}",] == (24, 4)
