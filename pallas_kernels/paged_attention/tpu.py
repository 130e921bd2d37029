"""Ragged paged attention on TPUs (Mosaic): one kernel writes the new keys and values, then attends.

It knows one layer's pool as `tpu_layout.py` describes it, and where a step's tokens lie. Not models, meshes or buckets.
`tpu_write.py` writes everything before `tpu_attend.py` reads, since a row may hit blocks that another row of the same
call writes. Where every row has one query, and none reads what another writes, a row's token is written a few rows
before its keys are read instead, while other rows attend. The grid is one program, so nothing else runs beside it.
Among rows with several queries those with one have a second launch, which only attends: alone they need tiles of 8 rows
instead of 256, and their result is to the bit that of a step with such rows only.

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

from pallas_kernels.paged_attention import tpu_layout as layout
from pallas_kernels.paged_attention.tpu_attend import Attend
from pallas_kernels.paged_attention.tpu_shape import VMEM_BYTES, Pool, TileSizes, write_sizes
from pallas_kernels.paged_attention.tpu_tile import scratch_shapes
from pallas_kernels.paged_attention.tpu_work import (
    Rows,
    Units,
    chunks,
    pack_table,
    reads_others_writes,
    units,
)
from pallas_kernels.paged_attention.tpu_write import Write, chunk_buffers, write_beside


def paged_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    pool: Pool,
    block_table: Int[Array, "R M"],
    kv_lens: Int[Array, " R"],
    query_starts: Int[Array, " R+1"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    one_query_per_row: bool = False,
    sizes: TileSizes | None = None,
    interpret: pltpu.InterpretParams | bool = False,
) -> tuple[Float[Array, "T H D"], Pool]:
    """`kv_write.xla.write_kv`, then `reference.paged_attention`; returns the result and the pool, which stays in place.

    A row's new tokens are the last of its positions, and the block table says where they go: slot_mapping follows from
    it. A row with kv_lens 0 writes and reads nothing, whatever its tokens. The result of tokens of no row is 0.
    T = R and query r is row r's if `one_query_per_row`. sizes: None for the defaults. Raises NotImplementedError with
    the reason of `tpu_layout.unsupported_reason`.
    """
    num_tokens, num_kv_heads = q.shape[0], k.shape[1]
    sizes = sizes or TileSizes()
    if reason := layout.unsupported_reason(q, pool, num_kv_heads, block_table.shape, sizes):
        raise NotImplementedError(reason)
    shape_of = partial(
        layout.shape_of,
        *(q, pool, num_kv_heads, block_table.shape[1]),
        sizes=sizes,
        mask=(scale, window, soft_cap),
    )
    shape = shape_of(one_query_per_row=one_query_per_row)
    if one_query_per_row:
        query_starts = jnp.arange(num_tokens + 1, dtype=jnp.int32)
    query_lens = jnp.where(kv_lens > 0, query_starts[1:] - query_starts[:-1], 0)
    rows = Rows(shape, pack_table(block_table), kv_lens, query_starts)
    lists = chunks(shape, kv_lens, query_lens, num_tokens)
    if one_query_per_row:
        lists.append(reads_others_writes(shape, block_table, kv_lens))
    new = _New(layout.new_rows(shape, k, v, pool), lists)
    options = {"sinks": sinks, "interpret": interpret}
    least = 1 if one_query_per_row else 2
    out, pool = _attend(rows, q, pool, query_lens >= least, new=new, **options)
    # Rows of [T, H * D]: those of [T, H, D] XLA would gather, choose and scatter in another layout.
    out = out.reshape(num_tokens, -1)
    if not one_query_per_row:
        is_single = query_lens == 1
        index = jnp.where(is_single, query_starts[:-1], num_tokens)
        starts = jnp.arange(kv_lens.shape[0] + 1, dtype=jnp.int32)
        rows = Rows(shape_of(one_query_per_row=True), rows.table, kv_lens, starts)
        q_of_singles = q.reshape(num_tokens, -1).at[index].get(mode="clip")
        q_of_singles = q_of_singles.reshape(-1, *q.shape[1:])
        singles, _ = _attend(rows, q_of_singles, pool, is_single, **options)
        out = out.at[index].set(singles.reshape(singles.shape[0], -1), mode="drop")
    token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    first = query_starts[None, :-1]
    in_row = ((token >= first) & (token < first + query_lens[None])).any(axis=1)
    return jnp.where(in_row[:, None], out, 0).reshape(q.shape), pool


class _New(NamedTuple):
    """What a launch writes, too."""

    rows: list[tuple[jax.Array, ...]]  # see `tpu_layout.new_rows`
    lists: list[jax.Array]  # `tpu_work.chunks`; of rows with one query also `reads_others_writes`


def _attend(
    rows: Rows,
    q: jax.Array,
    pool: Pool,
    has_units: jax.Array,
    *,
    new: _New | None = None,
    sinks: jax.Array | None,
    interpret: Any,
) -> tuple[jax.Array, Pool]:
    """A launch of the kernel: the queries of the rows that `has_units` bool[R]; of others the result is anything."""
    shape, num_tokens = rows.shape, q.shape[0]
    scalars = [rows.table, rows.kv_lens, rows.query_starts]
    scalars += new.lists if new else []
    scalars += units(shape, rows.kv_lens, rows.query_starts, has_units, num_tokens)
    given = new.rows if new else []
    tiles = layout.to_tiles(shape, q)
    out, pool = _call(shape, scalars, tiles, given, pool, sinks, interpret)
    return layout.from_tiles(shape, out, num_tokens), pool


def _call(shape, scalars, q, new, pool, sinks, interpret):
    """The kernel. q: `to_tiles`; new: `new_rows`, nothing if none is written. Returns the pool, and `from_tiles` takes
    the other result.
    """
    pools, structure = jax.tree.flatten(pool)
    anywhere, num_pools = pl.BlockSpec(memory_space=pl.ANY), len(pools)
    num_written, new_parts = len(new), [x for parts in new for x in parts]
    in_hbm = not interpret
    if in_hbm:
        # From VMEM, where XLA would keep them, a copy is a loop of the core's.
        q, *new_parts = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in (q, *new_parts))
    if not new and in_hbm:
        # Otherwise XLA may bring a small pool, or its scales, to VMEM as a whole, in each layer.
        pools = [pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in pools]
    inputs = [q, *new_parts, *pools]
    in_specs = [anywhere] * len(inputs)
    if sinks is not None:
        per_row = sinks.astype(jnp.float32).reshape(shape.num_kv_heads, shape.group)
        per_row = jnp.repeat(per_row, shape.tile_q, axis=1).reshape(shape.num_stacks, -1)
        per_row = jnp.pad(per_row, ((0, 0), (0, shape.rows - per_row.shape[1])))
        inputs.append(per_row[:, :, None])
        in_specs.append(pl.BlockSpec(memory_space=pltpu.VMEM))
    buffers_of_chunks = [
        chunk_buffers(shape, parts, array, axis, size)
        for axis, (parts, array, size) in enumerate(
            zip(new, pools, write_sizes(shape), strict=False)
        )
    ]
    scratch, scratch_structure = jax.tree.flatten((buffers_of_chunks, scratch_shapes(shape, pool)))

    def kernel(*refs):
        (table, kv_lens, query_starts, *lists), refs = refs[: len(scalars)], refs[len(scalars) :]
        (q_ref, *given), refs = refs[: len(inputs)], refs[len(inputs) :]
        out_ref, written, buffers = refs[0], refs[1 : 1 + num_written], refs[1 + num_written :]
        pool_refs = written or given[:num_pools]
        new_refs = jax.tree.unflatten(jax.tree.structure(new), given[: len(new_parts)])
        of_chunks, buffers = jax.tree.unflatten(scratch_structure, buffers)
        rows = Rows(shape, table, kv_lens, query_starts)
        writes = []
        for axis in range(num_written):
            (chunk_rows, chunk_positions, num_chunks), lists = lists[:3], lists[3:]
            write = Write(
                rows=rows,
                chunk_rows=chunk_rows,
                chunk_positions=chunk_positions,
                total=num_chunks[0],
                new_refs=new_refs[axis],
                pool_ref=pool_refs[axis],
                buffers=of_chunks[axis],
                axis=axis,
            )
            writes.append(write)
        beside = None
        if shape.tile_q > 1:
            for write in writes:
                write.run()
        elif writes:
            is_read_by_others, *lists = lists
            beside = write_beside(writes, is_read_by_others[0] != 0)
        row, query_tile, visit, first_key, end_key, num_units = lists
        Attend(
            units=Units(rows, row, query_tile, visit, first_key, end_key, num_units[0]),
            q_ref=q_ref,
            pool_refs=pool_refs,
            out_ref=out_ref,
            sinks_ref=None if sinks is None else given[-1],
            scratch=buffers,
            beside=beside,
        ).run()

    lanes_of_out = q.shape[-1] if shape.is_flat else shape.read_lanes
    out, *written = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=in_specs,
            out_specs=[anywhere] * (1 + num_written),
            scratch_shapes=scratch,
        ),
        out_shape=[
            pltpu.HBM((*q.shape[:-1], lanes_of_out), q.dtype),
            # And back again.
            *(pltpu.HBM(x.shape, x.dtype) for x in pools[:num_written]),
        ],
        input_output_aliases={
            len(scalars) + 1 + len(new_parts) + i: 1 + i for i in range(num_written)
        },
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=VMEM_BYTES,
            # The interpreter of the tests checks both. Here they would cost more than starting a copy does.
            disable_bounds_checks=True,
            disable_semaphore_checks=True,
        ),
        interpret=interpret,
        name="paged_attention",
    )(*scalars, *inputs)
    return out, jax.tree.unflatten(structure, written or pools)
