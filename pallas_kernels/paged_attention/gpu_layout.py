"""What surrounds the paged attention kernels of `gpu.py`: what they cannot do, sizes, and lists of what there is to do.

Plain jnp, which XLA computes once for all layers. Knows nothing of copies, barriers and products. Letters as in
`gpu.py`: T packed query tokens, R rows, M blocks per row, N blocks, S block size, H query heads, K KV heads, D head
dim, G = H / K query heads per KV head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.hopper import unsupported_jax
from pallas_kernels.kv_write.quantized import QuantizedPool
from pallas_kernels.kv_write.xla import Pool

SPLIT = 512  # keys of a row that one program reads; sums are cut there, so it is never tuned
PARTS_BYTES = 256 << 20  # of those sums at once; rows that have more take turns
SM_BYTES = 228 * 1024  # of shared memory, that an SM has for its programs,
RESERVED_BYTES = 1024  # and each takes besides what it asks for
HEAD_DIMS = (64, 96, 128, 192, 256)


@dataclass(frozen=True, kw_only=True)
class TileSizes:
    """What may differ from one kind of device to another (`tune.py`), but not within an engine.

    tile_kv: keys that a tile of queries meets at once, up to head dim 128; stages: such tiles under way or in use, of
    K as of V; programs_per_sm: the most that share an SM where rows have one query.
    """

    tile_kv: int = 128
    stages: int = 2
    programs_per_sm: int = 3


def unsupported_reason(q: jax.Array | jax.ShapeDtypeStruct, pool: Pool) -> str | None:
    """Why these kernels cannot serve such arguments, in one line; None if they can. Shapes and dtypes suffice."""
    if reason := unsupported_jax():
        return reason
    quantised = isinstance(pool, QuantizedPool)
    if q.dtype not in (jnp.bfloat16, jnp.float16) or not (quantised or pool.dtype == q.dtype):
        other = "" if quantised else f" and the pool {pool.dtype}"
        return f"q is {q.dtype}{other}; they must be bfloat16 or float16, and the same"
    if q.shape[2] not in HEAD_DIMS:
        return f"head dim {q.shape[2]} is none of {HEAD_DIMS}"
    if pool.shape[1] not in (8, 16, 32) and pool.shape[1] % 64:
        return f"block size {pool.shape[1]} is neither 8, 16, 32 nor a multiple of 64"
    group = q.shape[1] // (pool.shape[2] // 2)
    if group > 64:
        return f"{group} query heads per KV head are more than 64"
    if isinstance(pool, QuantizedPool):
        # Each half of a byte is stored as columns of its own, in tiles of 64.
        tile = 64 if pool.format == "int4" else 32
        if q.shape[2] == 256 or pool.data.shape[3] % tile:
            return f"head dim {q.shape[2]} in {pool.format} does not fit wgmma's tiles or memory"
        if pool.scale_zero is not None and pool.shape[2] % 4:
            return f"{pool.shape[2] // 2} KV heads are odd: the scales of two are copied at once"
    return None


def most_splits(num_keys: int, window: int | None) -> int:
    """Of a row of `num_keys` keys, of which the last `window` are seen: pieces of SPLIT with a key that is seen."""
    splits = -(-num_keys // SPLIT)
    return splits if window is None else min(splits, -(-(window - 1) // SPLIT) + 1)


def rows_at_once(num_rows: int, bytes_per_row: int) -> int:
    """Rows whose parts fit into PARTS_BYTES, in turns of equally many."""
    most = max(1, PARTS_BYTES // bytes_per_row)
    return -(-num_rows // -(-num_rows // most))


class Splits(NamedTuple):
    """What rows with one query have to read, in items of up to SPLIT keys. Arrays, or in a kernel refs: int32 each.

    A row without keys has one item, that has nothing to read. What lies behind a window is no item.
    """

    starts: Any  # [R + 1]: row r's items are those from starts[r] to before starts[r + 1]
    row: Any  # [items]
    first: Any  # [items]: position of the first key, a multiple of SPLIT


def splits(kv_lens: Int[Array, " R"], num_keys: int, window: int | None) -> Splits:
    """`num_keys`: the most that a row can have."""
    num_rows = kv_lens.shape[0]
    first = jnp.zeros_like(kv_lens)
    if window is not None:
        first = jnp.maximum(kv_lens - window, 0) // SPLIT
    counts = jnp.maximum(-(-kv_lens // SPLIT) - first, 1)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    item = jnp.arange(num_rows * most_splits(num_keys, window), dtype=jnp.int32)
    row = jnp.searchsorted(starts[1:], item, side="right", method="compare_all")
    row = jnp.minimum(row, num_rows - 1).astype(jnp.int32)
    return Splits(starts, row, ((item - starts[row] + first[row]) * SPLIT).astype(jnp.int32))


class QueryTiles(NamedTuple):
    """Tiles of the queries of rows with several, those with most keys first. Arrays, or in a kernel refs: int32 each.

    Rows with one query have none. The tokens of padding are a row without keys.
    """

    number: Any  # [1]: so many of the following are tiles
    row: Any  # [tiles], like all below
    token: Any  # the first query
    count: Any  # queries
    position: Any  # of the first query in its row; negative for padding
    begin: Any  # positions of the row that one of the row's queries sees, from here
    end: Any  # to before here


def query_tiles(
    query_starts: Int[Array, " R+1"],
    kv_lens: Int[Array, " R"],
    num_tokens: int,
    tile_q: int,
    window: int | None,
) -> QueryTiles:
    """`tile_q`: the most queries of a tile."""
    num_rows = kv_lens.shape[0]
    lens = query_starts[1:] - query_starts[:-1]
    padding = jnp.maximum(num_tokens - query_starts[-1:], 0)
    lens = jnp.append(jnp.where(lens == 1, 0, lens), padding).astype(jnp.int32)
    ends = jnp.cumsum(-(-lens // tile_q), dtype=jnp.int32)
    item = jnp.arange(num_tokens // tile_q + num_rows + 1, dtype=jnp.int32)
    row = jnp.searchsorted(ends, item, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, num_rows)
    first = (item - ends[row] + -(-lens[row] // tile_q)) * tile_q
    count = jnp.minimum(lens[row] - first, tile_q)
    ends_at = jnp.append(kv_lens, 0)[row]
    oldest = ends_at - lens[row]
    position = jnp.where(row < num_rows, oldest + first, -num_tokens)
    begin, num_keys = jnp.zeros_like(row), jnp.maximum(position + count, 0)
    if window is not None:
        begin = jnp.maximum(oldest - (window - 1), 0)
        num_keys = jnp.minimum(num_keys, window + count)
    order = jnp.argsort(jnp.where(item < ends[-1], -num_keys, 1), stable=True)
    token = query_starts[row].astype(jnp.int32) + first
    lists = (row, token, count, position, begin, ends_at)
    return QueryTiles(ends[-1:], *(x[order].astype(jnp.int32) for x in lists))
