"""Rounding of keys and values to 8 and 4 bits against NumPy, and the bounds of its error."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pallas_kernels.kv_write.quantized import FLOATS, FORMATS, LEVELS, dequantize, quantize

ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8}  # greatest relative error of one rounding


@cache
def both_ways(format, stored):
    """x float32[V, D] -> (data, scale and zero, x after the round trip)."""

    @jax.jit
    def run(x):
        data, scale_zero = quantize(x, format, stored if format in LEVELS else None)
        return data, scale_zero, dequantize(data, scale_zero, format)

    return run


def oracle(x, format, stored):
    """q, scale and zero in float64, of a formula written out; the range of x must not be empty."""
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    scale = ((high - low) / LEVELS[format]).astype(stored).astype(np.float64)
    zero = (-low / scale).astype(stored).astype(np.float64)
    q = np.clip(np.floor(x / scale + zero + 0.5), 0, LEVELS[format])
    return q, scale, zero


@pytest.mark.parametrize("head_dim", [64, 12])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", LEVELS)
def test_integers_are_those_of_the_formula(format, stored, head_dim):
    x = np.random.default_rng(0).standard_normal((500, head_dim)).astype(np.float32)
    data, scale_zero, back = map(np.asarray, both_ways(format, stored)(x))
    if format == "int4":
        assert data.shape == (500, head_dim // 2)
        data = np.concatenate(
            [data % 16, data // 16], axis=-1
        )  # the low half of a byte comes first
    q, scale, zero = oracle(x.astype(np.float64), format, jnp.dtype(stored))
    # Close to the border of two integers float32 may decide otherwise than float64.
    assert np.abs(data - q).max() <= 1
    assert (data != q).mean() < 1e-3
    got = scale_zero.astype(np.float64)
    np.testing.assert_allclose(got, np.concatenate([scale, zero], axis=-1), rtol=1e-6)
    np.testing.assert_allclose(back, (data - zero) * scale, rtol=1e-5, atol=1e-6)


VALUES = st.floats(width=32, allow_subnormal=False, min_value=-(2.0**90), max_value=2.0**90)


@settings(deadline=None, max_examples=200)
@given(
    x=arrays.arrays(np.float32, (4, 8), elements=VALUES | st.sampled_from([0.0, 1.0, -3.5, 1e-20])),
    format=st.sampled_from(list(LEVELS)),
    stored=st.sampled_from(list(ROUNDING)),
)
def test_an_integer_is_off_by_half_a_step_and_the_rounding_of_what_is_stored(x, format, stored):
    _, scale_zero, back = map(np.asarray, both_ways(format, stored)(x))
    scale = scale_zero[:, :1].astype(np.float64)
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    cut_off = ROUNDING[stored] * (np.abs(low) + (high - low))
    arithmetic = 2.0**-20 * np.abs(x).max(axis=-1, keepdims=True) + 2.0**-120
    assert (np.abs(back - x.astype(np.float64)) <= scale / 2 + cut_off + arithmetic).all()


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", LEVELS)
def test_vectors_without_a_range_survive(format, stored):
    """A scale of (max - min) / n would be 0, and the zero NaN."""
    constants = np.asarray([0.0, 3.3, -1e4, 1e-20, 2.0**100], np.float32)
    _, _, back = both_ways(format, stored)(np.tile(constants[:, None], (1, 8)))
    assert (np.asarray(back)[0] == 0).all()
    bound = 2 * ROUNDING[stored] * np.abs(constants)[:, None] + 2.0**-120
    assert (np.abs(np.asarray(back) - constants[:, None]) <= bound).all()


@pytest.mark.parametrize("format", FORMATS)
def test_nan_stays_nan(format):
    x = np.ones((3, 8), np.float32)
    x[1, 4] = np.nan
    *_, back = both_ways(format, "float32")(x)
    assert np.isnan(np.asarray(back)[1, 4])
    assert np.isfinite(np.asarray(back)[[0, 2]]).all()


@pytest.mark.parametrize("format", FLOATS)
def test_every_byte_of_fp8_is_read_as_the_number_it_is(format):
    data = np.arange(256, dtype=np.uint8)
    got = jax.jit(lambda data: dequantize(data, None, format))(data)
    np.testing.assert_array_equal(got, data.view(FLOATS[format]).astype(np.float32))


@pytest.mark.parametrize("format", FLOATS)
def test_fp8_saturates_and_rounds_to_the_nearest(format):
    """ml_dtypes is the oracle: correct rounding, ties to even."""
    limit = float(jnp.finfo(FLOATS[format]).max)
    x = np.random.default_rng(0).standard_normal((500, 64)).astype(np.float32) * limit / 8
    x[0, :6] = [np.inf, -np.inf, 3e38, -limit * 1.01, limit, -limit]
    x[1] = x[2] / limit * float(jnp.finfo(FLOATS[format]).smallest_normal)  # subnormal ones
    *_, back = both_ways(format, None)(x)
    assert (np.asarray(back)[0, :6] == np.asarray([1, -1, 1, -1, 1, -1]) * limit).all()
    expected = np.clip(x, -limit, limit).astype(FLOATS[format]).astype(np.float32)
    np.testing.assert_array_equal(back, expected)
