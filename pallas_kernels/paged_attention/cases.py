"""Named argument sets of paged attention: the awkward ones and those of real models, for tests, bench and tuning."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_write.quantized import LEVELS, QuantizedPool
from pallas_kernels.kv_write.storage import Pool, to_storage
from pallas_kernels.paged_attention.queries import SeeingAhead


@dataclass(frozen=True, kw_only=True)
class Case:
    """`query_lens[r]` queries at the end of `kv_lens[r]` positions; a row of 0 and 0 is padding."""

    name: str
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    num_padding_tokens: int = 0
    dtype: str = "float32"
    format: str | None = None  # of a quantised pool
    sinks: bool = False
    # (row, first position, number of tokens) that see each other; a row that has the last has all behind its start
    pictures: tuple[tuple[int, int, int], ...] = ()


SMALL = (
    Case(name="one-token", query_lens=(1,), kv_lens=(1,)),
    Case(name="decode", query_lens=(1, 1, 1), kv_lens=(5, 16, 33)),
    Case(name="decode-long", query_lens=(1, 1), kv_lens=(300, 129)),
    Case(name="block-edges", query_lens=(1,) * 6, kv_lens=(15, 16, 17, 127, 128, 129)),
    Case(name="prompt", query_lens=(40,), kv_lens=(40,)),
    Case(name="prompt-of-many-tiles", query_lens=(150, 70), kv_lens=(150, 70)),
    Case(name="second-chunk", query_lens=(7, 65), kv_lens=(150, 200)),
    Case(name="mixed", query_lens=(1, 20, 1, 3, 70), kv_lens=(200, 20, 1, 90, 100)),
    Case(name="padding", query_lens=(1, 9, 0, 0), kv_lens=(30, 9, 0, 0), num_padding_tokens=6),
    Case(name="empty-rows-between", query_lens=(1, 0, 5, 0, 1), kv_lens=(20, 0, 5, 0, 3)),
    Case(name="nothing", query_lens=(0, 0), kv_lens=(0, 0), num_padding_tokens=2),
    Case(name="mha", query_lens=(1, 6), kv_lens=(20, 30), num_heads=2, num_kv_heads=2),
    Case(name="mqa", query_lens=(1, 6), kv_lens=(20, 30), num_heads=8, num_kv_heads=1),
    Case(name="window", query_lens=(1, 50, 1), kv_lens=(200, 150, 8), window=20),
    Case(name="window-one", query_lens=(1, 4), kv_lens=(40, 30), window=1),
    Case(name="soft-cap", query_lens=(1, 12), kv_lens=(40, 12), soft_cap=5.0),
    Case(name="odd-head-dim", query_lens=(1, 5), kv_lens=(17, 5), head_dim=24),
    Case(name="block-size-64", query_lens=(1, 30), kv_lens=(130, 65), block_size=64),
    Case(name="block-size-4", query_lens=(1, 30), kv_lens=(130, 65), block_size=4),
    Case(name="sinks", query_lens=(1, 50, 0, 1), kv_lens=(200, 150, 0, 1), sinks=True),
    Case(
        name="sinks-of-a-window",
        query_lens=(1, 9),
        kv_lens=(60, 90),
        num_heads=6,
        window=20,
        soft_cap=5.0,
        sinks=True,
    ),
    Case(name="bfloat16", query_lens=(1, 30), kv_lens=(130, 65), dtype="bfloat16"),
)
# Of implementations that take `queries.SeeingAhead`.
AHEAD = (
    Case(
        name="pictures",
        query_lens=(1, 60, 0, 40, 1),
        kv_lens=(50, 60, 0, 90, 21),
        pictures=((1, 3, 20), (1, 30, 30), (3, 45, 20), (3, 70, 20), (4, 5, 16)),
        num_padding_tokens=3,
    ),
    Case(
        name="pictures-beyond-a-window",
        query_lens=(300, 1),
        kv_lens=(330, 40),
        window=17,
        soft_cap=5.0,
        pictures=((0, 20, 200), (0, 225, 105)),
    ),
    Case(
        name="pictures-of-a-quantised-pool",
        query_lens=(140, 9),
        kv_lens=(140, 25),
        pictures=((0, 1, 137), (1, 10, 12)),
        dtype="bfloat16",
        format="int8",
    ),
)


def arguments(case: Case, *, seed: int = 0, poison: bool = True) -> dict:
    """Arrays of a case; with `poison` NaN stands in every block and slot that no row may read.

    In an int8 or int4 pool those are the NaN of scales and zeros. Blocks that a window has left behind are not the
    row's any more: its table has the null block there.
    """
    rng = np.random.default_rng(seed)
    num_rows = len(case.query_lens)
    needed = [-(-length // case.block_size) for length in case.kv_lens]
    num_blocks = 2 * sum(needed) + 3
    table = np.zeros((num_rows, max(1, *needed) + 2), np.int32)
    ids = rng.permutation(np.arange(1, num_blocks))
    shape = (num_blocks, case.block_size, 2 * case.num_kv_heads, case.head_dim)
    pool = np.full(shape, np.nan if poison else 0.0, np.float32)
    for row, count in enumerate(needed):
        unseen = 0
        if case.window is not None:
            unseen = max(case.kv_lens[row] - case.query_lens[row] - case.window + 1, 0)
        table[row, :count], ids = ids[:count], ids[count:]
        table[row, : unseen // case.block_size] = 0
        for position in range(unseen, case.kv_lens[row]):
            block = table[row, position // case.block_size]
            pool[block, position % case.block_size] = rng.standard_normal(shape[2:])
    num_tokens = sum(case.query_lens) + case.num_padding_tokens
    starts = jnp.asarray(np.cumsum((0, *case.query_lens)), jnp.int32)
    q = rng.standard_normal((num_tokens, case.num_heads, case.head_dim))
    # From sinks that take nearly all to one that a float32 cannot tell from none.
    sinks = np.linspace(9.0, -40.0, case.num_heads, dtype=np.float32)
    return {
        "q": jnp.asarray(q, case.dtype),
        "pool": _stored(jnp.asarray(pool, case.dtype), case.format),
        "block_table": jnp.asarray(table),
        "kv_lens": jnp.asarray(case.kv_lens, jnp.int32),
        "query_starts": SeeingAhead(starts, _last_keys(case)) if case.pictures else starts,
        "scale": case.head_dim**-0.5,
        "window": case.window,
        "soft_cap": case.soft_cap,
        **({"sinks": jnp.asarray(sinks)} if case.sinks else {}),
    }


def _last_keys(case: Case) -> jax.Array:
    """int32[T] of `SeeingAhead`; those of padding are 0."""
    last: list[int] = []
    for row, (query_len, kv_len) in enumerate(zip(case.query_lens, case.kv_lens, strict=True)):
        spans = [(first, first + number) for each, first, number in case.pictures if each == row]
        for position in range(kv_len - query_len, kv_len):
            last.append(next((b - 1 for a, b in spans if a <= position < b), position))
    return jnp.asarray(last + [0] * case.num_padding_tokens, jnp.int32)


def _stored(pool: jax.Array, format: str | None) -> Pool:
    """`pool` as it is, or quantised, scales and zeros of bfloat16 as a CPU stores them."""
    if format is None:
        return pool
    bits = jnp.zeros(0, jnp.uint16 if pool.dtype == jnp.bfloat16 else pool.dtype)
    layer = QuantizedPool(
        data=jnp.zeros(0, jnp.uint8), scale_zero=bits if format in LEVELS else None, format=format
    )
    return jax.jit(to_storage)(pool, layer)
