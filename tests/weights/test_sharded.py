"""Loading and initialising over a mesh of (fake) devices, and the table of sharding rules."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpage.models.layers import Normal
from jaxpage.models.registry import build
from jaxpage.parallel.sharding import sharding
from jaxpage.weights.dummy import initialise
from jaxpage.weights.load import load
from jaxpage.weights.safetensors import StoredTensor
from jaxpage.weights.spec import specs, variables
from tests import checkpoints


def mesh(num_devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:num_devices]), ("tensor",))


def values(model: nnx.Module) -> dict[str, np.ndarray]:
    return {path: np.asarray(variable.get_value()) for path, variable in variables(model).items()}


def dense_logits(model: nnx.Module, token_ids: jax.Array) -> np.ndarray:
    graphdef, state = nnx.split(model)
    return np.asarray(jax.jit(lambda s, t: nnx.merge(graphdef, s)(t))(state, token_ids))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "variant", "num_devices"),
    [("llama", 0, 2), ("llama", 2, 8), ("phi3", 2, 4), ("gemma3", 2, 8)],
)
def test_sharded_load_gives_the_same_model(family, variant, num_devices, tmp_path):
    path = checkpoints.build(family, variant, tmp_path)
    hf_config = checkpoints.config(path)
    single = load(build(hf_config, dtype="float32"), path, use_tqdm=False)
    sharded = load(build(hf_config, dtype="float32"), path, mesh=mesh(num_devices), use_tqdm=False)
    expected = values(single)
    assert all(np.array_equal(array, expected[name]) for name, array in values(sharded).items())
    wanted = specs(sharded)
    for name, variable in variables(sharded).items():
        assert variable.get_value().sharding == wanted[name].sharding(mesh(num_devices))
    token_ids = jnp.arange(3, 40, dtype=jnp.int32)
    on_mesh = jax.device_put(token_ids, NamedSharding(mesh(num_devices), P()))
    expected_logits = dense_logits(single, token_ids)
    np.testing.assert_allclose(dense_logits(sharded, on_mesh), expected_logits, atol=2e-5)


def test_heads_are_split_over_devices_and_too_few_kv_heads_are_replicated(tmp_path):
    path = checkpoints.build("llama", 0, tmp_path)  # 4 heads, 2 KV heads of 8, hidden 32, MLP 72
    model = load(
        build(checkpoints.config(path), dtype="float32"), path, mesh=mesh(4), use_tqdm=False
    )
    held = {
        name: variable.get_value().addressable_shards[3].data.shape
        for name, variable in variables(model).items()
    }
    assert held["model.layers.0.self_attn.q_proj.weight"] == (8, 32)
    assert held["model.layers.0.self_attn.k_proj.weight"] == (
        16,
        32,
    )  # could be cut, but not in heads
    assert held["model.layers.0.self_attn.o_proj.weight"] == (32, 8)
    assert held["model.layers.1.mlp.up_proj.weight"] == (18, 32)
    assert held["model.layers.1.mlp.down_proj.weight"] == (32, 18)
    assert held["model.norm.weight"] == (32,)
    assert held["model.embed_tokens.weight"] == (250, 32)  # 250 rows do not divide by 4


def test_every_byte_is_read_once_over_all_devices(tmp_path, monkeypatch):
    path = checkpoints.build("llama", 0, tmp_path)
    num_bytes, num_reads = Counter(), Counter()
    read = StoredTensor.read

    def recording(self, index=()):
        array = read(self, index)
        num_bytes[self.name] += array.nbytes
        num_reads[self.name] += 1
        return array

    monkeypatch.setattr(StoredTensor, "read", recording)
    model = load(
        build(checkpoints.config(path), dtype="float32"), path, mesh=mesh(4), use_tqdm=False
    )
    assert num_bytes == {name: array.nbytes for name, array in values(model).items()}
    assert num_reads["model.layers.0.self_attn.q_proj.weight"] == 4
    assert num_reads["model.layers.0.self_attn.k_proj.weight"] == 1  # replicated


@pytest.mark.slow
def test_dummy_weights_follow_their_initialisers_and_not_the_mesh(tmp_path):
    path = checkpoints.build("llama", 0, tmp_path)
    model = build(checkpoints.config(path), dtype="bfloat16")
    wanted = specs(model)
    single = values(initialise(model, seed=3))
    again = values(
        initialise(build(checkpoints.config(path), dtype="bfloat16"), seed=3, mesh=mesh(2))
    )
    other = values(initialise(build(checkpoints.config(path), dtype="bfloat16"), seed=4))
    for name, array in single.items():
        spec = wanted[name]
        assert array.shape == spec.shape and array.dtype == jnp.bfloat16
        assert np.array_equal(array, again[name])
        if isinstance(spec.init, Normal):
            spread = array.astype(np.float32)
            error = 5 / array.size**0.5  # five standard errors of the mean
            assert spread.std() == pytest.approx(spec.init.stddev, rel=error)
            assert abs(spread.mean()) < error * spec.init.stddev
            assert not np.array_equal(array, other[name])
        else:
            assert np.all(array.astype(np.float32) == spec.init.value)
    same_shape = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(2)]
    assert not np.array_equal(single[same_shape[0]], single[same_shape[1]])


def test_bfloat16_weights_are_normal_and_unbiased():
    # jax.random.normal in bfloat16 fails each line: biased, 128 values, no tails
    draw = np.asarray(Normal(1.0)(jax.random.key(0), (1_000_000,), jnp.dtype("bfloat16")))
    assert abs(draw.astype(np.float64).mean()) < 5 / 1_000_000**0.5
    assert len(np.unique(draw)) > 1000
    assert np.abs(draw.astype(np.float32)).max() > 4


def test_sharding_follows_the_rules():
    two = mesh(2)
    assert sharding(two, ("heads", "embed")).spec == P("tensor")
    assert sharding(two, ("embed", "mlp")).spec == P(None, "tensor")
    assert sharding(two, ("embed",)).spec == P()
    assert sharding(two, ("kv_heads", "embed"), (3, 32)).spec == P()
    assert sharding(two, ("heads",)) is sharding(two, ("heads",))
    assert sharding(None, ("heads",)).device_set == {jax.local_devices()[0]}
    data_only = Mesh(np.array(jax.devices()[:2]), ("data",))
    assert sharding(data_only, ("heads", "embed")).spec == P()
    with pytest.raises(ValueError, match="no sharding rule for axis 'time'"):
        sharding(two, ("time",))
