"""Named lists of copies and kinds of pools for copies of whole blocks, edge cases, for tests and bench."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_write.quantized import LEVELS, QuantizedPool


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Pairs (source, destination) in a pool of 24 blocks; padding is (0, 0)."""

    name: str
    pairs: tuple[tuple[int, int], ...]


NUM_BLOCKS = 24
PADDING = ((0, 0),)
COPIES = (
    Copies(name="one", pairs=((5, 9), *PADDING * 3)),
    Copies(name="nothing", pairs=PADDING * 4),
    Copies(name="one-source-many-copies", pairs=tuple((3, i) for i in range(4, 16))),
    Copies(name="more-than-in-flight", pairs=tuple((i, i + 11) for i in range(1, 12))),
    Copies(name="chain", pairs=((1, 2), (2, 3), (3, 4), (7, 8), *PADDING)),
    Copies(name="chain-backwards", pairs=((3, 4), (2, 3), (1, 2), (7, 8), *PADDING)),
    Copies(name="swap", pairs=((6, 7), (7, 6), (1, 2))),
    Copies(name="ring-of-all", pairs=tuple((i, i % 23 + 1) for i in range(1, 24))),
    Copies(name="onto-itself", pairs=((4, 4), (4, 5), (0, 0))),
    Copies(name="padding-between", pairs=((0, 0), (2, 1), (0, 0), (1, 3))),
)
BLOCKS = (  # the blocks of one swap; padding is 0
    (3, 1, 22, 0, 0),
    tuple(range(1, 24)),
    (0, 0),
    (7,),
)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Two layers; layout "tpu": a TPU's layout (`paged_attention.tpu_layout`), else "heads"."""

    name: str
    dtype: str = "bfloat16"  # of keys, or of scales and zeros
    format: str | None = None
    layout: str = "tpu"


POOLS = tuple(
    Pool(
        name=f"{format or dtype}-{layout}",
        dtype=dtype,
        format=format,
        layout=layout,
    )
    for layout in ("tpu", "heads")
    for dtype, format in (
        ("bfloat16", None),
        ("float32", None),
        ("bfloat16", "int8"),
        ("float32", "int4"),
        ("bfloat16", "fp8_e4m3"),
    )
)


def layers(pool: Pool, *, num_layers: int = 2, num_blocks: int = NUM_BLOCKS, seed: int = 0) -> list:
    """Random contents, with a NaN in each block of floats: 2 KV heads, head dim 64, blocks of 32."""
    rng = np.random.default_rng(seed)
    heads, size, width = 4, 32, 32 if pool.format == "int4" else 64

    def array(*shape, dtype):
        if dtype == "uint8":
            return jnp.asarray(rng.integers(0, 256, (num_blocks, *shape)), jnp.uint8)
        x = rng.standard_normal((num_blocks, *shape)).astype(np.float32)
        x[(slice(None),) + (0,) * len(shape)] = np.nan
        return jnp.asarray(x, dtype)

    def layer():
        shape = (size, heads * width) if pool.layout == "tpu" else (size, heads, width)
        if pool.format is None:
            return array(*shape, dtype=pool.dtype)
        of_scales = (2 * heads, size) if pool.layout == "tpu" else (size, heads, 2)
        has_scales = pool.format in LEVELS
        return QuantizedPool(
            data=array(*shape, dtype="uint8"),
            scale_zero=array(*of_scales, dtype=pool.dtype) if has_scales else None,
            format=pool.format,
        )

    return [layer() for _ in range(num_layers)]
