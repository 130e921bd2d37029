"""Every implementation of paged attention against its definition, on pools poisoned with NaN."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write.quantized import FLOATS, FORMATS, QuantizedPool
from pallas_kernels.paged_attention import cases, reference, xla


def as_floats(pool):
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
    return (data - zero) * scale


def dense_attention(case, arguments):
    """A third opinion in NumPy float64, row by row, that knows the pool only to read it once."""
    out = np.zeros(arguments["q"].shape)
    pool = as_floats(arguments["pool"])
    starts = np.asarray(arguments["query_starts"])
    for row, (query_len, kv_len) in enumerate(zip(case.query_lens, case.kv_lens, strict=True)):
        if query_len == 0:
            continue
        blocks = np.asarray(arguments["block_table"][row])
        kv = pool[blocks].reshape(-1, case.num_kv_heads, 2, case.head_dim)[:kv_len]
        q = np.asarray(arguments["q"], np.float64)[starts[row] : starts[row + 1]]
        group = case.num_heads // case.num_kv_heads
        k, v = (np.repeat(kv[:, :, i], group, axis=1) for i in (0, 1))
        scores = np.einsum("qhd,shd->hqs", q, k) * arguments["scale"]
        if case.soft_cap:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        i = np.arange(kv_len - query_len, kv_len)[:, None]
        j = np.arange(kv_len)[None]
        visible = (j <= i) & (j > i - (case.window or kv_len + 1))
        v = np.where(visible.any(axis=0)[:, None, None], v, 0)  # NaN stands where nobody looks
        scores = np.where(visible[None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[starts[row] : starts[row + 1]] = np.einsum("hqs,shd->qhd", weights, v)
    return out[: sum(case.query_lens)]


def run(function, arguments):
    static = {k: arguments[k] for k in ("scale", "window", "soft_cap")}
    arrays = {k: v for k, v in arguments.items() if k not in static}
    return np.asarray(jax.jit(partial(function, **static))(**arrays), np.float32)


def check(implementation, case):
    arguments = cases.arguments(case)
    result = run(implementation.paged_attention, arguments)
    assert np.isfinite(result).all()
    result = result[: sum(case.query_lens)]
    tolerance = 2e-2 if case.dtype == "bfloat16" else 2e-6
    np.testing.assert_allclose(
        result, dense_attention(case, arguments), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize(
    "implementation", [reference, xla], ids=lambda m: m.__name__.split(".")[-1]
)
@pytest.mark.parametrize("case", cases.SMALL, ids=lambda c: c.name)
def test_paged_attention_reads_its_own_keys_and_nothing_else(implementation, case):
    check(implementation, case)


@pytest.mark.parametrize("format", FORMATS)
def test_quantised_pools_are_read_alike(format):
    """Rows of one token and of many, an empty one, a window and a soft cap; all cases are in the slow suite."""
    case = cases.Case(
        name="",
        query_lens=(1, 0, 9, 1),
        kv_lens=(129, 0, 40, 16),
        window=30,
        soft_cap=5.0,
        num_padding_tokens=2,
        dtype="bfloat16",
        format=format,
    )
    for implementation in (reference, xla):
        check(implementation, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.QUANTIZED, ids=lambda c: c.name)
def test_quantised_pools_are_read_alike_in_every_case(case):
    check(xla, case)


@pytest.mark.parametrize("name", ["decode", "decode-long", "block-edges"])
def test_one_query_per_row_gives_the_general_result(name):
    case = next(c for c in cases.SMALL if c.name == name)
    arguments = cases.arguments(case)
    fast = run(partial(xla.paged_attention, one_query_per_row=True), arguments)
    np.testing.assert_allclose(fast, run(xla.paged_attention, arguments), atol=1e-6)


def test_a_longer_table_costs_no_temporaries():
    """The loop's tile, not the table, bounds the memory: 0.5 MB at 64 blocks and at 4096."""
    case = cases.Case(name="", query_lens=(1, 1), kv_lens=(100, 100))
    arguments = cases.arguments(case)
    temporaries = []
    for width in (64, 4096):
        arguments["block_table"] = np.zeros((2, width), np.int32)
        static = {k: arguments[k] for k in ("scale", "window", "soft_cap")}
        arrays = {k: v for k, v in arguments.items() if k not in static}
        compiled = jax.jit(partial(xla.paged_attention, **static)).lower(**arrays).compile()
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    assert temporaries[1] <= temporaries[0] + 4 * 2 * 4096 * 4  # the padded table itself
    assert temporaries[1] < 1_000_000
