"""Moves of whole blocks in plain XLA against the definition, bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_copy import cases, reference, xla


def ids(values):
    return jnp.asarray(values, jnp.int32)


def assert_same(got, wanted, *, first=1):
    """To the bit, NaN too. The null block means nothing."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(
            np.asarray(one)[first:].view(np.uint8), np.asarray(other)[first:].view(np.uint8)
        )


copy = jax.jit(xla.copy_blocks)
gather = jax.jit(xla.gather_blocks)
scatter = jax.jit(xla.scatter_blocks)
SOME = [pool for pool in cases.POOLS if pool.name in ("bfloat16-heads", "int8-lanes")]


@pytest.mark.parametrize("case", cases.COPIES, ids=lambda case: case.name)
def test_copies_of_every_shape(case):
    layers = cases.layers(SOME[0])
    sources, destinations = (ids(each) for each in zip(*case.pairs, strict=True))
    assert_same(
        copy(layers, sources, destinations), reference.copy_blocks(layers, sources, destinations)
    )


@pytest.mark.slow
@pytest.mark.parametrize("pool", cases.POOLS, ids=lambda pool: pool.name)
def test_copies_in_every_pool(pool):
    layers = cases.layers(pool)
    pairs = ids([1, 2, 7, 6, 0]), ids([2, 3, 6, 7, 0])
    assert_same(copy(layers, *pairs), reference.copy_blocks(layers, *pairs))


@pytest.mark.parametrize("pool", SOME, ids=lambda pool: pool.name)
@pytest.mark.parametrize("blocks", cases.BLOCKS[:1] + cases.BLOCKS[2:], ids=str)
def test_blocks_leave_and_come_back(pool, blocks):
    layers, others = cases.layers(pool), cases.layers(pool, seed=1)
    contents = gather(layers, ids(blocks))
    assert_same(contents, reference.gather_blocks(layers, ids(blocks)), first=0)
    got = scatter(others, ids(blocks), contents)
    assert_same(got, reference.scatter_blocks(others, ids(blocks), contents))
