"""Attention, the delta rule and products in float64 with NumPy, directly from their formulas: the reference for
kernels.

Shares no code with the kernels or their definitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_write.quantized import FLOATS, QuantizedPool

Rows = dict[int, np.ndarray]  # row: queries [Q, H, D]


def attention(
    arguments: Mapping[str, Any], rows: Iterable[int] | None = None, *, queries: int | None = None
) -> Rows:
    """The attention of `rows` (None: all that have queries), for the last `queries` of each (None: all).

    `arguments` are those of `pallas_kernels.paged_attention.reference.paged_attention`, whose docstring is the
    definition, except that the values of a quantised pool are not rounded to q's dtype. Nothing is compiled.
    """
    table, kv_lens, starts, all_q = (
        np.asarray(arguments[name]) for name in ("block_table", "kv_lens", "query_starts", "q")
    )
    pool = jax.tree.map(np.asarray, arguments["pool"])
    out = {}
    for row in range(len(kv_lens)) if rows is None else rows:
        start, end = starts[row], starts[row + 1]
        if queries is not None:
            start = max(start, end - queries)
        if start < end:
            blocks = table[row, : -(-kv_lens[row] // pool.shape[1])]
            kv = _read(pool, blocks, all_q.dtype)
            kv = kv.reshape(-1, *kv.shape[2:])[: kv_lens[row]]
            out[row] = _row(float64(all_q[start:end]), kv, arguments)
    return out


def _read(pool: Any, held: np.ndarray, dtype: Any) -> np.ndarray:
    """K and V of the blocks `held`, float64[M, S, 2 * K, D], by the formulas of `kv_write.quantized`."""
    blocks = jax.tree.map(lambda x: x[held], pool)
    if not isinstance(blocks, QuantizedPool):
        return float64(blocks.view(dtype) if blocks.dtype == np.uint16 else blocks)
    data, format = np.asarray(blocks.data), blocks.format
    if format in FLOATS:
        return float64(data.view(FLOATS[format]))
    if format == "int4":
        data = np.concatenate([data & 15, data >> 4], axis=-1)
    scale, zero = np.split(_read(pool.scale_zero, held, jnp.bfloat16), 2, axis=-1)
    return (data - zero) * scale


def float64(x: Any) -> np.ndarray:
    """A NumPy or jax array, on the host."""
    return np.asarray(x).astype(np.float32).astype(np.float64)  # every type converts to float32


def _row(q: np.ndarray, kv: np.ndarray, arguments: Mapping[str, Any]) -> np.ndarray:
    """The attention of the last queries [Q, H, D] of a row with kv [L, 2 * K, D]."""
    (count, num_heads, head_dim), length = q.shape, kv.shape[0]
    num_kv_heads = kv.shape[1] // 2
    key, query = np.arange(length), np.arange(length - count, length)[:, None]
    visible = key <= query
    if (window := arguments.get("window")) is not None:
        visible &= key > query - window
    kv = np.where(visible.any(axis=0)[:, None, None], kv, 0.0)  # 0 * NaN would be NaN
    grouped = q.reshape(count, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3)  # [K, G, Q, D]
    keys, values = kv[:, 0::2].transpose(1, 2, 0), kv[:, 1::2].transpose(1, 0, 2)
    scores = arguments["scale"] * (grouped @ keys[:, None])  # [K, G, Q, L]
    if (cap := arguments.get("soft_cap")) is not None:
        scores = cap * np.tanh(scores / cap)
    scores = np.where(visible, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if (sinks := arguments.get("sinks")) is not None:
        sink = np.asarray(sinks, np.float64).reshape(num_kv_heads, -1, 1, 1)
        total = total + np.exp(sink - top)
    out = (weights / total) @ values[:, None]
    return out.transpose(2, 0, 1, 3).reshape(count, num_heads, head_dim)


def delta_rule(
    state: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    log_decay: np.ndarray,
    beta: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The state [N, J, D, F] after T tokens of one sequence, and their outputs [T, N, J, F]; float64.

    q, k: [T, N, D], v: [T, N, J, F], log_decay, beta: [T, N, J]. The definition is the docstring of
    `pallas_kernels.delta_rule.reference`.
    """
    out = np.zeros(v.shape)
    for t in range(len(v)):
        state = state * np.exp(log_decay[t])[..., None, None]
        correction = beta[t][..., None] * (v[t] - np.einsum("njdf,nd->njf", state, k[t]))
        state = state + np.einsum("nd,njf->njdf", k[t], correction)
        out[t] = np.einsum("njdf,nd->njf", state, q[t])
    return state, out


def mamba2(
    state: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, log_decay: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The state [N, D, V] after T tokens of one sequence, and their outputs [T, N, V]; float64.

    q, k: [T, N, D], v: [T, N, V], log_decay: [T, N, J] with V = J F. The definition is the docstring of
    `pallas_kernels.mamba2.reference`.
    """
    out = np.zeros(v.shape)
    for t in range(len(v)):
        decay = np.repeat(np.exp(log_decay[t]), v.shape[-1] // log_decay.shape[-1], axis=-1)
        state = state * decay[:, None] + np.einsum("nd,nv->ndv", k[t], v[t])
        out[t] = np.einsum("ndv,nd->nv", state, q[t])
    return state, out


def worst_row(out: jax.Array, starts: jax.Array, expected: Rows) -> float:
    """The largest |out - expected| / |expected| over rows, of all a row's queries together; inf if not finite.

    out: [T, H, D]; all queries in `expected`, the last ones of each row, are compared.
    """
    ends, found = np.asarray(starts)[1:], np.asarray(out)
    parts = {row: found[ends[row] - len(want) : ends[row]] for row, want in expected.items()}
    errors = (relative(float64(parts[row]), want) for row, want in expected.items())
    return max(errors, default=0.0)


def relative(out: np.ndarray, expected: np.ndarray) -> float:
    """|out - expected| / |expected| (Euclidean), or |out| if all of `expected` is 0; inf if anything is not finite."""
    difference = float(np.linalg.norm(np.asarray(out, np.float64) - expected))
    error = difference / (float(np.linalg.norm(expected)) or 1.0)
    return error if np.isfinite(error) else float("inf")
