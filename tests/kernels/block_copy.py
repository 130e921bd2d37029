"""What every implementation of moves of whole blocks has to do, bit for bit: its tests subclass `BlockCopyTests`."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_copy import cases, reference
from pallas_kernels.block_copy.cases import BLOCKS, Copies, Pool

PAIRS = [1, 2, 7, 6, 0], [2, 3, 6, 7, 0]


class BlockCopyTests:
    """`cases` are lists of copies, `pools` those that the implementation serves: copies are of the first."""

    cases: ClassVar[tuple[Copies, ...]] = cases.COPIES
    fast: ClassVar[tuple[str, ...] | None] = None
    pools: ClassVar[tuple[Pool, ...]]

    def run(self, name: str, *arguments):
        """`copy_blocks`, `gather_blocks` or `scatter_blocks`."""
        raise NotImplementedError

    def test_all_sources_are_read_before_any_destination_is_written(self, case: Copies):
        self.check_copies(self.pools[0], *zip(*case.pairs, strict=True))

    @pytest.mark.slow
    def test_copies_in_every_pool(self, pool: Pool):
        self.check_copies(pool, *PAIRS)

    @pytest.mark.slow
    def test_blocks_of_every_pool_leave_and_come_back(self, pool: Pool):
        self.check_moves(pool, BLOCKS[0])

    @pytest.mark.parametrize(
        "blocks",
        [BLOCKS[0], *(pytest.param(b, marks=pytest.mark.slow) for b in BLOCKS[1:])],
        ids=len,
    )
    def test_any_number_of_blocks_leaves_and_comes_back(self, blocks):
        self.check_moves(self.pools[-1], blocks)

    def check_copies(self, pool: Pool, sources, destinations) -> None:
        layers, pairs = cases.layers(pool), (ids(sources), ids(destinations))
        got = self.run("copy_blocks", layers, *pairs)
        assert_same(got, reference.copy_blocks(layers, *pairs))

    def check_moves(self, pool: Pool, blocks) -> None:
        layers, others = cases.layers(pool), cases.layers(pool, seed=1)
        contents = self.run("gather_blocks", layers, ids(blocks))
        assert_same(contents, reference.gather_blocks(layers, ids(blocks)), first=0)
        got = self.run("scatter_blocks", others, ids(blocks), contents)
        assert_same(got, reference.scatter_blocks(others, ids(blocks), contents))


def ids(values) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def assert_same(got, wanted, *, first: int = 1) -> None:
    """To the bit, NaN too. The null block means nothing."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(
            np.asarray(one)[first:].view(np.uint8), np.asarray(other)[first:].view(np.uint8)
        )
