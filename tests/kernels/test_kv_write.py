"""The scatter of new keys and values against the definition, bit for bit, and what is read of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import cases, reference
from pallas_kernels.kv_write.quantized import QuantizedPool
from pallas_kernels.kv_write.storage import from_storage, to_storage
from pallas_kernels.kv_write.xla import write_kv
from tests.kernels.block_copy import assert_same

write = jax.jit(write_kv)


def check(pool, slots):
    arguments = cases.arguments(pool, slots)
    assert_same(write(*arguments), reference.write_kv(*arguments))


@pytest.mark.parametrize("slots", cases.SLOTS, ids=lambda slots: slots.name)
def test_new_keys_and_values_reach_their_slots_and_no_others(slots):
    check(cases.POOLS[0], slots)


def pools(fast):
    """All but the first; those that are not among the fast ones are slow."""
    return [
        pytest.param(pool, marks=() if pool.name in fast else pytest.mark.slow, id=pool.name)
        for pool in cases.POOLS[1:]
    ]


@pytest.mark.parametrize("pool", pools(("plain-uint16", "int8-bfloat16", "fp8_e4m3-float32")))
def test_every_pool_keeps_what_was_written_and_all_other_bits(pool):
    check(pool, cases.SLOTS[-3])


def test_the_definition_is_what_its_words_say():
    """Head by head in NumPy, token 1 to slot 2 of block 5; token 0 goes nowhere."""
    pool, k, v, _ = cases.arguments(cases.POOLS[0], cases.SLOTS[-3])
    written = reference.write_kv(pool, k[:2], v[:2], jnp.asarray([-1, 22], jnp.int32))
    assert not isinstance(written, QuantizedPool)
    expected = np.array(pool)
    for head in range(3):
        expected[5, 2, 2 * head], expected[5, 2, 2 * head + 1] = k[1, head], v[1, head]
    np.testing.assert_array_equal(np.asarray(written), expected)


@pytest.mark.parametrize("pool", pools(("int8-float32", "int4-uint16")))
def test_what_is_read_is_what_was_written_but_for_the_rounding(pool):
    layer, k, v, _ = cases.arguments(pool, cases.SLOTS[-1])
    kv = jnp.stack([k, v], axis=2).reshape(k.shape[0], -1, k.shape[2])
    read = from_storage(jax.jit(to_storage)(kv, layer), kv.dtype)
    assert (read.shape, read.dtype) == (kv.shape, kv.dtype)
    error = np.abs(np.asarray(read - kv, np.float32)).max()
    most = {None: 0.0, "int8": 0.04, "int4": 0.25, "fp8_e4m3": 0.2, "fp8_e5m2": 0.35}
    assert error <= most[pool.format]
