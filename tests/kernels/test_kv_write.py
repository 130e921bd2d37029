import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write.xla import copy_blocks, from_storage, write_kv


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


def test_copies_read_before_any_write():
    pool = jnp.arange(6 * 2 * 2 * 1, dtype=jnp.float32).reshape(6, 2, 2, 1)
    source, destination = jnp.asarray([1, 2, 0], jnp.int32), jnp.asarray([2, 3, 0], jnp.int32)
    copied = np.asarray(jax.jit(copy_blocks)(pool, source, destination))
    np.testing.assert_array_equal(copied, np.asarray(pool)[[0, 1, 1, 2, 4, 5]])
