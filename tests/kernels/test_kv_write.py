import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write.quantized import FORMATS, LEVELS, QuantizedPool
from pallas_kernels.kv_write.xla import from_storage, to_storage, write_kv


@pytest.mark.parametrize("storage", [jnp.float32, jnp.bfloat16, jnp.uint16])
def test_new_keys_and_values_reach_their_slots_and_no_others(storage):
    rng = np.random.default_rng(0)
    dtype = jnp.bfloat16 if storage == jnp.uint16 else storage
    pool = jnp.asarray(rng.integers(0, 1000, (5, 4, 6, 8)), storage)
    k, v = (jnp.asarray(rng.standard_normal((3, 3, 8)), dtype) for _ in range(2))
    slots = jnp.asarray([6, 19, 8], jnp.int32)
    written = np.array(jax.jit(write_kv)(pool, k, v, slots).reshape(20, 3, 2, 8))
    expected = np.array(pool.reshape(20, 3, 2, 8))
    for token, slot in enumerate(np.asarray(slots)):
        got = from_storage(jnp.asarray(written[slot]), dtype)
        np.testing.assert_array_equal(got[:, 0], k[token])
        np.testing.assert_array_equal(got[:, 1], v[token])
        written[slot] = expected[slot]
    np.testing.assert_array_equal(written, expected)


def random_pool(format, scale_zero_dtype):
    """4 blocks of 2 slots, 3 KV heads of 8, of random bits."""
    rng = np.random.default_rng(0)
    width = 4 if format == "int4" else 8
    scale_zero = jnp.asarray(rng.integers(0, 999, (4, 2, 6, 2)), scale_zero_dtype)
    return QuantizedPool(
        data=jnp.asarray(rng.integers(0, 256, (4, 2, 6, width)), jnp.uint8),
        scale_zero=scale_zero if format in LEVELS else None,
        format=format,
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.uint16])
@pytest.mark.parametrize("format", FORMATS)
def test_a_quantised_pool_keeps_what_was_written_and_all_other_bits(format, dtype):
    pool = random_pool(format, dtype)
    kv_dtype = jnp.bfloat16 if dtype == jnp.uint16 else dtype
    rng = np.random.default_rng(1)
    kv = jnp.asarray(rng.standard_normal((3, 3, 2, 8)), kv_dtype)
    slots = [6, 1, 3]
    written = jax.jit(write_kv)(pool, kv[:, :, 0], kv[:, :, 1], jnp.asarray(slots, jnp.int32))
    assert jax.tree.structure(written) == jax.tree.structure(pool)
    tokens = jax.jit(to_storage)(kv.reshape(3, 6, 8), pool)
    for got, old, new in zip(*map(jax.tree.leaves, (written, pool, tokens)), strict=True):
        expected = np.array(old).reshape(8, *old.shape[2:])
        expected[slots] = new
        np.testing.assert_array_equal(np.asarray(got).reshape(expected.shape), expected)
    read = from_storage(tokens, kv_dtype)
    assert read.dtype == kv_dtype
    error = np.abs(np.asarray(read - kv.reshape(3, 6, 8), np.float32)).max()
    assert error < {"int8": 0.04, "int4": 0.25, "fp8_e4m3": 0.2, "fp8_e5m2": 0.35}[format]
