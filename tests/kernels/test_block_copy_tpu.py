"""The TPU kernels that move blocks, interpreted on the CPU, against the definition, bit for bit.

The interpreter simulates DMAs, fills uninitialised memory with NaN, and finds races. DMAs arrive when they are waited
for, or as soon as they start: copies that must not overtake one another are seen in both.
"""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the races have no public name
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from jaxpage.kv_pool import KVPoolSpec
from jaxpage.ops import blocks
from jaxpage.parallel.sharding import TENSOR
from pallas_kernels.block_copy import cases, reference, tpu
from tests.kernels.block_copy import PAIRS, BlockCopyTests, assert_same, ids

MOVES = ("copy_blocks", "gather_blocks", "scatter_blocks")


@cache
def program(name: str, when: str):
    interpreted = pltpu.InterpretParams(
        detect_races=True, uninitialized_memory="nan", dma_execution_mode=when
    )
    return jax.jit(partial(getattr(tpu, name), interpret=interpreted))


class TestTPU(BlockCopyTests):
    fast = ("more-than-in-flight", "chain-backwards", "swap")
    pools = tuple(
        sorted(
            (pool for pool in cases.POOLS if pool.layout == "tpu"),
            key=lambda pool: pool.format == "int8",
        )
    )
    when = "on_wait"

    def run(self, name, *arguments):
        """As many pairs in each call, so that all are one program; no race was seen."""
        if name == "copy_blocks":
            layers, *pairs = arguments
            arguments = (
                layers,
                *(np.pad(each, (0, cases.NUM_BLOCKS - each.size)) for each in pairs),
            )
        result = jax.block_until_ready(program(name, self.when)(*arguments))
        assert interpret_pallas_call.races is not None
        assert not interpret_pallas_call.races.races_found
        return result


@pytest.mark.slow
class TestTPUWithCopiesThatArriveAtOnce(TestTPU):
    pools = TestTPU.pools[:1]
    when = "eager"


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [True, False])
def test_on_several_devices_each_moves_what_it_has(sharded, monkeypatch):
    """As a step calls it. Each device has its heads of every block, or each has all."""
    for name in MOVES:
        kernel = partial(getattr(tpu, name), interpret=pltpu.InterpretParams())
        monkeypatch.setattr(tpu, name, kernel)
    mesh = Mesh(np.array(jax.devices()[:2]), (TENSOR,))
    spec = KVPoolSpec(
        num_arrays=2,
        num_blocks=cases.NUM_BLOCKS,
        block_size=32,
        num_kv_heads=2,
        head_dim=64,
        dtype=jnp.dtype(jnp.bfloat16),
        format="int8",
        sharded=sharded,
        platform="tpu",
        layout="tpu",
    )
    pool = next(pool for pool in cases.POOLS if pool.name == "int8-tpu")
    options = dict(mesh=mesh, spec=spec)
    layers, others = cases.layers(pool), cases.layers(pool, seed=1)
    assert jax.tree.map(jnp.shape, layers) == jax.tree.map(lambda x: x.shape, spec.abstract())
    pairs, some = tuple(map(ids, PAIRS)), ids(cases.BLOCKS[0])
    got = jax.jit(partial(blocks.copy_blocks, **options))(layers, *pairs)
    assert_same(got, reference.copy_blocks(layers, *pairs))
    contents = jax.jit(partial(blocks.gather_blocks, **options))(layers, some)
    assert_same(contents, reference.gather_blocks(layers, some), first=0)
    got = jax.jit(partial(blocks.scatter_blocks, **options))(others, some, contents)
    assert_same(got, reference.scatter_blocks(others, some, contents))
