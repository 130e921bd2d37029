"""The TPU kernels that move blocks, interpreted on the CPU, against the definition, bit for bit.

The interpreter simulates DMAs, fills uninitialised memory with NaN, and finds races. DMAs arrive when they are waited
for, or as soon as they start: copies that must not overtake one another are seen in both.
"""

from __future__ import annotations

from functools import cache, partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the races have no public name
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from jaxpage.ops import blocks
from jaxpage.parallel.sharding import TENSOR
from pallas_kernels.block_copy import cases, reference, tpu
from tests.kernels.test_block_copy import assert_same, ids

MOVES = ("copy_blocks", "gather_blocks", "scatter_blocks")
LANES = [pool for pool in cases.POOLS if pool.lanes]


@cache
def program(name: str, when: str):
    interpreted = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", dma_execution_mode=when
    )
    return jax.jit(partial(getattr(tpu, name), interpret=interpreted))


def run(name: str, *arguments, when: str = "on_wait"):
    result = jax.block_until_ready(program(name, when)(*arguments))
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found
    return result


@pytest.mark.parametrize("when", ["on_wait", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", cases.COPIES, ids=lambda case: case.name)
def test_all_sources_are_read_before_any_destination_is_written(case, when):
    layers = cases.layers(LANES[0])
    pairs = [*case.pairs, *cases.PADDING * (cases.NUM_BLOCKS - len(case.pairs))]  # one program
    sources, destinations = (ids(each) for each in zip(*pairs, strict=True))
    got = run("copy_blocks", layers, sources, destinations, when=when)
    assert_same(got, reference.copy_blocks(layers, sources, destinations))


@pytest.mark.slow
@pytest.mark.parametrize("pool", LANES[1:], ids=lambda pool: pool.name)
def test_copies_in_every_pool(pool):
    layers = cases.layers(pool)
    pairs = ids([1, 2, 7, 6, 0]), ids([2, 3, 6, 7, 0])
    assert_same(run("copy_blocks", layers, *pairs), reference.copy_blocks(layers, *pairs))


def leave_and_come_back(pool, some):
    layers, others = cases.layers(pool), cases.layers(pool, seed=1)
    contents = run("gather_blocks", layers, ids(some))
    assert_same(contents, reference.gather_blocks(layers, ids(some)), first=0)
    got = run("scatter_blocks", others, ids(some), contents)
    assert_same(got, reference.scatter_blocks(others, ids(some), contents))


def test_blocks_leave_and_come_back():
    leave_and_come_back(LANES[2], cases.BLOCKS[0])


@pytest.mark.slow
@pytest.mark.parametrize("pool", LANES, ids=lambda pool: pool.name)
@pytest.mark.parametrize("some", cases.BLOCKS, ids=len)
def test_blocks_of_every_pool_leave_and_come_back(pool, some):
    leave_and_come_back(pool, some)


@pytest.mark.slow
@pytest.mark.parametrize("by_head", [True, False])
def test_on_several_devices_each_moves_what_it_has(by_head, monkeypatch):
    """As a step calls it. Each device has its heads of every block, or each has all."""
    kernels = {
        name: partial(getattr(tpu, name), interpret=pltpu.InterpretParams()) for name in MOVES
    }
    monkeypatch.setattr(blocks, "_tpu", lambda: SimpleNamespace(**kernels))
    mesh = Mesh(np.array(jax.devices()[:2]), (TENSOR,))
    options = dict(mesh=mesh, by_head=by_head)
    layers, others = cases.layers(LANES[2]), cases.layers(LANES[2], seed=1)
    pairs, some = (ids([1, 2, 7, 6, 0]), ids([2, 3, 6, 7, 0])), ids(cases.BLOCKS[0])
    got = jax.jit(partial(blocks.copy_blocks, **options))(layers, *pairs)
    assert_same(got, reference.copy_blocks(layers, *pairs))
    contents = jax.jit(partial(blocks.gather_blocks, **options))(layers, some)
    assert_same(contents, reference.gather_blocks(layers, some), first=0)
    got = jax.jit(partial(blocks.scatter_blocks, **options))(others, some, contents)
    assert_same(got, reference.scatter_blocks(others, some, contents))
