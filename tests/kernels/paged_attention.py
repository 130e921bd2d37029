"""What every implementation of paged attention has to do: its tests subclass `PagedAttentionTests`.

The pools are poisoned: NaN stands in every block and slot that no row may read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write.quantized import FLOATS, FORMATS, QuantizedPool
from pallas_kernels.paged_attention import cases
from pallas_kernels.paged_attention.cases import Case


class PagedAttentionTests:
    """`cases` are those that the implementation serves once `fitted`, `fast` the names in the fast core (None: all)."""

    cases: ClassVar[tuple[Case, ...]] = cases.SMALL
    fast: ClassVar[tuple[str, ...] | None] = None
    formats: ClassVar[tuple[str, ...]] = FORMATS  # of pools that it reads as they are

    def attend(self, case: Case, arguments: dict, **options) -> np.ndarray:
        """`arguments` as `cases.arguments` makes them → [T, H, D]. options: of the implementation."""
        raise NotImplementedError

    def fitted(self, case: Case) -> Case:
        """The case in a dtype, head dim and block size that the implementation takes."""
        return case

    def compare(self, case: Case, result: np.ndarray, want: np.ndarray) -> None:
        tolerance = 2e-2 if case.dtype == "bfloat16" else 2e-6
        np.testing.assert_allclose(result, want, atol=tolerance, rtol=tolerance)

    def test_a_row_reads_its_own_keys_and_nothing_else(self, case: Case):
        self.check(self.fitted(case))

    @pytest.mark.parametrize(
        "name", [pytest.param("decode", marks=pytest.mark.slow), "decode-long", "block-edges"]
    )
    @pytest.mark.parametrize("sinks", [False, True])
    def test_one_query_per_row_is_the_same(self, name: str, sinks: bool):
        case = self.fitted(replace(case_of(name), sinks=sinks))
        self.check(case, one_query_per_row=True)

    def test_quantised_pools_are_read_alike(self, format: str):
        """Rows of one token and of many, an empty one, a window, a soft cap and sinks."""
        case = Case(
            name="",
            query_lens=(1, 0, 9, 1),
            kv_lens=(129, 0, 40, 16),
            window=30,
            soft_cap=5.0,
            sinks=True,
            num_padding_tokens=2,
            dtype="bfloat16",
            format=format,
        )
        self.check(self.fitted(case))

    def check(self, case: Case, **options) -> None:
        arguments = cases.arguments(case)
        result = self.attend(case, arguments, **options)
        assert np.isfinite(result).all()
        num_tokens = sum(case.query_lens)
        self.compare(case, result[:num_tokens], dense_attention(case, arguments))


def case_of(name: str) -> Case:
    return next(case for case in cases.SMALL if case.name == name)


def run(function: Callable, arguments: dict, **options) -> np.ndarray:
    """float64 [T, H, D]"""
    static = {k: arguments[k] for k in ("scale", "window", "soft_cap")}
    arrays = {k: v for k, v in arguments.items() if k not in static}
    return np.asarray(jax.jit(partial(function, **static, **options))(**arrays), np.float64)


def as_floats(pool) -> np.ndarray:
    """float64[N, S, 2*K, D] of any pool, without the code under test."""
    if not isinstance(pool, QuantizedPool):
        return np.asarray(pool, np.float64)
    data = np.asarray(pool.data)
    if pool.format.startswith("fp8"):
        return data.view(FLOATS[pool.format]).astype(np.float64)
    if pool.format == "int4":
        data = np.concatenate([data % 16, data // 16], axis=-1)
    scale_zero = np.asarray(pool.scale_zero)
    if scale_zero.dtype == np.uint16:
        scale_zero = scale_zero.view(jnp.bfloat16)
    scale, zero = np.split(scale_zero.astype(np.float64), 2, axis=-1)
    # Where NaN stands, float16 has a scale of 0 and an infinite zero.
    with np.errstate(invalid="ignore"):
        return (data - zero) * scale


def dense_attention(case: Case, arguments: dict) -> np.ndarray:
    """A third opinion in NumPy float64, row by row, that knows the pool only to read it once."""
    out = np.zeros(arguments["q"].shape)
    pool = as_floats(arguments["pool"])
    starts = np.cumsum((0, *case.query_lens))
    for row, (query_len, kv_len) in enumerate(zip(case.query_lens, case.kv_lens, strict=True)):
        if query_len == 0:
            continue
        blocks = np.asarray(arguments["block_table"][row])
        kv = pool[blocks].reshape(-1, case.num_kv_heads, 2, case.head_dim)[:kv_len]
        q = np.asarray(arguments["q"], np.float64)[starts[row] : starts[row + 1]]
        group = case.num_heads // case.num_kv_heads
        k, v = (np.repeat(kv[:, :, i], group, axis=1) for i in (0, 1))
        with np.errstate(invalid="ignore"):  # NaN stands in K where nobody looks
            scores = q.transpose(1, 0, 2) @ k.transpose(1, 2, 0) * arguments["scale"]
        if case.soft_cap:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        i = np.arange(kv_len - query_len, kv_len)[:, None]
        j = np.arange(kv_len)[None]
        visible = j <= i
        for _, first, number in (picture for picture in case.pictures if picture[0] == row):
            of_query, of_key = (((x >= first) & (x < first + number)) for x in (i, j))
            visible |= of_query & of_key
        visible &= j > i - (case.window or kv_len + 1)
        v = np.where(visible.any(axis=0)[:, None, None], v, 0)  # NaN stands where nobody looks
        scores = np.where(visible[None], scores, -np.inf)
        sinks = np.full(case.num_heads, -np.inf)
        if case.sinks:
            sinks = np.asarray(arguments["sinks"], np.float64)
        sinks = sinks[:, None, None]
        top = np.maximum(scores.max(axis=-1, keepdims=True), sinks)
        weights = np.exp(scores - top)
        weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sinks - top)
        out[starts[row] : starts[row + 1]] = (weights @ v.transpose(1, 0, 2)).transpose(1, 0, 2)
    return out[: sum(case.query_lens)]
