"""Bytes of the KV pool, read from what was allocated."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxpage.kv_pool import KVPoolSpec
from pallas_kernels.kv_write.quantized import FLOATS, FORMATS, LEVELS

SPEC = KVPoolSpec(
    num_arrays=3,
    num_blocks=7,
    block_size=16,
    num_kv_heads=2,
    head_dim=128,
    dtype=jnp.dtype(jnp.bfloat16),
)


def allocated(**changes):
    spec = dataclasses.replace(SPEC, **changes)
    return spec, sum(array.nbytes for array in jax.tree.leaves(spec.allocate()))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("format", [None, *FORMATS])
def test_a_pool_has_exactly_the_bytes_it_says(format, dtype):
    spec, num_bytes = allocated(format=format, dtype=jnp.dtype(dtype))
    assert num_bytes == spec.num_bytes == 7 * spec.bytes_per_block
    kinds = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(spec.abstract())]
    assert kinds == [(array.shape, array.dtype) for array in jax.tree.leaves(spec.allocate())]


def test_an_unquantised_layer_is_one_array():
    assert all(isinstance(layer, jax.Array) for layer in SPEC.allocate())


@pytest.mark.parametrize(
    ("format", "head_dim", "gain"),
    [
        ("int8", 128, 1.93),
        ("int4", 128, 3.76),
        ("fp8_e4m3", 128, 2),
        ("int8", 64, 1.88),
        ("int4", 64, 3.55),
    ],
)
def test_equal_bytes_hold_more_tokens(format, head_dim, gain):
    """The bars at head dim 128 are 1.85 for int8 and 3.2 for int4."""
    _, full = allocated(head_dim=head_dim)
    _, fewer = allocated(head_dim=head_dim, format=format)
    assert full / fewer >= gain


@pytest.mark.parametrize(("layout", "width"), [("heads", 576), ("tpu", 640)])
def test_a_pool_of_latents_has_keys_alone(layout, width):
    """On a TPU in whole registers of 128. In 8 bits they take half, and integers have scales, which do not fit them."""
    options = {"num_kv_heads": 2, "head_dim": 576, "value_dim": 512, "sharded": True}
    spec, num_bytes = allocated(layout=layout, **options)
    assert spec.abstract()[0].shape == (7, 16, 2 * width)
    assert num_bytes == spec.num_bytes == 3 * 7 * 16 * 2 * width * 2
    assert spec.axes_of(spec.abstract()[0]) == ("blocks", "block", "kv_heads")
    for format in FLOATS:
        spec, half = allocated(layout=layout, format=format, **options)
        assert half == spec.num_bytes == num_bytes / 2
        (data,) = jax.tree.leaves(spec.abstract()[0])
        assert data.shape == (7, 16, 2 * width)
        assert spec.axes_of(data) == ("blocks", "block", "kv_heads")
    for format in LEVELS:
        with pytest.raises(
            ValueError, match=f"kv_cache_dtype='{format}' is not supported .*\"fp8\""
        ):
            dataclasses.replace(spec, format=format)


@pytest.mark.parametrize("format", [None, "int8"])
def test_a_tpu_s_layout_has_a_row_of_heads_for_each_slot(format):
    """The same bytes, and heads on another axis of scales and zeros."""
    spec = dataclasses.replace(SPEC, layout="tpu", format=format, sharded=True)
    (layer, *_) = spec.abstract()
    shapes = {array.shape: spec.axes_of(array) for array in jax.tree.leaves(layer)}
    wanted = {(7, 16, 2 * 2 * 128): ("blocks", "block", "kv_heads")}
    if format:
        wanted |= {(7, 4 * 2, 16): ("blocks", "kv_heads", "block")}
    assert shapes == wanted
    assert spec.num_bytes == dataclasses.replace(SPEC, format=format).num_bytes


def test_int4_refuses_what_it_cannot_pack():
    with pytest.raises(ValueError, match="head_dim of this model is 33, which is odd"):
        dataclasses.replace(SPEC, format="int4", head_dim=33)
