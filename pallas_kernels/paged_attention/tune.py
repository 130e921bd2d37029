"""Tile sizes of the paged attention kernels by kind of device: measured, and stored in `tuned/`.

`python -m pallas_kernels.paged_attention.tune` measures on the local Hopper GPU or TPU. For a TPU that is not there
`python -m jaxpage.aot.tune` fills the folder from compiled schedules.

Tuned is what changes the speed and, from one kind of device to another, the order of sums. Never tuned is what would
make a result depend on its batch: `gpu_layout.Division` and others, which cut the sums of a row, are constants; a TPU's
`tile_kv`, which cuts them too, is one number for an engine, whatever it computes. No size lets a TPU's kernel take more
VMEM than it may have (`tpu_choose.shape_of`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.tile_sizes import folder_of, kernel_of

BLOCK_SIZE = {"gpu": 64, "tpu": 128}  # as an engine's


@dataclass(frozen=True, kw_only=True)
class Work:
    """Rows that are all alike, in bfloat16 and with a head dim of 128."""

    num_heads: int
    num_kv_heads: int
    num_rows: int
    query_len: int  # of each row, at the end of
    kv_len: int


# Long rows and short ones, which end within a tile: at 600 and 900 keys the last tile of 256 or of 512 is about half
# empty, as of rows of any length. Pools of decoding rows have 0.31 GB and more: six times an H200's L2.
DECODE = (
    Work(num_heads=16, num_kv_heads=2, num_rows=64, query_len=1, kv_len=8192),
    Work(num_heads=16, num_kv_heads=2, num_rows=480, query_len=1, kv_len=600),
    Work(num_heads=32, num_kv_heads=8, num_rows=64, query_len=1, kv_len=4096),
    Work(num_heads=32, num_kv_heads=8, num_rows=240, query_len=1, kv_len=900),
)
PREFILL = (
    Work(num_heads=16, num_kv_heads=2, num_rows=16, query_len=2048, kv_len=16384),
    Work(num_heads=16, num_kv_heads=2, num_rows=32, query_len=600, kv_len=600),
    Work(num_heads=32, num_kv_heads=8, num_rows=4, query_len=2048, kv_len=32768),
    Work(num_heads=32, num_kv_heads=8, num_rows=32, query_len=600, kv_len=600),
)
# Of each kind of work the sizes that matter to it, so that candidates add up instead of multiplying.
CANDIDATES = {
    "gpu": (
        (DECODE, {"programs_per_sm": (1, 2, 3, 4)}),
        (PREFILL, {"tile_kv": (64, 128), "stages": (2, 3, 4)}),
    ),
    "tpu": (
        (PREFILL, {"tile_rows": (128, 256, 512), "head_rows": (2048, 4096)}),
        (DECODE + PREFILL, {"tile_kv": (256, 512, 1024, 2048), "tile_bytes": (2 << 20, 4 << 20)}),
    ),
}


def tune(
    platform: str, seconds: Callable[[Any, Work], float] | None = None, candidates: Any = None
) -> tuple[Any, dict[str, float]]:
    """The fastest sizes, and the seconds of all; by default of CANDIDATES, on the device that is there."""
    return tuning.fastest(
        kernel_of("paged_attention", platform).TileSizes(),
        candidates or CANDIDATES[platform],
        seconds or partial(_seconds, platform),
    )


def _seconds(platform: str, sizes: Any, work: Work) -> float:
    """The seconds of a call. What comes back is a result, and on a TPU the pool, which the next call is given."""
    arrays = arguments(work, BLOCK_SIZE[platform])
    options: dict[str, Any] = dict(
        scale=128**-0.5, one_query_per_row=work.query_len == 1, sizes=sizes
    )
    call = partial(kernel_of("paged_attention", platform).paged_attention, **options)
    if platform == "gpu":
        attend = jax.jit(call)
        return tuning.seconds_of(lambda: attend(**arrays))
    from pallas_kernels.paged_attention.tpu_layout import to_tpu

    step = jax.jit(call, donate_argnames="pool")
    pool = jax.jit(to_tpu)(arrays.pop("pool"))
    new = arrays["q"][:, : work.num_kv_heads]

    def launch() -> jax.Array:
        nonlocal pool
        out, pool = step(**arrays, k=new, v=new, pool=pool)
        return out

    return tuning.seconds_of(launch)


def arguments(work: Work, block_size: int) -> dict[str, Any]:
    """Random arrays of a call but for new keys and values, blocks in any order."""
    width = -(-work.kv_len // block_size)
    of_table, of_q, of_pool = jax.random.split(jax.random.key(0), 3)
    table = 1 + jax.random.permutation(of_table, work.num_rows * width)
    shape = (work.num_rows * width + 1, block_size, 2 * work.num_kv_heads, 128)
    num_tokens = work.num_rows * work.query_len
    starts = jnp.arange(work.num_rows + 1, dtype=jnp.int32) * work.query_len
    return {
        "q": jax.random.normal(of_q, (num_tokens, work.num_heads, 128), jnp.bfloat16),
        "pool": jax.random.normal(of_pool, shape, jnp.bfloat16),
        "block_table": table.reshape(work.num_rows, width).astype(jnp.int32),
        "kv_lens": jnp.full(work.num_rows, work.kv_len, jnp.int32),
        "query_starts": starts,
    }


if __name__ == "__main__":
    tuning.tune_here(tune, folder_of("paged_attention"))
