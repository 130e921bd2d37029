"""The attention implementations that the suite compares: ours and JAX's own kernels; and their inputs.

Each is a function (q, kv, table, kv_lens, query_starts) -> (out, kv), where kv is the pool in its own layout. torch's
is in `torch_attention.py`, in a separate process.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.hopper import unsupported_reason_on
from pallas_kernels.kv_write.quantized import LEVELS, QuantizedPool
from pallas_kernels.kv_write.storage import Pool, to_storage

Attend = Callable[..., tuple[jax.Array, Any]]
KERNELS = ("gpu", "tpu")  # modules of an operation that need such a device
OURS = {"gpu": "our GPU kernel", "tpu": "our TPU kernel", "xla": "our XLA path"}
TRITON, CUDNN = "JAX's Triton kernel", "jax.nn.dot_product_attention (cuDNN)"
RAGGED = "JAX's ragged paged attention"


def kernels_of(device: jax.Device) -> tuple[str, dict[str, str]]:
    """Which of KERNELS supports the device, "cpu" if none does; and why the others do not."""
    platform = device.platform
    absent = {
        name: f"it needs a {name.upper()}; this is a {platform.upper()}"
        for name in KERNELS
        if name != platform
    }
    if platform == "gpu":
        reason = unsupported_reason_on(getattr(device, "compute_capability", None))
        if reason:
            return "cpu", absent | {"gpu": reason}
    return (platform if platform in KERNELS else "cpu"), absent


@dataclass(frozen=True, kw_only=True)
class Work:
    """Attention of one layer: `batch` rows of `length` tokens, of which the last `query_len` are queries."""

    batch: int
    length: int
    query_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    format: str | None = None  # of a quantised pool

    @property
    def decode(self) -> bool:
        return self.query_len == 1

    @property
    def num_tokens(self) -> int:
        """The number of queries."""
        return self.batch * self.query_len

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, including the null block."""
        return 1 + self.batch * math.ceil(self.length / self.block_size)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of all tokens as the pool stores them, each read once."""
        bits = {None: 16, "int4": 4}.get(self.format, 8)
        of_head = self.head_dim * bits // 8 + (4 if self.format in LEVELS else 0)  # scale and zero
        return self.batch * self.length * 2 * self.num_kv_heads * of_head

    @property
    def flops(self) -> int:
        """Flops of both products, for the keys that each query sees (causal)."""
        seen = self.query_len * (2 * self.length - self.query_len + 1) // 2
        return 4 * self.batch * seen * self.num_heads * self.head_dim


@dataclass(frozen=True)
class Inputs:
    """Inputs for all: queries, and several pools, so that no cache holds what the next launch reads."""

    q: jax.Array  # bfloat16[T, H, D]
    pools: tuple[Any, ...]  # bfloat16[N, S, 2 * K, D], K and V interleaved; or quantised
    table: jax.Array  # int32[R, M], blocks in random order
    kv_lens: jax.Array
    query_starts: jax.Array

    def rows(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.table, self.kv_lens, self.query_starts


def inputs(work: Work, *, num_pools: int) -> Inputs:
    """Normally distributed inputs; every block but the null block belongs to some row."""
    keys = jax.random.split(jax.random.key(0), num_pools + 1)
    shape = (work.num_blocks, work.block_size, 2 * work.num_kv_heads, work.head_dim)
    blocks = np.random.default_rng(0).permutation(work.num_blocks - 1) + 1
    return Inputs(
        jax.random.normal(keys[0], (work.num_tokens, work.num_heads, work.head_dim), jnp.bfloat16),
        tuple(_pool(key, shape, work.format) for key in keys[1:]),
        jnp.asarray(blocks.reshape(work.batch, -1), jnp.int32),
        jnp.full(work.batch, work.length, jnp.int32),
        jnp.arange(work.batch + 1, dtype=jnp.int32) * work.query_len,
    )


@partial(jax.jit, static_argnums=(1, 2))
def _pool(key: jax.Array, shape: tuple[int, ...], format: str | None) -> Pool:
    pool = jax.random.normal(key, shape, jnp.bfloat16)
    if format is None:
        return pool
    # Bits on a CPU, as an engine stores them there.
    dtype = jnp.uint16 if jax.default_backend() == "cpu" else jnp.bfloat16
    scale_zero = jnp.zeros(0, dtype) if format in LEVELS else None
    empty = QuantizedPool(data=jnp.zeros(0, jnp.uint8), scale_zero=scale_zero, format=format)
    return to_storage(pool, empty)


@dataclass(frozen=True)
class Peer:
    """One attention implementation, ready to be compiled."""

    name: str
    attend: Attend
    kv: Callable[[Inputs], list[Any]] = lambda given: list(given.pools)  # in its own layout
    writes: bool = False  # whether it writes into kv, which its launches then own


def peers(work: Work, platform: str) -> tuple[list[list[Peer]], dict[str, str]]:
    """Peers, ours first, each a list of variants of which the fastest counts; and why other peers are absent."""
    found, absent = [[_ours(work, platform)]], {}
    this = f"this is a {platform.upper()}"
    if platform != "cpu":
        found.append([_ours(work, "cpu")])
    if work.format is not None:
        reason = "it reads bfloat16; its time is that of the same shape without quantisation"
        absent.update((name, reason) for name in (RAGGED, TRITON, CUDNN))
        return found, absent
    if platform == "tpu":
        found.append([_ragged(work)])
    else:
        absent[RAGGED] = f"it needs a TPU; {this}"
    if platform != "gpu":
        absent[TRITON] = absent[CUDNN] = f"it needs a GPU; {this}"
        return found, absent
    found.append([_cudnn(work)])
    if not work.decode:
        absent[TRITON] = "it takes one query per row, so decoding only"
        return found, absent
    try:
        found.append(triton(work))
    except ImportError as error:
        absent[TRITON] = f"jax {jax.__version__} no longer has it ({error})"
    return found, absent


def _ours(work: Work, platform: str) -> Peer:
    name = platform if platform in KERNELS else "xla"
    module = importlib.import_module(f"pallas_kernels.paged_attention.{name}")
    options: dict[str, Any] = {"scale": work.scale, "one_query_per_row": work.decode}
    if name in KERNELS:
        from pallas_kernels.tile_sizes import tuned_sizes

        options["sizes"] = tuned_sizes(
            "paged_attention", name, jax.devices()[0].device_kind
        )  # as the engine has them
    attend = partial(module.paged_attention, **options)
    if name != "tpu":
        return Peer(OURS[name], lambda q, pool, *rows: (attend(q, pool, *rows), pool))

    from pallas_kernels.paged_attention.tpu_layout import to_tpu

    def run(q, pool, *rows):
        new = q[:, : work.num_kv_heads]  # it writes keys and values too: some of the queries
        return attend(q, new, new, pool, *rows)

    return Peer(OURS[name], run, lambda given: [to_tpu(x) for x in given.pools], writes=True)


def _ragged(work: Work) -> Peer:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    def run(q, pool, table, kv_lens, query_starts):
        count = jnp.full(1, table.shape[0], jnp.int32)
        given = (q, pool, kv_lens, table, query_starts, count)
        return ragged_paged_attention(*given, sm_scale=work.scale), pool

    return Peer(RAGGED, run)


def triton(work: Work, *, interpret: bool = False) -> list[Peer]:
    """JAX's Triton kernel with several tile sizes and numbers of splits. Raises ImportError if JAX does not have it.

    It has no scale and gets unscaled queries, which does not affect its speed. It needs K and V in separate pools, head
    by head.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    def kv(given: Inputs) -> list[Any]:
        by_head = [x.transpose(2, 0, 1, 3) for x in given.pools]  # [2 * K, N, S, D]
        return [(x[0::2].copy(), x[1::2].copy()) for x in by_head]

    def peer(keys: int, splits: int) -> Peer:
        pages = max(1, min(keys // work.block_size, blocks // splits))
        sizes = {"pages_per_compute_block": pages, "k_splits": splits, "interpret": interpret}
        sizes["num_warps"] = 4 if keys == 64 else 8

        def run(q, kv, *rows):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # again, during tracing
                return paged_attention(q, *kv, *rows[:2], **sizes), kv

        return Peer(f"{TRITON}, {pages * work.block_size} keys at once, {splits} splits", run, kv)

    blocks = (work.num_blocks - 1) // work.batch
    fitting = [(keys, n) for keys in (64, 128) for n in (4, 8, 16) if blocks % n == 0]
    return [peer(keys, splits) for keys, splits in fitting or [(64, 1)]]


def _cudnn(work: Work) -> Peer:
    """On contiguous keys and values, into which a paged pool would first have to be converted.

    Causal if every token is a query. A few queries at the end see all keys instead, which is hardly more work.
    """

    def kv(given: Inputs) -> list[Any]:
        return [contiguous(work, pool, given.table) for pool in given.pools]

    def run(q, kv, *rows):
        queries = q.reshape(work.batch, -1, work.num_heads, work.head_dim)
        causal = work.query_len == work.length
        options: Any = {"is_causal": causal, "implementation": "cudnn"}
        out = jax.nn.dot_product_attention(queries, *kv, scale=work.scale, **options)
        return out.reshape(q.shape), kv

    return Peer(CUDNN, run, kv)


def contiguous(work: Work, pool: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
    """K and V, each [R, L, K, D]."""
    kv = pool[table].reshape(work.batch, -1, 2 * work.num_kv_heads, work.head_dim)[:, : work.length]
    return kv[:, :, 0::2], kv[:, :, 1::2]
