"""Copies of whole blocks on TPUs (Mosaic): DMAs within HBM, for all layers in one kernel.

Knows arrays [N, ...] with contiguous blocks, as in `paged_attention.tpu_layout`. Uses no registers and no VMEM. XLA
does more work: it copies padding too, copies layer by layer through an array with space for the maximum number of
copies, and for a gather it may move all scales of a layer to VMEM.

Letters: L layers, C copies, N blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

IN_FLIGHT = 8  # blocks of each array with DMAs in flight at once

Interpret = pltpu.InterpretParams | bool


def copy_blocks(
    layers: Sequence[Any],
    sources: Int[Array, " C"],
    destinations: Int[Array, " C"],
    *,
    interpret: Interpret = False,
) -> list[Any]:
    """`reference.copy_blocks`, in place. The null block is not written, and no block is copied onto itself.

    A block that is both a destination and a source must be read before it is written: copies onto such blocks go
    through a second array, all others are direct. (This can happen: one sequence gets a copy of a shared block, the
    other one is preempted, and the block goes to a third sequence for its own copy.)
    """
    arrays, structure = jax.tree.flatten(list(layers))
    per_layer = len(arrays) // len(layers)
    wanted = (destinations != 0) & (sources != destinations)
    clashes = (destinations[:, None] == jnp.where(wanted, sources, 0)[None]).any(axis=1)
    ways = jnp.where(wanted, jnp.where(clashes, 2, 1), 0).astype(jnp.int32)
    num_copies = sources.shape[0]
    # Most steps copy nothing, and a turn takes 33 cycles.
    num_turns = jnp.where(ways > 0, jnp.arange(1, num_copies + 1, dtype=jnp.int32), 0).max()
    any_staged = (ways == 2).any().astype(jnp.int32)
    scalars = [sources, destinations, ways, jnp.stack([num_turns, any_staged])]
    # Not touched unless copies conflict; for one layer.
    stages = [jax.ShapeDtypeStruct((num_copies, *x.shape[1:]), x.dtype) for x in arrays[:per_layer]]

    def kernel(sources, destinations, ways, numbers, *refs):
        num_turns, any_staged = numbers[0], numbers[1]
        pools, stages = refs[len(arrays) : 2 * len(arrays)], refs[2 * len(arrays) : -1]
        sems = refs[-1]

        def direct(i):
            return [(pool.at[sources[i]], pool.at[destinations[i]]) for pool in pools]

        _move(num_turns, lambda i: ways[i] == 1, direct, sems)

        def staged(pool, stage):
            def is_staged(i):
                return ways[i] == 2

            _move(num_turns, is_staged, lambda i: [(pool.at[sources[i]], stage.at[i])], sems)
            _move(num_turns, is_staged, lambda i: [(stage.at[i], pool.at[destinations[i]])], sems)

        @pl.when(any_staged != 0)
        def _():
            for index, pool in enumerate(pools):
                staged(pool, stages[index % per_layer])

    results = _call(kernel, "copy_blocks", scalars, arrays, [], stages, interpret)
    return jax.tree.unflatten(structure, results[: len(arrays)])


def gather_blocks(
    layers: Sequence[Any], block_ids: Int[Array, " C"], *, interpret: Interpret = False
) -> Any:
    """`reference.gather_blocks`."""
    arrays, _ = jax.tree.flatten(list(layers))
    structure = jax.tree.structure(layers[0])
    num_layers, per_layer, num_blocks = len(layers), structure.num_leaves, block_ids.shape[0]
    made = [
        jax.ShapeDtypeStruct((num_blocks, num_layers, *x.shape[1:]), x.dtype)
        for x in arrays[:per_layer]
    ]

    def kernel(block_ids, *refs):
        pools, contents, sems = refs[: len(arrays)], refs[len(arrays) : -1], refs[-1]

        def read(i):
            return [
                (pool.at[block_ids[i]], contents[index % per_layer].at[i, index // per_layer])
                for index, pool in enumerate(pools)
            ]

        _move(num_blocks, lambda i: True, read, sems)

    if not interpret:  # otherwise XLA may move scales to VMEM as a whole
        arrays = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in arrays]
    contents = _call(kernel, "gather_blocks", [block_ids], [], arrays, made, interpret)
    return jax.tree.unflatten(structure, contents)


def scatter_blocks(
    layers: Sequence[Any],
    block_ids: Int[Array, " C"],
    contents: Any,
    *,
    interpret: Interpret = False,
) -> list[Any]:
    """`reference.scatter_blocks`, in place. The null block is not written."""
    arrays, structure = jax.tree.flatten(list(layers))
    given = jax.tree.leaves(contents)
    per_layer, num_blocks = len(given), block_ids.shape[0]

    def kernel(block_ids, *refs):
        first = len(arrays) + per_layer
        given, pools, sems = refs[len(arrays) : first], refs[first:-1], refs[-1]

        def write(i):
            return [
                (given[index % per_layer].at[i, index // per_layer], pool.at[block_ids[i]])
                for index, pool in enumerate(pools)
            ]

        _move(num_blocks, lambda i: block_ids[i] != 0, write, sems)

    pools = _call(kernel, "scatter_blocks", [block_ids], arrays, given, [], interpret)
    return jax.tree.unflatten(structure, pools)


def _call(
    kernel: Callable,
    name: str,
    scalars: list[jax.Array],
    in_place: list[jax.Array],
    inputs: list[jax.Array],
    made: list,
    interpret: Interpret,
) -> list[jax.Array]:
    """The kernel, with references to the scalars, the arrays (twice those `in_place`: input and output), semaphores.

    Returns the arrays in place and the new ones.
    """
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[in_hbm] * (len(in_place) + len(inputs)),
            out_specs=[in_hbm] * (len(in_place) + len(made)),
            scratch_shapes=[pltpu.SemaphoreType.DMA((IN_FLIGHT,))],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in in_place] + made,
        input_output_aliases={len(scalars) + i: i for i in range(len(in_place))},
        interpret=interpret,
        name=name,
    )(*scalars, *in_place, *inputs)


def _move(num_turns: int | jax.Array, wanted: Callable, pairs: Callable, sems) -> None:
    """Copies the (from, to) pairs of `pairs(i)` in each turn with `wanted(i)`; returns when all have arrived.

    Copies of IN_FLIGHT turns are in flight together and may arrive in any order.
    """

    def copies(i):
        sem = sems.at[i % IN_FLIGHT]
        return [pltpu.make_async_copy(source, into, sem) for source, into in pairs(i)]

    def turn(i, _):
        done = jnp.maximum(i - IN_FLIGHT, 0)

        @pl.when((i >= IN_FLIGHT) & wanted(done))
        def _():
            for copy in copies(done):
                copy.wait()

        begun = jnp.minimum(i, num_turns - 1)

        @pl.when((i < num_turns) & wanted(begun))
        def _():
            for copy in copies(begun):
                copy.start()

        return 0

    lax.fori_loop(0, jnp.where(num_turns > 0, num_turns + IN_FLIGHT, 0), turn, 0)
