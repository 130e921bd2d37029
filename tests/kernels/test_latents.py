"""Pools of keys whose first elements are the values: read and written as if the values were stored beside them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import cases as writes
from pallas_kernels.kv_write import reference as write_reference
from pallas_kernels.kv_write.latents import LatentPool
from pallas_kernels.kv_write.quantized import FLOATS, QuantizedPool
from pallas_kernels.kv_write.storage import to_storage
from pallas_kernels.kv_write.xla import write_kv
from pallas_kernels.paged_attention import cases, reference, xla
from tests.kernels.block_copy import assert_same
from tests.kernels.paged_attention import case_of, run

VALUE_DIM = 20


def with_keys_as_values(pool: jax.Array) -> jax.Array:
    """A pool [N, S, 2*K, D] whose values are its keys."""
    return jnp.repeat(pool[:, :, ::2], 2, axis=2)


def padded(keys: jax.Array, width: int) -> jax.Array:
    """[N, S, width] of keys [N, S, 1, D]."""
    return jnp.pad(keys[:, :, 0], ((0, 0), (0, 0), (0, width - keys.shape[3])))


def read_alike(
    name: str,
    *,
    width: int = 32,
    stored: bool = False,
    format: str | None = None,
    **options,
) -> None:
    """By XLA and by the definition, from a poisoned pool. stored: as bits; format: of 8-bit floats."""
    case = replace(case_of(name), num_heads=8, num_kv_heads=1)
    arguments = cases.arguments(case)
    pool = arguments["pool"]
    if format:
        rounded = np.asarray(pool, np.float32).astype(FLOATS[format])
        pool = jnp.asarray(rounded.astype(pool.dtype))
    want = run(reference.paged_attention, arguments | {"pool": with_keys_as_values(pool)})
    keys = padded(pool[:, :, ::2], width)
    if stored:
        keys = to_storage(keys, jnp.zeros(0, jnp.uint16))
    if format:
        bits = np.asarray(keys).astype(FLOATS[format]).view(np.uint8)
        keys = QuantizedPool(data=jnp.asarray(bits), scale_zero=None, format=format)
    given = arguments | {"pool": LatentPool(keys, VALUE_DIM)}
    tolerance = 2e-2 if case.dtype == "bfloat16" else 2e-6
    for attend, more in ((reference.paged_attention, {}), (xla.paged_attention, options)):
        got = run(attend, given, **more)
        assert got.shape == (*want.shape[:2], VALUE_DIM) and np.isfinite(got).all()
        tokens = slice(sum(case.query_lens))  # the others are padding
        expected = want[tokens, :, :VALUE_DIM]
        np.testing.assert_allclose(got[tokens], expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "name",
    [
        "mixed",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("empty-rows-between", "window", "sinks", "soft-cap", "padding")
        ),
    ],
)
def test_values_are_the_first_elements_of_keys(name):
    read_alike(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["block-edges", "decode-long"])
def test_one_query_per_row_is_the_same(name):
    read_alike(name, one_query_per_row=True)


@pytest.mark.slow
@pytest.mark.parametrize("stored", [False, True])
def test_padded_keys_and_bits_of_bfloat16(stored):
    read_alike("bfloat16", width=40, stored=stored)


@pytest.mark.slow
@pytest.mark.parametrize("format", FLOATS)
@pytest.mark.parametrize("name", ["mixed", "bfloat16", "decode-long"])
def test_keys_and_values_of_8_bits(name, format):
    read_alike(name, width=40, format=format, one_query_per_row=name == "decode-long")


@pytest.mark.parametrize(
    ("stored", "format"),
    [
        ("float32", None),
        pytest.param("uint16", None, marks=pytest.mark.slow),
        ("float32", "fp8_e4m3"),
        pytest.param("bfloat16", "fp8_e5m2", marks=pytest.mark.slow),
    ],
)
def test_keys_alone_are_written(stored, format):
    """To the bit, and no others, whatever the values."""
    of_pool = writes.Pool(name="", stored=stored, num_kv_heads=1, format=format)
    pool, k, v, slots = writes.arguments(of_pool, writes.SLOTS[-3])

    def of_keys(pool):
        return LatentPool(jax.tree.map(lambda x: padded(x[:, :, ::2], 16), pool), VALUE_DIM)

    keys, want = of_keys(pool), of_keys(write_reference.write_kv(pool, k, v, slots))
    values = jnp.full((*v.shape[:2], 3), jnp.nan, v.dtype)
    for write in (write_reference.write_kv, jax.jit(write_kv)):
        assert_same(write(keys, k, values, slots), want)
