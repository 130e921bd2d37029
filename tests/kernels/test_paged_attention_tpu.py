"""The TPU kernel, interpreted on the CPU, against `write_kv` and the reference.

The interpreter simulates DMAs, which arrive as late as they may, fills uninitialised memory with NaN, and finds races.
Interpreting compiles the simulation, so cases share programs where they can: `bucketed` brings them to one size.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the races have no public name
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_write.quantized import FLOATS, QuantizedPool
from pallas_kernels.kv_write.xla import write_kv
from pallas_kernels.mosaic_tpu import LANES
from pallas_kernels.paged_attention import (
    cases,
    reference,
    tpu,
    tpu_choose,
    tpu_fp8,
    tpu_lanes,
    tpu_layout,
    tpu_shape,
    tpu_work,
    tune,
)
from pallas_kernels.paged_attention.cases import Case
from tests.kernels.paged_attention import PagedAttentionTests, case_of

INTERPRETED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
EAGER = replace(INTERPRETED, dma_execution_mode="eager")
TOKENS, ROWS, BLOCKS_PER_ROW, BLOCKS = 256, 6, 24, 110


@cache
def program(interpret=INTERPRETED, **static):
    return jax.jit(partial(tpu.paged_attention, interpret=interpret, **static))


@cache
def oracle(**static):
    def run(q, k, v, pool, slot_mapping, sinks, *rows):
        pool = write_kv(pool, k, v, slot_mapping)
        out = reference.paged_attention(q, pool, *rows, sinks=sinks, **static)
        return out, tpu_layout.to_tpu(pool)

    return jax.jit(run)


to_tpu = jax.jit(tpu_layout.to_tpu)


def fitting(case: Case, format: str | None = None) -> Case:
    """The case with the least block size and head dim that the kernel takes."""
    least = {None: 32 // jnp.dtype(case.dtype).itemsize, "int8": 128, "int4": 128}.get(format, 32)
    width = 128 if case.num_kv_heads == 1 and format == "int4" else 64
    return replace(
        case,
        head_dim=max(width, case.head_dim),
        block_size=max(least, case.block_size),
        format=format,
    )


def arrays_of(case: Case) -> dict:
    """Arguments of the kernel but for the pool's layout, and the slots of its new tokens. Padding tokens: slot 0.

    NumPy's, as JAX would compile each step of their preparation.
    """
    arguments = cases.arguments(case)
    names = ("q", "pool", "block_table", "kv_lens", "query_starts")
    arrays = jax.tree.map(np.asarray, {name: arguments[name] for name in names})
    pool = arrays["pool"]
    if isinstance(pool, QuantizedPool) and pool.scale_zero is not None:
        if pool.scale_zero.dtype == jnp.uint16:
            arrays["pool"] = replace(pool, scale_zero=pool.scale_zero.view(jnp.bfloat16))
    if isinstance(pool, QuantizedPool):
        arrays["pool"] = replace(arrays["pool"], data=as_stored(pool.data, pool.format))
    rng = np.random.default_rng(1)
    shape = (arrays["q"].shape[0], case.num_kv_heads, case.head_dim)
    dtype = jnp.dtype(case.dtype)
    arrays["k"], arrays["v"] = (rng.standard_normal(shape).astype(dtype) for _ in "kv")
    arrays["sinks"] = rng.standard_normal(case.num_heads).astype(np.float32)
    arrays["slot_mapping"] = slots_of(case, arrays)
    return arrays


def as_stored(data: np.ndarray, format: str) -> np.ndarray:
    """Bits of a pool as the kernel stores them, see `tpu_fp8.py`."""
    if format != "fp8_e4m3":
        return data
    return np.asarray(tpu_fp8.stored_bits(jnp.asarray(data), tpu_fp8.BIASED))


def with_zeros_of(wanted: Any, found: Any) -> Any:
    """The pool `wanted`, with 0 for -0 where `found` has it: of fp8_e4m3 the kernel stores no -0."""
    if getattr(wanted, "format", None) != "fp8_e4m3":
        return wanted
    data, stored = np.asarray(wanted.data), np.asarray(found.data)
    return replace(wanted, data=np.where((data == tpu_fp8.NAN) & (stored == 0), stored, data))


def slots_of(case: Case, arrays: dict) -> np.ndarray:
    slots = np.zeros(arrays["q"].shape[0], np.int32)
    table, size = np.asarray(arrays["block_table"]), case.block_size
    lens = zip(case.query_lens, case.kv_lens, strict=True)
    for row, (query_len, kv_len) in enumerate(lens):
        positions = np.arange(kv_len - query_len, kv_len)
        first = sum(case.query_lens[:row])
        slots[first : first + query_len] = table[row, positions // size] * size + positions % size
    return slots


def bucketed(arrays: dict, *, num_tokens: int = TOKENS) -> dict:
    """The same in arrays of one size; padding blocks are NaN, padding rows have no tokens."""
    arrays = jax.tree.map(np.asarray, arrays)

    def pad(x, *sizes, **options):
        widths = [(0, size - old) for size, old in zip(sizes, x.shape, strict=False)]
        return np.pad(x, widths + [(0, 0)] * (x.ndim - len(sizes)), **options)

    padded = {name: pad(arrays[name], num_tokens) for name in ("q", "k", "v", "slot_mapping")}
    format = getattr(arrays["pool"], "format", None)
    return padded | {
        "pool": jax.tree.map(partial(pad_blocks, num_blocks=BLOCKS, format=format), arrays["pool"]),
        "block_table": pad(arrays["block_table"], ROWS, BLOCKS_PER_ROW),
        "kv_lens": pad(arrays["kv_lens"], ROWS),
        "query_starts": pad(arrays["query_starts"], ROWS + 1, mode="edge"),
        "sinks": arrays["sinks"],
    }


def pad_blocks(x, *, num_blocks, format=None):
    value = jnp.nan
    if x.dtype == jnp.uint8:
        value = tpu_fp8.NAN if format == "fp8_e4m3" else 0xFF
    return np.pad(x, [(0, num_blocks - x.shape[0])] + [(0, 0)] * 3, constant_values=value)


def run(arrays: dict, *, sinks: bool = False, **static):
    """Result [T, H, D] and pool of the kernel; no race was seen."""
    names = ("q", "k", "v", "pool", "block_table", "kv_lens", "query_starts")
    arguments = arrays | {"pool": to_tpu(arrays["pool"])}
    options = {"sinks": arrays["sinks"]} if sinks else {}
    static.setdefault("one_query_per_row", False)
    static = dict(sorted(static.items()))  # to the cache their order matters
    result = program(**static)(*(arguments[name] for name in names), **options)
    out, pool = jax.block_until_ready(result)
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found
    return np.asarray(out, np.float32), pool


def static_of(case: Case) -> dict:
    return dict(scale=case.head_dim**-0.5, window=case.window, soft_cap=case.soft_cap)


def check(case: Case, arrays: dict, *, sinks: bool = False, **options) -> np.ndarray:
    """The result. options: `one_query_per_row`, `sizes`, `interpret`."""
    static = static_of(case)
    names = ("q", "k", "v", "pool", "slot_mapping")
    rows = (arrays[name] for name in ("block_table", "kv_lens", "query_starts"))
    given = arrays["sinks"] if sinks else None
    expected, expected_pool = oracle(**static)(*(arrays[name] for name in names), given, *rows)
    out, pool = run(arrays, sinks=sinks, **static, **options)
    assert np.isfinite(out).all()
    num_tokens = sum(case.query_lens)
    assert (out[num_tokens:] == 0).all()
    tolerance = 1e-2 if case.dtype == "bfloat16" else 5e-6
    np.testing.assert_allclose(
        out[:num_tokens],
        np.asarray(expected, np.float32)[:num_tokens],
        atol=tolerance,
        rtol=tolerance,
    )
    leaves = map(jax.tree.leaves, (pool, with_zeros_of(expected_pool, pool)))
    for got, wanted in zip(*leaves, strict=True):  # the null block: padding is not written at all
        np.testing.assert_array_equal(
            np.asarray(got, np.float32)[1:], np.asarray(wanted, np.float32)[1:]
        )
    return out


class TestTPU(PagedAttentionTests):
    """The new keys and values are not in the pool yet, but arguments: the kernel writes them. Quantised pools below."""

    # Of others there are tests below, in bfloat16: `test_heads_of_every_size`.
    cases = tuple(
        case for case in cases.SMALL if case.name not in ("mha", "mqa", "block-size-64", "bfloat16")
    )
    fast = ("mixed",)
    test_quantised_pools_are_read_alike = None  # below

    def fitted(self, case):
        return fitting(case)

    def compare(self, case, result, want):
        tolerance = 1e-2 if case.dtype == "bfloat16" else 5e-6
        np.testing.assert_allclose(result, want, atol=tolerance, rtol=tolerance)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["decode", "decode-long", "block-edges"])
    @pytest.mark.parametrize("sinks", [False, True])
    def test_one_query_per_row_is_the_same(self, name, sinks):
        super().test_one_query_per_row_is_the_same(name, sinks)

    def attend(self, case, arguments, *, one_query_per_row=False):
        pool, num_tokens = np.asarray(arguments["pool"]), arguments["q"].shape[0]
        arrays = dict(arguments, sinks=arguments.get("sinks"))
        slots = slots_of(case, arguments)
        kv = pool.reshape(-1, case.num_kv_heads, 2, case.head_dim)
        new = kv[slots]
        new[sum(case.query_lens) :] = 0
        arrays["k"], arrays["v"] = new[:, :, 0], new[:, :, 1]
        missing = kv.copy()
        missing[slots] = np.nan
        arrays |= {"pool": missing.reshape(pool.shape), "slot_mapping": slots}
        arrays = bucketed(arrays, num_tokens=ROWS if one_query_per_row else TOKENS)
        static = static_of(case) | {"one_query_per_row": one_query_per_row}
        out, written = run(arrays, sinks=case.sinks, **static)
        out = out[:num_tokens]
        wanted = pool.reshape(*pool.shape[:2], -1).astype(np.float32)
        written = np.asarray(written, np.float32)[: len(wanted)]
        np.testing.assert_array_equal(written[1:], wanted[1:])  # the null block means nothing
        assert (out[sum(case.query_lens) :] == 0).all()
        return out


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int4", "fp8_e4m3"])
def test_quantised_with_a_window_a_soft_cap_and_sinks(format):
    """Rows that end before, with and behind a block."""
    case = Case(
        name="",
        query_lens=(1, 0, 9, 1, 1, 1, 1),
        kv_lens=(259, 0, 140, 1, 127, 128, 129),
        window=30,
        soft_cap=5.0,
        num_padding_tokens=2,
    )
    case = fitting(case, format)
    check(case, arrays_of(case), sinks=True)


@pytest.mark.slow
def test_copies_may_arrive_as_soon_as_they_start():
    """What was overwritten too early would show, of data and of scales."""
    case = fitting(case_of("mixed"), "int8")
    check(case, arrays_of(case), interpret=EAGER)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "format"), [("window", "fp8_e4m3"), *(("bfloat16", format) for format in FLOATS)]
)
def test_pools_of_8_bit_floats(name, format):
    case = fitting(case_of(name), format)
    check(case, arrays_of(case))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_key_that_is_no_number_is_none_in_8_bits(dtype):
    """Of the second row, in whose place the others have zeros."""
    case = fitting(replace(case_of("decode"), dtype=dtype), "fp8_e4m3")
    arrays = arrays_of(case)
    for name in "kv":
        arrays[name] = np.zeros_like(arrays[name])
        arrays[name][1] = np.nan
    out, _ = run(arrays, one_query_per_row=True, **static_of(case))
    rows = np.isnan(out[: len(case.kv_lens)]).all(axis=(1, 2))
    np.testing.assert_array_equal(rows, np.arange(len(rows)) == 1)


def test_bits_are_numbers_of_another_bias_to_an_mxu():
    """All of them: 0 for -0, and for NaN other bits."""
    given = np.arange(256, dtype=np.uint8)
    bits = np.asarray(tpu_fp8.stored_bits(jnp.asarray(given), tpu_fp8.BIASED))
    found = bits.view(tpu_fp8.STORED_FLOATS[tpu_fp8.BIASED]).astype(np.float32) * 16
    np.testing.assert_array_equal(found, given.view(FLOATS["fp8_e4m3"]).astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "format"),
    [
        # Heads of these sizes are tested below as well, with several tiles of queries or one query per row.
        pytest.param(14, 2, 64, None, marks=pytest.mark.deep),
        (6, 2, 96, None),
        (4, 4, 128, None),
        (3, 1, 192, None),
        pytest.param(8, 4, 96, "int4", marks=pytest.mark.deep),
        (7, 1, 256, "int4"),
    ],
)
def test_heads_of_every_size(num_heads, num_kv_heads, head_dim, format):
    """(6, 2, 96): a head's lanes begin within a register; (8, 4, 96): and in each period of two heads again.

    A block fills one register of slots, or several where there is one KV head.
    """
    case = replace(
        fitting(case_of("second-chunk"), format),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype="bfloat16",
        block_size=128 if format else 64 if num_kv_heads == 1 else 16,
    )
    check(case, arrays_of(case), sinks=True)


@pytest.mark.parametrize("source", [0, 40, 64, 96])
@pytest.mark.parametrize("target", [0, 32, 112])
@pytest.mark.parametrize("count", [48, 96, 128, 192])
def test_lanes_move_from_registers_to_others(source, target, count):
    given, wanted = np.arange(1, 1 + 4 * LANES), np.zeros(4 * LANES, int)
    wanted[target : target + count] = given[source : source + count]
    found = np.zeros((4, LANES), int)
    for move in tpu_lanes.moves(source, target, count):
        lanes = slice(move.first, move.end)
        rotated = np.roll(given.reshape(4, LANES)[move.source], move.rotation)
        found[move.target, lanes] = rotated[lanes]
    np.testing.assert_array_equal(found.ravel(), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "dtype", "format", "spreads"),
    [
        # A register with the last head of one KV head and the first of the other; three turns over heads.
        (18, 2, 64, "bfloat16", None, True),
        pytest.param(6, 2, 64, "float32", None, True, marks=pytest.mark.deep),
        # An odd number of halves: XLA makes the tiles.
        (3, 1, 64, "bfloat16", None, False),
        # Two planes of a head in a register.
        (3, 1, 128, "bfloat16", "int4", True),
        # Heads that begin anywhere in a register, as their keys do.
        pytest.param(8, 4, 96, "bfloat16", None, True, marks=pytest.mark.deep),
        (8, 4, 96, "bfloat16", "int4", True),
        # Values that begin in one register and end in another.
        (8, 8, 112, "float32", None, True),
        # Heads of one KV head begin at different lanes. See `test_rows_are_picked_out_of_tiles_of_tokens` too.
        pytest.param(16, 4, 80, "bfloat16", None, True, marks=pytest.mark.deep),
        pytest.param(4, 2, 192, "bfloat16", None, True, marks=pytest.mark.deep),
    ],
)
def test_heads_that_are_no_whole_registers(
    num_heads, num_kv_heads, head_dim, dtype, format, spreads
):
    """Several tiles of queries, of several rows."""
    case = replace(
        case_of("mixed"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        dtype=dtype,
        head_dim=head_dim,
    )
    case, sizes = fitting(case, format), tpu_layout.TileSizes(tile_rows=64)
    arrays = arrays_of(case)
    shape = tpu_choose.shape_of(
        arrays["q"], to_tpu(arrays["pool"]), num_kv_heads, blocks_per_row=1, sizes=sizes
    )
    assert shape.spreads_heads == spreads
    check(case, arrays, sizes=sizes, sinks=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["prompt-of-many-tiles", "mixed", "empty-rows-between", "padding"])
def test_heads_of_whole_registers_stay_side_by_side(name, dtype):
    """Queries and results have no tiles of their own in HBM, see `Shape.is_flat`. With sinks and without."""
    case = fitting(replace(case_of(name), head_dim=128, dtype=dtype))
    sizes = tpu_layout.TileSizes(tile_rows=64)
    check(case, bucketed(arrays_of(case)), sizes=sizes, sinks=dtype == "bfloat16")


@pytest.mark.slow
def test_a_row_reads_what_another_row_writes_in_the_same_call():
    """As after a prefix hit on blocks that are being computed, whatever the order of the rows."""
    case = fitting(Case(name="", query_lens=(3, 40, 9), kv_lens=(35, 40, 41), block_size=16))
    arrays = arrays_of(case)
    table = arrays["block_table"].copy()
    table[0, :2] = table[2, :2] = table[1, :2]
    arrays["block_table"] = table
    check(case, bucketed(arrays))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_read_by_others", "format"), [(False, None), (True, None), (True, "int8")]
)
def test_each_of_many_rows_writes_a_token_while_others_attend(is_read_by_others, format):
    """More rows than copies are under way. With a prefix hit on a block that is full with this token all tokens are
    written before.
    """
    size = 128 if format else 16
    lens = np.array([20, 1, 2 * size + 8, 0, 2 * size + 1, 16, 17, 1, 0, 9, 2 * size, 128, 8, 50])
    has_keys = lens > 0
    case = Case(name="", query_lens=(*has_keys,), kv_lens=(*lens,), block_size=size)
    case = fitting(replace(case, dtype="bfloat16"), format)
    arrays = arrays_of(case)
    if is_read_by_others:
        table = arrays["block_table"].copy()
        table[2, :2] = table[4, :2] = table[10, :2]
        arrays["block_table"] = table
    check_one_query_per_row(case, arrays)


def check_one_query_per_row(case: Case, arrays: dict, **options) -> None:
    """A row without keys has a token too."""
    has_keys = np.array(case.kv_lens) > 0
    for name in ("q", "k", "v", "slot_mapping"):
        packed = arrays[name][: has_keys.sum()]
        arrays[name] = np.zeros((has_keys.size, *packed.shape[1:]), packed.dtype)
        arrays[name][has_keys] = packed
    arrays["query_starts"] = np.arange(has_keys.size + 1, dtype=np.int32)
    case = replace(case, query_lens=(1,) * has_keys.size)
    check(case, arrays, one_query_per_row=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "dtype", "format"),
    [
        (14, 2, 128, "bfloat16", None),  # seven heads of eight rows
        (8, 4, 128, "float32", None),  # four KV heads share rows, of tiles of eight tokens
        (20, 2, 256, "bfloat16", "int8"),  # two registers a head, more than eight rows
        (14, 2, 64, "bfloat16", None),  # two heads a register
        (6, 2, 128, "bfloat16", "int4"),  # two planes a register
        (3, 1, 64, "bfloat16", None),  # an odd number of halves: XLA makes the tiles
        # Heads that begin anywhere in a register. Of the first four KV heads share rows.
        pytest.param(8, 4, 96, "bfloat16", None, marks=pytest.mark.deep),
        (16, 4, 80, "float32", None),
    ],
)
def test_rows_are_picked_out_of_tiles_of_tokens(num_heads, num_kv_heads, head_dim, dtype, format):
    """The second tile has one row with keys, the third none."""
    lens = (20, 1, 0, 300, 7, *[0] * 18, 40, *[0] * 40, 33, 0, 128)
    case = fitting(
        Case(
            name="",
            query_lens=tuple(int(n > 0) for n in lens),
            kv_lens=lens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
        ),
        format,
    )
    check_one_query_per_row(case, arrays_of(case), sinks=format is None)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, pytest.param(1100, marks=pytest.mark.deep)])
def test_a_fetch_has_a_power_of_two_of_tiles(window):
    """The nearest to the bytes of a fetch: the scalar core counts fetches by shifts."""
    case = Case(
        name="",
        query_lens=(1, 1),
        kv_lens=(1000, 2000),
        num_heads=5,
        num_kv_heads=5,
        head_dim=64,
        dtype="bfloat16",
        window=window,
    )
    case = fitting(case, "int8")
    arrays = arrays_of(case)
    shape = tpu_choose.shape_of(
        arrays["q"],
        to_tpu(arrays["pool"]),
        5,
        blocks_per_row=1,
        sizes=tpu_layout.TileSizes(),
        one_query_per_row=True,
    )
    assert 3 <= tpu_shape.FETCH_BYTES / (shape.tile_kv * shape.width) < 4
    assert shape.tiles_of_fetch == 4
    check(case, arrays, one_query_per_row=True)


@pytest.mark.parametrize("heads", [(100, 100, 128), (8, 8, 64)])
def test_rows_with_several_queries_have_tiles_of_several(heads):
    q, pool = shapes(heads=heads, block_size=16)
    shape = tpu_choose.shape_of(q, pool, heads[1], 32, sizes=tpu_layout.TileSizes())
    assert shape.tile_q > 1
    why = tpu_layout.unsupported_reason(q, pool, heads[1], (64, 32))
    assert (why is not None) == (shape.vmem_bytes > tpu_layout.VMEM_BYTES)


@pytest.mark.parametrize("others", ["reads none", "reads one", "reads the last one"])
def test_which_calls_write_everything_first(others):
    """More blocks become full than are compared at once, and some do not."""
    size, num_blocks = 16, 6
    lens = np.full(40, 3 * size)
    lens[::3] += 5
    lens[[4, 11]] = 0
    table = 1 + np.arange(lens.size * num_blocks).reshape(-1, num_blocks)
    # Block 0 is nobody's, and stands where a window has left blocks behind.
    table[7, 0] = 0
    full = np.sort(table[(lens > 0) & (lens % size == 0), 2])
    assert full.size > 2 * tpu_work.COMPARED
    if others != "reads none":
        table[9, 1] = full[3 if others == "reads one" else 0]
    shape = SimpleNamespace(block_size=size)
    found = tpu_work.reads_others_writes(shape, jnp.asarray(table), jnp.asarray(lens))
    assert found.tolist() == [others != "reads none"]


@pytest.mark.slow
def test_a_row_that_ended_neither_writes_nor_reads():
    """Its tokens are packed still; its kv_len is 0."""
    case = fitting(Case(name="", query_lens=(1, 5, 1, 20), kv_lens=(40, 30, 18, 20), block_size=16))
    arrays = bucketed(arrays_of(case))
    before = arrays["pool"]
    out, _ = run(arrays, **static_of(case))
    assert np.isfinite(out).all()
    lens = arrays["kv_lens"].copy()
    lens[[1, 2]] = 0
    arrays["kv_lens"] = lens
    ended, pool = run(arrays, **static_of(case))
    expected = np.where(np.isin(np.arange(TOKENS), np.arange(1, 7))[:, None, None], 0, out)
    np.testing.assert_array_equal(ended, expected)
    owned = np.asarray(arrays["block_table"])[[1, 2], :2].reshape(-1)
    kept = np.asarray(pool)[owned]
    np.testing.assert_array_equal(kept, before[owned].reshape(kept.shape))


@pytest.mark.slow
def test_a_row_s_result_is_the_same_to_the_bit_in_any_company():
    """Alone, in another place, and beside rows whose keys and values are no numbers."""
    case = fitting(
        Case(name="", query_lens=(1, 20, 1, 33), kv_lens=(77, 150, 20, 40), block_size=16)
    )
    arrays = bucketed(arrays_of(case))
    out, _ = run(arrays, **static_of(case))
    tokens = slice(1, 21)
    assert np.isfinite(out).all()

    broken = dict(arrays)
    is_other = np.arange(TOKENS)
    is_other = ((is_other < 1) | (is_other >= 21))[:, None, None]
    broken["k"], broken["v"] = (
        np.where(is_other, np.float32(np.nan), arrays[name]) for name in "kv"
    )
    in_bad_company, _ = run(broken, **static_of(case))
    np.testing.assert_array_equal(in_bad_company[tokens], out[tokens])
    assert np.isnan(in_bad_company[[0, 21, 22]]).all()

    alone = arrays | {
        "block_table": np.roll(arrays["block_table"], 2, axis=0),
        "kv_lens": np.where(np.arange(ROWS) == 3, 150, 0).astype(np.int32),
        "query_starts": np.array([0, 0, 0, 7, 27, 27, 27], np.int32),
    }
    alone |= {name: np.roll(arrays[name], 6, axis=0) for name in ("q", "k", "v")}
    moved, _ = run(alone, **static_of(case))
    np.testing.assert_array_equal(moved[7:27], out[tokens])


SMALL_SIZES = tpu_layout.TileSizes(tile_rows=32, head_rows=64, tile_kv=128, tile_bytes=1 << 15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "sizes"), [(None, SMALL_SIZES), (400, tpu_layout.TileSizes(tile_kv=128))]
)
def test_tiles_of_which_every_query_sees_all(window, sizes):
    """They have no mask; with the window tiles before it and at its begin have other keys.

    With small sizes every row has several tiles; its sinks must still count once.
    """
    case = Case(name="", query_lens=(30, 1, 20), kv_lens=(700, 300, 530), window=window)
    check(fitting(case), arrays_of(fitting(case)), sinks=window is None, sizes=sizes)


@pytest.mark.slow
def test_larger_sizes_and_an_odd_number_of_heads():
    """Each head has eight rows of scales and zeros, four of them unused."""
    case = replace(case_of("mixed"), kv_lens=(700, 20, 1, 90, 100), num_heads=6, num_kv_heads=3)
    case = fitting(case, "int8")
    arrays = arrays_of(case)
    pool = to_tpu(arrays["pool"])
    assert isinstance(pool, QuantizedPool) and pool.scale_zero is not None
    assert pool.scale_zero.shape[1] == 3 * 8
    sizes = tpu_layout.TileSizes(tile_rows=512, tile_kv=2048, tile_bytes=4 << 20)
    check(case, arrays, sizes=sizes)


@pytest.mark.slow
@pytest.mark.parametrize(("format", "window"), [(None, 300), ("int8", None)])
def test_a_fetch_of_several_tiles_cuts_the_same_sums(format, window, monkeypatch):
    """Rows that end with a fetch, behind it, and within its last tile."""
    case = Case(name="", query_lens=(1,) * 3, kv_lens=(512, 1025, 500), window=window)
    case = replace(fitting(case, format), block_size=128 if format else 64)
    arrays = arrays_of(case)
    sizes = tpu_layout.TileSizes(tile_kv=128)
    given: dict[str, Any] = {"one_query_per_row": True, "sizes": sizes}
    shape = tpu_choose.shape_of(arrays["q"], to_tpu(arrays["pool"]), case.num_kv_heads, 18, **given)
    assert (shape.tile_kv, shape.tiles_of_fetch) == (128, 4)
    several = check(case, arrays, **given)
    monkeypatch.setattr(tpu_shape, "MOST_TILES", 1)
    program.cache_clear()
    alone, _ = run(arrays, **static_of(case) | given)
    program.cache_clear()
    # Of a CPU's code for scales and zeros XLA makes other multiply-adds in another program.
    np.testing.assert_allclose(several, alone, rtol=0, atol=1e-6 if format else 0)


@pytest.mark.slow
def test_one_query_per_row_is_that_whatever_the_starts_say():
    """As XLA's and the GPU's, which do not read them: a row without keys has a query too."""
    case = fitting(Case(name="", query_lens=(1,) * 4, kv_lens=(20, 1, 5, 33), block_size=16))
    arrays = bucketed(arrays_of(case), num_tokens=ROWS)
    static = static_of(case) | {"one_query_per_row": True}
    arrays["kv_lens"][1] = 0
    expected, expected_pool = run(arrays, **static)
    arrays["query_starts"] = np.array([0, 1, 1, 2, 3, 3, 3], np.int32)
    out, pool = run(arrays, **static)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(np.asarray(pool)[1:], np.asarray(expected_pool)[1:])
    assert (out[1] == 0).all() and (out[[0, 2, 3]] != 0).any(axis=(1, 2)).all()


def shapes(*, heads=(8, 2, 64), dtype=jnp.bfloat16, block_size=128, format=None):
    """Queries and a pool of 9 blocks; heads: H, K, D."""
    num_heads, num_kv_heads, head_dim = heads
    q = jax.ShapeDtypeStruct((1, num_heads, head_dim), dtype)
    width = 2 * num_kv_heads * head_dim // (2 if format == "int4" else 1)
    pool = jax.ShapeDtypeStruct((9, block_size, width), jnp.uint8 if format else dtype)
    if format is None:
        return q, pool
    rows = tpu_layout.scale_rows(num_kv_heads) * num_kv_heads
    scale_zero = jax.ShapeDtypeStruct((9, rows, block_size), dtype)
    return q, QuantizedPool(data=pool, scale_zero=scale_zero, format=format)


HEADS = [(8, 1, 128), (14, 2, 64), (32, 8, 128), (71, 1, 128), (128, 8, 128), (64, 64, 64)]
HEADS += [(32, 32, 96), (16, 16, 256), (32, 32, 256)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("format", [None, "int8", "int4"])
def test_no_candidate_takes_more_memory_than_there_is(heads, dtype, format):
    """Or the kernel says that it cannot serve; and programs with and without prompts cut sums at the same keys."""
    q, pool = shapes(heads=heads, dtype=jnp.dtype(dtype), format=format)
    for _, values in tune.CANDIDATES["tpu"]:
        for chosen in itertools.product(*values.values()):
            sizes = tpu_layout.TileSizes(**dict(zip(values, chosen, strict=True)))
            if reason := tpu_layout.unsupported_reason(q, pool, heads[1], (64, 256), sizes):
                assert "bytes" in reason and heads == (32, 32, 256) and dtype == "float32"
                continue
            of_kind = [
                tpu_choose.shape_of(q, pool, heads[1], 256, sizes=sizes, one_query_per_row=one)
                for one in (True, False)
            ]
            assert max(shape.vmem_bytes for shape in of_kind) <= tpu_layout.VMEM_BYTES
            assert len({shape.tile_kv for shape in of_kind}) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float16}, "queries are float16"),
        ({"pool": (9, 16, 2, 64)}, "where the last axis must be a multiple of 128"),
        ({"num_kv_heads": 1, "pool": (9, 16, 64), "head_dim": 32}, "multiple of 128"),
        ({"pool": (9, 8, 256)}, "at least 16 for this pool, not 8"),
        ({"pool": (9, 48, 256)}, "a power of two"),
        ({"pool": (9, 16384, 256)}, "one has 8388608"),
        ({"pool": (70000, 16, 256)}, "there are 70000 blocks"),
        ({"table": (256, 2048)}, "256 rows and 2048 blocks takes 1060416 bytes"),
        ({"table": (1 << 15, 1)}, "takes 1646592 bytes"),  # most of them are lists of rows
        ({"pool": (9, 64, 256), "format": "int8"}, "at least 128"),
        ({"pool": (9, 16, 65536), "num_kv_heads": 64, "head_dim": 512}, "bytes of VMEM"),
    ],
)
def test_it_says_why_it_cannot_serve(change, reason):
    given = dict(dtype=jnp.bfloat16, pool=(9, 16, 256), num_kv_heads=2, head_dim=64, table=(4, 8))
    given |= change
    pool, format = given["pool"], given.get("format")
    dtype = jnp.uint8 if format else jnp.bfloat16 if given["dtype"] == jnp.bfloat16 else jnp.float16
    array = jax.ShapeDtypeStruct(pool, dtype)
    if format:
        array = QuantizedPool(data=array, scale_zero=array, format=format)
    q = jax.ShapeDtypeStruct((4, 2 * given["num_kv_heads"], given["head_dim"]), given["dtype"])
    why = tpu_layout.unsupported_reason(q, array, given["num_kv_heads"], given["table"])
    assert why is not None and reason in why
