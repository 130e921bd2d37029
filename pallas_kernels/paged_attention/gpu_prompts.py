"""Which rows with several queries are computed how on Hopper: launches `gpu_prefill.py`, and again for cut rows.

Knows lists of tiles and turns; must not know what a program does. Letters and principles are in `gpu.py`.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import hopper
from pallas_kernels.paged_attention import gpu_layout
from pallas_kernels.paged_attention.gpu_combine import Parts, Places, combine_tiles
from pallas_kernels.paged_attention.gpu_layout import Cuts, CutTiles
from pallas_kernels.paged_attention.gpu_prefill import Inputs, kernel
from pallas_kernels.paged_attention.gpu_prefill_plan import Plan
from pallas_kernels.paged_attention.gpu_tiles import Options, Source

FEW_TURNS = 4  # so many are always taken


def prefill(q, pool, block_table, kv_lens, query_starts, options: Options):
    """All rows but those with one query, whose output is undefined; zeros for tokens of no row."""
    num_tokens, num_heads, head_dim = q.shape
    source, num_kv_heads = Source.of(pool), pool.shape[2] // 2
    group, sinks = num_heads // num_kv_heads, options.sinks
    num_keys = block_table.shape[1] * pool.shape[1]
    rows_of_tile = gpu_layout.rows_of_tile(head_dim)
    tile_q = rows_of_tile // group // 2 * 2
    q = jnp.pad(q, ((0, max(0, tile_q - num_tokens)), (0, 0), (0, -head_dim % 64)))
    sizes = (kv_lens.shape[0], num_tokens, num_keys, tile_q, num_kv_heads, head_dim)
    cuts = gpu_layout.Cuts.of(*sizes, options.window)
    num_parts = None if cuts is None else cuts.parts(query_starts[1:] - query_starts[:-1], kv_lens)
    is_cut = None if num_parts is None else num_parts > 0
    tiles = gpu_layout.query_tiles(
        query_starts, kv_lens, num_tokens, tile_q, options.window, is_cut
    )
    plan = Plan(
        options=options,
        source=source,
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        group=group,
        tile_q=tile_q,
        last_token=q.shape[0] - tile_q,
        num_programs=min(hopper.num_sms(), num_kv_heads * tiles.row.shape[0]),
        in_parts=False,
    )
    if sinks is not None:  # of each row of wgmma
        row = jnp.minimum(jnp.arange(rows_of_tile) // tile_q, group - 1)
        sinks = sinks.reshape(num_kv_heads, group)[:, row]
    inputs = Inputs(q, block_table, tiles, source.arrays, sinks)
    out = kernel(plan, inputs, q)(inputs)
    if cuts is not None and num_parts is not None:
        out = _with_cut_rows(plan, inputs, cuts, num_parts, query_starts, kv_lens, out)
    return out[:num_tokens, :, :head_dim]


def _with_cut_rows(plan: Plan, inputs: Inputs, cuts: Cuts, num_parts, query_starts, kv_lens, out):
    """`out` with the rows whose keys are cut. They take turns, if their sums are more than PARTS_BYTES."""
    at_once = cuts.rows_at_once(4 * plan.num_kv_heads * plan.rows * plan.head_dim)
    most_turns = pl.cdiv(cuts.max_rows, at_once)
    num_rows, is_cut = kv_lens.shape[0], num_parts > 0
    (rows,) = jnp.nonzero(is_cut, size=most_turns * at_once, fill_value=num_rows)
    rows = rows.astype(jnp.int32)

    def turn(number, out, queries=inputs.queries):
        some = lax.dynamic_slice(rows, (number * at_once,), (at_once,))
        tiles = gpu_layout.cut_tiles(cuts, some, num_parts, query_starts, kv_lens)
        return _with_parts(plan, inputs._replace(queries=queries), tiles, out)

    if most_turns > FEW_TURNS:
        # Only those that have rows. With 1,024 rows there may be 32, of a dozen kernels in each layer.
        num_turns = pl.cdiv(jnp.sum(is_cut, dtype=jnp.int32), at_once)
        return lax.fori_loop(0, num_turns, turn, out)
    if most_turns == 1:
        return turn(0, out)
    # XLA makes their lists once for all layers, and with a jit of its own the kernels are compiled once.
    queries, take_turn = inputs.queries, jax.jit(turn)
    for number in range(most_turns):
        out = take_turn(number, out, queries)
        # The next begins when this is done, so that there are sums of one turn at a time.
        queries, out = lax.optimization_barrier((queries, out))
    return out


def _with_parts(plan: Plan, inputs: Inputs, tiles: CutTiles, out):
    """`out` with these tiles."""
    num_heads, num_items = plan.num_kv_heads * plan.rows // 64, tiles.parts.row.shape[0]
    parts = Parts(
        sums=jax.ShapeDtypeStruct((num_heads, num_items, plan.head_dim, 64), jnp.float32),
        stats=jax.ShapeDtypeStruct((num_heads, num_items, 4, 64), jnp.float32),
    )
    sinks, num_programs = inputs.sinks, min(hopper.num_sms(), plan.num_kv_heads * num_items)
    in_parts = replace(plan, in_parts=True, num_programs=num_programs)
    inputs = inputs._replace(tiles=tiles.parts, sinks=None)
    (sums,) = kernel(in_parts, inputs, (parts,))(inputs)
    token = jnp.minimum(tiles.token, plan.last_token)  # as `Tile.of` reads them
    return combine_tiles(
        sums,
        tiles.number,
        tiles.starts,
        None if sinks is None else sinks.reshape(num_heads, 64),
        Places(token, tiles.token - token, tiles.count),
        out,
        plan.tile_q,
        plan.options.interpret,
    )
