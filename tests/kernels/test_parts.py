"""Layers with different heads in one array of a pool: each is read and written as if it had the array to itself."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import reference as write_reference
from pallas_kernels.kv_write.parts import PoolPart
from pallas_kernels.kv_write.quantized import FORMATS, QuantizedPool
from pallas_kernels.kv_write.xla import write_kv
from pallas_kernels.paged_attention import cases, reference, xla
from tests.kernels import test_paged_attention_tpu as on_tpu
from tests.kernels.block_copy import assert_same
from tests.kernels.paged_attention import run

PIECES = 8  # KV heads of the pool


class Part(NamedTuple):
    """As in `PoolPart`."""

    num_kv_heads: int
    pieces: int
    index: int


PARTS = (
    Part(num_kv_heads=2, pieces=1, index=3),
    Part(num_kv_heads=2, pieces=2, index=1),
    pytest.param(Part(num_kv_heads=2, pieces=1, index=0), marks=pytest.mark.slow),
    pytest.param(Part(num_kv_heads=1, pieces=8, index=0), marks=pytest.mark.slow),
    pytest.param(Part(num_kv_heads=4, pieces=1, index=1), marks=pytest.mark.slow),
    pytest.param(Part(num_kv_heads=1, pieces=4, index=1), marks=pytest.mark.slow),
)
ALL_FORMATS = (None, "int8", *(pytest.param(f, marks=pytest.mark.slow) for f in FORMATS[1:]))


def of_layer(part: Part, format: str | None) -> cases.Case:
    """Rows of one token and of many, over several tiles of keys."""
    return cases.Case(
        name="",
        query_lens=(1, 20, 0, 1),
        kv_lens=(200, 150, 0, 16),
        num_heads=8,
        num_kv_heads=part.num_kv_heads,
        head_dim=16 * part.pieces,
        format=format,
    )


def within(part: Part, own) -> PoolPart:
    """A pool of `PIECES` KV heads that has a layer's pool in its part, and NaN or bytes of ones everywhere else."""

    def placed(array, pieces):
        width = array.shape[3] // pieces
        fill = 255 if array.dtype == jnp.uint8 else np.nan
        whole = np.full((*array.shape[:2], 2 * PIECES, width), fill, np.asarray(array).dtype)
        size = 2 * part.num_kv_heads * pieces
        start = part.index * size
        whole[:, :, start : start + size] = np.asarray(array).reshape(*array.shape[:2], -1, width)
        return jnp.asarray(whole)

    if not isinstance(own, QuantizedPool):
        return PoolPart(placed(own, part.pieces), *part)
    scale_zero = None if own.scale_zero is None else placed(own.scale_zero, 1)
    whole = replace(own, data=placed(own.data, part.pieces), scale_zero=scale_zero)
    return PoolPart(whole, *part)


@pytest.mark.parametrize("format", ALL_FORMATS)
@pytest.mark.parametrize("part", PARTS)
def test_a_layer_reads_its_part_and_nothing_else(part, format):
    arguments = cases.arguments(of_layer(part, format))
    in_part = arguments | {"pool": within(part, arguments["pool"])}
    for attend in (xla.paged_attention, reference.paged_attention):
        want = run(attend, arguments)
        assert np.isfinite(want).all()
        np.testing.assert_array_equal(run(attend, in_part), want)


@pytest.mark.parametrize("format", ALL_FORMATS)
@pytest.mark.parametrize("part", PARTS)
def test_a_layer_writes_its_part_and_nothing_else(part, format):
    own = cases.arguments(of_layer(part, format), poison=False)["pool"]
    whole = within(part, own)
    slots = jnp.asarray([33, 18, -1, 21, 10**6], jnp.int32)
    shape = (2, slots.size, part.num_kv_heads, 16 * part.pieces)
    k, v = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    want = within(part, write_reference.write_kv(own, k, v, slots))
    assert_same(jax.jit(write_kv)(whole, k, v, slots), want)
    assert_same(write_reference.write_kv(whole, k, v, slots), want)


@pytest.mark.slow
@pytest.mark.parametrize("format", [None, "fp8_e4m3"])
@pytest.mark.parametrize("one_query_per_row", [False, True])
def test_the_tpu_kernel_reads_and_writes_its_lanes_and_no_others(format, one_query_per_row):
    """As with a pool of its own, to the bit. The other lanes are NaN, or bytes of ones, and stay so."""
    query_lens = (1, 1, 0, 1) if one_query_per_row else (1, 20, 0, 1)
    case = cases.Case(name="", query_lens=query_lens, kv_lens=(200, 90, 0, 33), head_dim=64)
    case = on_tpu.fitting(replace(case, dtype="bfloat16"), format)
    arrays = on_tpu.arrays_of(case)
    if one_query_per_row:  # the kernel has a query for each row
        for name in ("q", "k", "v"):
            arrays[name] = np.insert(arrays[name], 2, 0, axis=0)
    static = on_tpu.static_of(case) | {"one_query_per_row": one_query_per_row}
    expected, expected_pool = on_tpu.run(arrays, **static)
    own, index = on_tpu.to_tpu(arrays["pool"]), 2
    before, after = index * own.shape[2], 128

    def in_lanes(array):
        fill = 255 if array.dtype == jnp.uint8 else np.nan
        widths = ((0, 0), (0, 0), (before, after))
        return jnp.pad(array, widths, constant_values=jnp.asarray(fill, array.dtype))

    part = PoolPart(jax.tree.map(in_lanes, own), case.num_kv_heads, 1, index)
    names = ("q", "k", "v", "block_table", "kv_lens", "query_starts")
    q, k, v, *rows = (arrays[name] for name in names)
    out, pool = on_tpu.program(**dict(sorted(static.items())))(q, k, v, part, *rows)
    np.testing.assert_array_equal(np.asarray(out, np.float32), expected)
    assert_same(pool, jax.tree.map(in_lanes, expected_pool))
