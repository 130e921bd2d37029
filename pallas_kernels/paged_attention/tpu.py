"""Ragged paged attention on TPUs (Mosaic): one kernel writes the new keys and values, then attends.

It knows one layer's pool as `tpu_layout.py` describes it, and where a step's tokens lie. Not models, meshes or buckets.
`tpu_write.py` writes everything before `tpu_attend.py` reads, since a row may hit blocks that another row of the same
call writes. Where every row has one query, and none reads what another writes, a row's token is written a few rows
before its keys are read instead, while other rows attend. The grid is one program, so nothing else runs beside it.
Among rows with several queries those with one have a second launch, which only attends: alone they need tiles of 8 rows
instead of 256, and their result is to the bit that of a step with such rows only. In an engine with drafts rows with as
few queries as those have another one, in all steps.

Letters: T packed query tokens, R rows, M blocks per row, N blocks, S block size, H query heads, K KV heads, D head dim,
G = H / K, Q query tiles, A rows of a query tile of one KV head, P planes (2 with int4, whose bytes hold two values),
W lanes that are read of a head's K or V, B = tile_kv.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_write.latents import LatentPool
from pallas_kernels.kv_write.parts import PoolPart, whole
from pallas_kernels.paged_attention import tpu_layout as layout
from pallas_kernels.paged_attention.tpu_attend import Attend
from pallas_kernels.paged_attention.tpu_choose import shape_of, shape_with_drafts
from pallas_kernels.paged_attention.tpu_shape import VMEM_BYTES, Pool, Shape, TileSizes, write_sizes
from pallas_kernels.paged_attention.tpu_tile import Scratch, scratch_shapes
from pallas_kernels.paged_attention.tpu_work import (
    Rows,
    Units,
    chunks,
    pack_table,
    reads_others_writes,
    units,
)
from pallas_kernels.paged_attention.tpu_write import Buffers, Write, chunk_buffers, write_beside


def paged_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K V"],
    pool: Pool | PoolPart | LatentPool,
    block_table: Int[Array, "R M"],
    kv_lens: Int[Array, " R"],
    query_starts: Int[Array, " R+1"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    one_query_per_row: bool = False,
    num_drafts: int = 0,
    sizes: TileSizes | None = None,
    interpret: pltpu.InterpretParams | bool = False,
) -> tuple[Float[Array, "T H V"], Pool]:
    """`kv_write.xla.write_kv`, then `reference.paged_attention`; returns the result and the pool, which stays in place.
    Of a `PoolPart` and of a `LatentPool` the pool that it is of. V is D, except of a `LatentPool`.

    A row's new tokens are the last of its positions, and the block table says where they go: slot_mapping follows from
    it. A row with kv_lens 0 writes and reads nothing, whatever its tokens. The result of tokens of no row is 0.
    T = R and query r is row r's if `one_query_per_row`. num_drafts: rows with up to one query more have tiles of a few
    tokens; the same for all programs of an engine. sizes: None for the defaults. Raises NotImplementedError with the
    reason of `tpu_layout.unsupported_reason`.
    """
    num_tokens, num_kv_heads = q.shape[0], k.shape[1]
    sizes = sizes or TileSizes()
    if reason := layout.unsupported_reason(q, pool, num_kv_heads, block_table.shape, sizes):
        raise NotImplementedError(reason)
    choose = partial(
        shape_of,
        *(q, pool, num_kv_heads, block_table.shape[1]),
        sizes=sizes,
        mask=(scale, window, soft_cap),
    )
    shape, value_dim = choose(one_query_per_row=one_query_per_row), q.shape[2]
    if isinstance(pool, LatentPool):
        # Zeros up to the width of a slot.
        k, value_dim = pool.slots_of(k)[:, None], pool.value_dim
    pool = whole(pool)
    if one_query_per_row:
        query_starts = jnp.arange(num_tokens + 1, dtype=jnp.int32)
    query_lens = jnp.where(kv_lens > 0, query_starts[1:] - query_starts[:-1], 0)
    rows = Rows(shape, pack_table(block_table), kv_lens, query_starts)
    is_read_by_others = None
    if one_query_per_row:
        is_read_by_others = reads_others_writes(shape, block_table, kv_lens)
    new = _New(
        layout.new_rows(shape, k, v, pool),
        chunks(shape, kv_lens, query_lens, num_tokens),
        is_read_by_others,
    )
    options = {"sinks": sinks, "interpret": interpret}
    with_drafts, least = None, 1
    if not one_query_per_row:
        with_drafts = shape_with_drafts(shape, num_drafts)
        least = 1 + (with_drafts.tile_q if with_drafts else 1)
    out, pool = _attend(rows, q, pool, query_lens >= least, new=new, **options)
    # Rows of [T, H * D]: those of [T, H, D] XLA would gather, choose and scatter in another layout.
    out = out.reshape(num_tokens, -1)
    if not one_query_per_row:
        single = choose(one_query_per_row=True)
        apart = partial(_attend_apart, rows=rows, q=q, pool=pool, **options)
        is_single = query_lens == 1
        out = apart(single, jnp.where(is_single, query_starts[:-1], num_tokens), is_single, out)
        if with_drafts:
            has_drafts = (query_lens > 1) & (query_lens < least)
            starts = jnp.where(has_drafts, query_starts[:-1], num_tokens)[:, None]
            index = query_starts[1:, None] - jnp.arange(with_drafts.tile_q, 0, -1)[None]
            index = jnp.where(index >= starts, index, num_tokens).reshape(-1)
            out = apart(with_drafts, index, has_drafts, out, query_lens=query_lens)
    token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    first = query_starts[None, :-1]
    in_row = ((token >= first) & (token < first + query_lens[None])).any(axis=1)
    out = jnp.where(in_row[:, None], out, 0).reshape(num_tokens, q.shape[1], -1)
    return (out if value_dim == out.shape[2] else out[..., :value_dim]), pool


class _New(NamedTuple):
    """What a launch writes, too."""

    rows: list[tuple[jax.Array, ...]]  # see `tpu_layout.new_rows`
    chunks: list  # see `tpu_work.chunks`
    is_read_by_others: jax.Array | None


def _attend(
    rows: Rows,
    q: jax.Array,
    pool: Pool,
    has_units: jax.Array,
    *,
    new: _New | None = None,
    query_lens: jax.Array | None = None,
    sinks: jax.Array | None,
    interpret: Any,
) -> tuple[jax.Array, Pool]:
    """A launch of the kernel: the queries of the rows that `has_units` bool[R]; of others the result is anything.
    query_lens: see `tpu_work.units`.
    """
    shape, num_tokens = rows.shape, q.shape[0]
    scalars = _Scalars(
        rows=(rows.table, rows.kv_lens, rows.query_starts),
        chunks=new.chunks if new else [],
        is_read_by_others=new.is_read_by_others if new else None,
        units=units(shape, rows.kv_lens, rows.query_starts, has_units, num_tokens, query_lens),
    )
    pools, structure = jax.tree.flatten(pool)
    tiles, given = layout.to_tiles(shape, q), new.rows if new else []
    if not interpret:
        # From VMEM, where XLA would keep them, a copy is a loop of the core's.
        tiles, given = _in_hbm((tiles, given))
        if not new:
            # Otherwise XLA may bring a small pool, or its scales, to VMEM as a whole, in each layer.
            pools = _in_hbm(pools)
    inputs = _Inputs(tiles, given, pools, None if sinks is None else _sinks_by_row(shape, sinks))
    out, pools = _launch(shape, scalars, inputs, interpret)
    return layout.from_tiles(shape, out, num_tokens), jax.tree.unflatten(structure, pools)


def _attend_apart(
    shape: Shape,
    index: jax.Array,
    has_units: jax.Array,
    out: jax.Array,
    *,
    rows: Rows,
    q: jax.Array,
    pool: Pool,
    **options,
) -> jax.Array:
    """`out` [T, H * V] with the results of a launch for some rows, each of which has as many tokens as a tile has.

    index: int32[R * tile_q], the tokens, T where a row has fewer. options: of `_attend`.
    """
    starts = jnp.arange(rows.kv_lens.shape[0] + 1, dtype=jnp.int32)
    if shape.tile_q > 1:
        starts *= shape.tile_q
    own = _tokens_of(q, index, rows.shape.query_parts)
    rows = Rows(shape, rows.table, rows.kv_lens, starts)
    found, _ = _attend(rows, own, pool, has_units, **options)
    return out.at[index].set(found.reshape(found.shape[0], -1), mode="drop")


def _tokens_of(q: jax.Array, index: jax.Array, parts: tuple[tuple[int, int], ...]) -> jax.Array:
    """[N, H, D]: the tokens `index` int32[N] of q [T, H, D], any where it is T. parts: see `Shape.query_parts`."""
    arrays = [q] if len(parts) == 1 else [q[:, :, first:end] for first, end in parts]
    found = [x.reshape(q.shape[0], -1).at[index].get(mode="clip") for x in arrays]
    found = [x.reshape(-1, *part.shape[1:]) for x, part in zip(found, arrays, strict=True)]
    return found[0] if len(parts) == 1 else jnp.concatenate(found, axis=2)


def _in_hbm(arrays):
    return jax.tree.map(lambda x: pltpu.with_memory_space_constraint(x, pltpu.HBM), arrays)


def _sinks_by_row(shape: Shape, sinks: jax.Array) -> jax.Array:
    """[H] → float32[K', A, 1]."""
    by_head = sinks.astype(jnp.float32).reshape(shape.num_kv_heads, shape.group)
    if shape.one_tile_per_row:
        by_row = jnp.tile(by_head, shape.tile_q)
    else:
        by_row = jnp.repeat(by_head, shape.tile_q, axis=1).reshape(shape.num_stacks, -1)
    return jnp.pad(by_row, ((0, 0), (0, shape.rows - by_row.shape[1])))[:, :, None]


class _Scalars(NamedTuple):
    """Lists of work, in the scalar memory."""

    rows: tuple  # block table, kv_lens and query_starts, see `Rows`
    chunks: list  # `tpu_work.chunks` of each array that is written; none if nothing is
    # `reads_others_writes`, where rows with one query are written; else None
    is_read_by_others: Any
    units: list  # see `tpu_work.units`


class _Inputs(NamedTuple):
    """Arrays in HBM, but for the sinks, which are in VMEM."""

    q: Any  # see `tpu_layout.to_tiles`
    new: list[tuple]  # see `tpu_layout.new_rows`; none if nothing is written
    pools: list  # the pool's data; its scales and zeros
    sinks: Any = None  # float32[K', A, 1]


class _Scratch(NamedTuple):
    """VMEM and semaphores."""

    chunks: list[Buffers]  # of each array that is written
    attend: Scratch


def _launch(
    shape: Shape, scalars: _Scalars, inputs: _Inputs, interpret: Any
) -> tuple[jax.Array, list]:
    """The result, for `from_tiles`, and the arrays of the pool."""
    num_written = len(inputs.new)
    written = inputs.pools[:num_written]
    tiles = jax.tree.leaves(inputs.q)[0]
    scratch = _Scratch(
        chunks=[
            chunk_buffers(shape, new, pool, axis, size)
            for axis, (new, pool, size) in enumerate(
                zip(inputs.new, written, write_sizes(shape), strict=False)
            )
        ],
        attend=scratch_shapes(shape, inputs.pools),
    )

    def kernel(scalars: _Scalars, inputs: _Inputs, out_ref, written_refs, scratch: _Scratch):
        rows = Rows(shape, *scalars.rows)
        pool_refs = written_refs or inputs.pools
        writes = [
            Write(
                rows=rows,
                chunk_rows=chunk_rows,
                chunk_positions=chunk_positions,
                total=total[0],
                new_refs=inputs.new[axis],
                pool_ref=pool_refs[axis],
                buffers=scratch.chunks[axis],
                axis=axis,
            )
            for axis, (chunk_rows, chunk_positions, total) in enumerate(scalars.chunks)
        ]
        beside = None
        if scalars.is_read_by_others is not None:
            beside = write_beside(writes, scalars.is_read_by_others[0] != 0)
        else:
            for write in writes:
                write.run()
        row, query_tile, visit, first_key, end_key, total = scalars.units
        Attend(
            units=Units(rows, row, query_tile, visit, first_key, end_key, total[0]),
            q_refs=jax.tree.leaves(inputs.q),
            pool_refs=pool_refs,
            out_ref=out_ref,
            sinks_ref=inputs.sinks,
            scratch=scratch.attend,
            beside=beside,
        ).run()

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    specs = jax.tree.map(lambda _: anywhere, inputs)
    if inputs.sinks is not None:
        specs = specs._replace(sinks=pl.BlockSpec(memory_space=pltpu.VMEM))
    first_pool = len(jax.tree.leaves((scalars, inputs.q, inputs.new)))
    out, pools = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=(specs,),
            out_specs=(anywhere, [anywhere] * num_written),
            scratch_shapes=(scratch,),
        ),
        out_shape=(
            pltpu.HBM(layout.shape_of_results(shape, tiles.shape), tiles.dtype),
            [pltpu.HBM(x.shape, x.dtype) for x in written],
        ),
        input_output_aliases={first_pool + i: 1 + i for i in range(num_written)},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=VMEM_BYTES,
            # The interpreter of the tests checks both. Here they would cost more than starting a copy does.
            disable_bounds_checks=True,
            disable_semaphore_checks=True,
        ),
        interpret=interpret,
        name="paged_attention_of_drafts" if shape.one_tile_per_row else "paged_attention",
    )(scalars, inputs)
    return out, pools or inputs.pools
