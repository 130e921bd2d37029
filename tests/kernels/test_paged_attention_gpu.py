"""The Mosaic GPU kernels of paged attention against the definition: interpreted anywhere, and for real with `-m gpu`.

With a jax that is not of `hopper.JAX_VERSIONS` there is nothing to collect; CI has an environment for it. The
interpreter checks every access against its buffer, fills fresh memory with NaN, and detects races.

On a GPU the kernels run in a process of their own, `python -m tests.kernels.test_paged_attention_gpu CHECK...`, and
one that crashes or never ends costs its own check only: the next has a new process. So one run tells all.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hopper
from pallas_kernels.hopper import unsupported_jax
from pallas_kernels.kv_write.latents import LatentPool
from pallas_kernels.kv_write.parts import PoolPart
from pallas_kernels.kv_write.quantized import FORMATS, QuantizedPool, quantize
from pallas_kernels.paged_attention import cases, gpu, gpu_combine, gpu_layout, gpu_prompts
from pallas_kernels.paged_attention.cases import Case
from tests.kernels.paged_attention import PagedAttentionTests, dense_attention, run

__test__ = unsupported_jax() is None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("fast_compiler"),
    # The interpreter multiplies with NumPy, and NaN stands in every slot of K beyond a row's length.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),
]

SMALL = partial(Case, head_dim=64, dtype="bfloat16")
DECODE = (
    SMALL(
        name="block-edges",
        query_lens=(1,) * 9,
        kv_lens=(1, 15, 16, 17, 63, 64, 65, 128, 0),
    ),
    SMALL(name="parts", query_lens=(1,) * 4, kv_lens=(511, 512, 513, 1100), block_size=32),
    SMALL(name="window", query_lens=(1,) * 4, kv_lens=(5, 20, 530, 200), window=20),
    SMALL(name="soft-cap", query_lens=(1,) * 2, kv_lens=(40, 130), soft_cap=5.0, block_size=8),
    SMALL(
        name="mqa-head-dim-96-float16",
        query_lens=(1,) * 2,
        kv_lens=(70, 530),
        num_heads=9,
        num_kv_heads=1,
        head_dim=96,
        dtype="float16",
    ),
    SMALL(name="head-dim-128", query_lens=(1,), kv_lens=(70,), head_dim=128, block_size=64),
    SMALL(name="head-dim-256", query_lens=(1,), kv_lens=(70,), head_dim=256, block_size=128),
    SMALL(
        name="head-dim-512",
        query_lens=(1,) * 3,
        kv_lens=(70, 530, 0),
        head_dim=512,
        num_heads=16,
        num_kv_heads=2,
    ),
    SMALL(name="window-of-parts", query_lens=(1,) * 2, kv_lens=(1300, 40), window=600),
    SMALL(name="sinks", query_lens=(1,) * 3, kv_lens=(530, 1, 0), num_heads=6, sinks=True),
)
# Besides the operation's cases.
MIXED = (
    SMALL(
        name="mixed-with-padding",
        query_lens=(1, 70, 0, 3, 1),
        kv_lens=(33, 200, 0, 90, 1),
        num_padding_tokens=70,
    ),
    SMALL(
        name="fewer-tokens-than-rows",
        query_lens=(0, 1, 0, 0, 2, 0, 0, 1, 0),
        kv_lens=(0, 40, 0, 0, 30, 0, 0, 5, 0),
        num_padding_tokens=1,
    ),
    SMALL(name="window-of-tiles", query_lens=(7, 1, 150, 1), kv_lens=(150, 200, 400, 8), window=40),
    SMALL(
        name="group-of-three-soft-cap",
        query_lens=(50,),
        kv_lens=(140,),
        num_heads=3,
        num_kv_heads=1,
        soft_cap=5.0,
        block_size=64,
    ),
    SMALL(
        name="mqa-head-dim-96-float16",
        query_lens=(1, 5),
        kv_lens=(20, 130),
        num_heads=8,
        num_kv_heads=1,
        head_dim=96,
        dtype="float16",
    ),
    SMALL(name="mha-head-dim-256", query_lens=(5, 6), kv_lens=(130, 6), head_dim=256, num_heads=2),
    SMALL(
        name="head-dim-512",
        query_lens=(1, 40),
        kv_lens=(70, 140),
        head_dim=512,
        num_heads=4,
        sinks=True,
    ),
    SMALL(name="sinks-of-parts", query_lens=(1, 5, 1), kv_lens=(530, 70, 1), sinks=True),
)
QUANTISED = tuple(
    SMALL(
        name=f"{format}-{dtype}",
        query_lens=(1, 20, 0),
        kv_lens=(80, 140, 0),
        window=100,
        format=format,
        head_dim=128 if format == "int4" else 64,
        dtype=dtype,
    )
    for format, dtype in (*((each, "bfloat16") for each in FORMATS), ("int8", "float16"))
)


def interpreter(**options):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(**options)


def fitted(case: Case) -> Case:
    """With the least head dim and block size that the kernels take, in bfloat16 or float16."""
    head_dim = min(n for n in gpu_layout.HEAD_DIMS if n >= case.head_dim)
    if case.format == "int4":
        head_dim = max(head_dim, 128)
    return replace(
        case,
        head_dim=head_dim,
        block_size=max(8, case.block_size),
        dtype="float16" if case.dtype == "float16" else "bfloat16",
    )


class Hopper(PagedAttentionTests):
    cases = (*map(fitted, cases.SMALL), *MIXED, *QUANTISED)
    test_quantised_pools_are_read_alike = None  # they are among the cases

    def fitted(self, case):
        return fitted(case)

    def compare(self, case, result, want):
        """2-byte products and probabilities: 5e-3 of the norm."""
        np.testing.assert_allclose(result, want, atol=4e-2)
        assert np.linalg.norm(result - want) <= 5e-3 * np.linalg.norm(want)

    def attend(self, case, arguments, **options):
        return run(gpu.paged_attention, arguments, **options)

    @pytest.mark.parametrize("decode", DECODE, ids=lambda c: c.name)
    def test_rows_with_one_query(self, decode):
        self.check(decoding(decode), one_query_per_row=True)


# What MIXED does not have: the interpreter takes many seconds for each. On a GPU all run.
_OF_THE_OPERATION = ("nothing", "sinks-of-a-window")


class TestInterpreted(Hopper):
    cases = (
        *(fitted(case) for case in cases.SMALL if case.name in _OF_THE_OPERATION),
        *MIXED,
        *QUANTISED,
    )
    test_one_query_per_row_is_the_same = None  # DECODE has such rows

    def attend(self, case, arguments, **options):
        options = dict(interpret=interpreter()) | options
        with pytest.MonkeyPatch.context() as patch:
            if max(case.query_lens) > 1 and 1 not in case.query_lens:
                without_rows_of_one_query(patch)
            return run(gpu.paged_attention, arguments, **options)


def without_rows_of_one_query(patch: pytest.MonkeyPatch) -> None:
    """Leaves out the kernels for these, where there are none: compiling their interpretation takes seconds."""
    patch.setattr(gpu, "decode", lambda q, *_, **__: jnp.zeros_like(q))


def decoding(case: Case) -> Case:
    """With a query for each row, also for those without keys, as a step that only decodes has them."""
    lens = tuple(int(n > 0) for n in case.kv_lens)
    return replace(case, query_lens=lens, num_padding_tokens=len(lens) - sum(lens))


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_small_weights_keep_their_bits_in_float16(format):
    """Of a first key that takes nearly all weight and has no value, as in trained models."""
    head_dim = 128 if format == "int4" else 64
    case = Case(
        name="",
        query_lens=(1, 8),
        kv_lens=(300, 300),
        num_heads=2,
        num_kv_heads=2,
        head_dim=head_dim,
        block_size=64,
        dtype="float16",
    )
    arguments = cases.arguments(case, poison=False)
    pool = np.asarray(arguments["pool"], np.float32)
    for first in arguments["block_table"][:, 0]:
        pool[first, 0, 0::2], pool[first, 0, 1::2] = 11 * head_dim**-0.5, 0.0
    data, scale_zero = quantize(jnp.asarray(pool, jnp.float16), format, jnp.bfloat16)
    arguments |= {
        "q": jnp.ones_like(arguments["q"]),
        "pool": QuantizedPool(data=data, scale_zero=scale_zero, format=format),
    }
    result = run(gpu.paged_attention, arguments, interpret=interpreter())
    want = dense_attention(case, arguments)
    for row in (slice(0, 1), slice(1, 9)):
        assert np.linalg.norm((result - want)[row]) <= 1e-3 * np.linalg.norm(want[row])


@pytest.fixture
def detecting_races(monkeypatch, capsys):
    """An interpreter. wgmma reads as a load would."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    wgmma = gpu_callbacks.wgmma

    def checked(**operands):  # the interpreter's own leaves wgmma out when it looks for races
        where = {k: operands[k] for k in ("token", "mesh_location", "thread", "source_info")}
        for side in "ab":
            key, transforms = (
                operands[f"{side}_{what}"] for what in ("allocation_key_as_array", "transforms")
            )
            gpu_callbacks._get(allocation_key_as_array=key, transforms=transforms, **where)
        # Unlike a load's, what wgmma has read may be copied over without a fence.
        gpu_callbacks._get_shared_memory().commit_smem(operands["thread"])
        return wgmma(**operands)

    monkeypatch.setattr(gpu_callbacks, "wgmma", checked)
    yield interpreter(detect_races=True)
    # Not `get_races().races_found`, which knows the last kernel only.
    assert "RACE DETECTED" not in capsys.readouterr().out


def divided(monkeypatch, **division: int) -> None:
    """Rows with one query."""
    of_any = gpu_layout.Division(**division)
    monkeypatch.setattr(gpu_layout.Division, "of", lambda rows, columns: of_any)


@pytest.mark.parametrize(
    "options",
    [
        {"format": "int8", "head_dim": 128},
        {"head_dim": 192},
        {"head_dim": 256},
        {"head_dim": 512},
        {"window": None},
    ],
    ids=str,
)
def test_no_two_warpgroups_touch_the_same_memory_unordered(options, monkeypatch, detecting_races):
    """More tiles than stages, items of several parts, all kernels, much for one program."""
    divided(monkeypatch, keys=128, parts=3)
    monkeypatch.setattr(gpu_layout, "ENOUGH_GROUPS", 1)
    monkeypatch.setattr(hopper, "num_sms", lambda: 1)
    monkeypatch.setattr(gpu_layout, "CUT_KEYS", 128)
    monkeypatch.setattr(gpu_combine, "_num_stages", lambda columns: 1)
    case = SMALL(name="", query_lens=(1, 70, 1), kv_lens=(500, 400, 40), window=450)
    case = replace(case, **options)
    sizes = gpu_layout.TileSizes(programs_per_sm=4)  # and so fewer stages
    TestInterpreted().check(case, sizes=sizes, interpret=detecting_races)


@pytest.mark.parametrize(
    ("options", "programs"),
    [
        ({}, 1),
        ({}, 3),
        ({"format": "int8", "head_dim": 128}, 2),
        ({"head_dim": 256, "window": 300}, 1),
        ({"head_dim": 512}, 1),
        ({"head_dim": 192, "num_heads": 9, "num_kv_heads": 1, "value_dim": 128}, 3),
    ],
    ids=str,
)
def test_items_of_a_program_share_its_stages(options, programs, monkeypatch, detecting_races):
    """Items of several parts: with no tile, fewer than stages, as many, and, except in the first case, more.

    `value_dim`: of latents.
    """
    value_dim = options.get("value_dim")
    options = {k: v for k, v in options.items() if k != "value_dim"}
    divided(monkeypatch, keys=128, parts=4)
    monkeypatch.setattr(gpu_layout, "ENOUGH_GROUPS", 1)
    monkeypatch.setattr(hopper, "num_sms", lambda: 1)
    sizes = gpu_layout.TileSizes(programs_per_sm=programs)
    kv_lens = (30, 500, 64, 65, 520, 1, 260, 129, 0, 0)
    case = SMALL(name="", query_lens=(1,) * len(kv_lens), kv_lens=kv_lens)
    case = decoding(replace(case, **options))
    arguments = cases.arguments(case)
    if value_dim is None:
        want = dense_attention(case, arguments)
    else:
        arguments, want = of_latents(case, arguments, value_dim)
    order = np.asarray((8, 0, 1, 9, *range(2, 8)))  # those without keys among the others
    ordered = arguments | {k: arguments[k][order] for k in ("q", "block_table", "kv_lens")}
    how = dict(one_query_per_row=True, sizes=sizes, interpret=detecting_races)
    result = run(gpu.paged_attention, ordered, **how)[np.argsort(order)]
    TestInterpreted().compare(case, result[:8], want)
    assert not result[8:].any()


def of_latents(case: Case, arguments: dict, value_dim: int) -> tuple[dict, np.ndarray]:
    """The arguments with the keys of the pool as latents, and NumPy's result, whose pool has each key as the value
    too.
    """
    keys = arguments["pool"][:, :, 0]
    doubled = arguments | {"pool": jnp.repeat(keys[:, :, None], 2, axis=2)}
    want = dense_attention(case, doubled)[..., :value_dim]
    return arguments | {"pool": LatentPool(keys, value_dim)}, want


def alone_in(arguments: dict, case: Case, row: int, first: int, last: int) -> dict:
    """The arguments of a row with the queries from first to before last, in a table no wider than its keys."""
    width = -(-case.kv_lens[row] // case.block_size)
    return arguments | {
        "q": arguments["q"][first:last],
        "block_table": arguments["block_table"][row : row + 1, :width],
        "kv_lens": arguments["kv_lens"][row : row + 1],
        "query_starts": jnp.asarray([0, last - first], jnp.int32),
    }


def test_a_row_does_not_depend_on_its_batch_or_the_number_of_sms(monkeypatch):
    """Bit for bit: alone in a narrow table with a program for each tile, and among others in a wide one, by programs
    with several rows each.
    """
    case = SMALL(name="", query_lens=(1, 1, 20), kv_lens=(600, 30, 90))
    arguments = cases.arguments(case)
    with monkeypatch.context() as patch:
        patch.setattr(hopper, "num_sms", lambda: 1)
        together = run(gpu.paged_attention, arguments, interpret=interpreter())
    for row, first, last in ((0, 0, 1), (1, 1, 2), (2, 2, 22)):
        alone = alone_in(arguments, case, row, first, last)
        result = run(gpu.paged_attention, alone, interpret=interpreter())
        np.testing.assert_array_equal(result, together[first:last])


@pytest.mark.parametrize(
    "options",
    [
        {"window": 700},
        {"format": "int8", "head_dim": 128, "sinks": True},
        {"head_dim": 96, "num_heads": 3, "num_kv_heads": 1},
    ],
    ids=str,
)
def test_groups_of_parts_are_added_up_alike_by_one_program_and_by_many(options, monkeypatch):
    """Bit for bit. Rows of several groups, of one, and without keys; groups of one part and of several."""
    divided(monkeypatch, keys=128, parts=3)
    case = SMALL(name="", query_lens=(1,) * 5, kv_lens=(1024, 50, 385, 800, 0), block_size=32)
    case = decoding(replace(case, **options))
    arguments = cases.arguments(case)
    results = []
    for enough in (1, 1 << 30):
        monkeypatch.setattr(gpu_layout, "ENOUGH_GROUPS", enough)
        how = dict(one_query_per_row=True, interpret=interpreter())
        results.append(run(gpu.paged_attention, arguments, **how))
    np.testing.assert_array_equal(*results)
    Hopper().compare(case, results[0][:4], dense_attention(case, arguments))


def test_a_query_without_keys_gives_zeros_among_others():
    """As that of a sequence which has ended on the device, before the host knows it."""
    case = SMALL(name="", query_lens=(1, 3, 0), kv_lens=(20, 30, 0), block_size=8)
    arguments = cases.arguments(case)
    want = dense_attention(case, arguments)
    arguments |= {"kv_lens": jnp.asarray([0, 30, 0], jnp.int32)}
    result = run(gpu.paged_attention, arguments, interpret=interpreter())
    assert not result[:1].any()
    np.testing.assert_allclose(result[1:], want[1:], atol=4e-2)


# Rows of 3, 2 and no parts, two of one part, and padding.
FEW_QUERIES = SMALL(
    name="",
    query_lens=(3, 1, 40, 0, 20),
    kv_lens=(400, 200, 300, 0, 100),
    num_padding_tokens=5,
    sinks=True,
)


@pytest.mark.parametrize(
    "options",
    [
        {"format": "int8"},
        {"head_dim": 256, "num_heads": 3, "num_kv_heads": 1},
        {"head_dim": 512, "num_heads": 3, "num_kv_heads": 1},
    ],
    ids=str,
)
def test_few_queries_see_all_parts_of_their_keys(options, monkeypatch):
    monkeypatch.setattr(gpu_layout, "CUT_KEYS", 128)
    TestInterpreted().check(replace(FEW_QUERIES, **options))


def test_a_row_that_is_cut_does_not_depend_on_its_batch(monkeypatch):
    """Bit for bit: among others at once, when rows take turns and one SM does everything, and alone."""
    without_rows_of_one_query(monkeypatch)
    monkeypatch.setattr(gpu_layout, "CUT_KEYS", 128)
    # Rows of 3, 2 and no parts: in turns of one row the last turn has nothing to do.
    case = SMALL(name="", query_lens=(3, 40, 20), kv_lens=(400, 300, 100), sinks=True)
    # With padding a row's queries are at the same places of a tile as alone: some CPUs compute products by place.
    case = replace(case, num_heads=2, num_kv_heads=1, num_padding_tokens=40)
    arguments = cases.arguments(case)
    together = run(gpu.paged_attention, arguments, interpret=interpreter())
    TestInterpreted().compare(case, together[:63], dense_attention(case, arguments))
    with monkeypatch.context() as patch:
        patch.setattr(hopper, "num_sms", lambda: 1)
        patch.setattr(gpu_layout, "PARTS_BYTES", 1)
        for few_turns in (1, len(case.query_lens)):  # in a loop, and one after the other
            patch.setattr(gpu_prompts, "FEW_TURNS", few_turns)
            in_turns = run(gpu.paged_attention, arguments, interpret=interpreter())
            np.testing.assert_array_equal(in_turns, together)
    # Both rows by one program, whose table is no wider than the first one's keys.
    static = {k: arguments[k] for k in ("scale", "window", "soft_cap")}
    attend = jax.jit(partial(gpu.paged_attention, **static, interpret=interpreter()))
    for row, first, last in ((0, 0, 3), (1, 3, 43)):
        alone = {
            k: v for k, v in alone_in(arguments, case, row, first, last).items() if k not in static
        }
        alone["block_table"] = arguments["block_table"][row : row + 1, : 400 // case.block_size]
        alone["q"] = jnp.pad(alone["q"], ((0, 40 - (last - first)), (0, 0), (0, 0)))
        result = np.asarray(attend(**alone), np.float64)[: last - first]
        np.testing.assert_array_equal(result, together[first:last])


def test_parts_of_cut_tiles_are_all_their_keys_once_and_depend_on_the_row_alone():
    tile_q, num_kv_heads = 32, 8
    query_lens = np.asarray((100, 1, 0, 20, 2000, 9, 33), np.int32)
    kv_lens = np.asarray((32768, 9000, 0, 1500, 9000, 2048, 5001), np.int32)
    starts = np.cumsum((0, *query_lens)).astype(np.int32)
    sizes = (int(starts[-1]), 32768, tile_q, num_kv_heads, 128, None)
    cuts = gpu_layout.Cuts.of(len(kv_lens), *sizes)
    assert cuts is not None
    parts = cuts.parts(jnp.asarray(query_lens), jnp.asarray(kv_lens))
    # 128 / (4 tiles * 8 heads), one query, nothing, too few keys, too many tiles, keys for two, for four
    assert parts.tolist() == [4, 0, 0, 0, 0, 2, 4]
    row = jnp.asarray([0, 5, 6, 7], jnp.int32)  # and none
    tiles = gpu_layout.cut_tiles(cuts, row, parts, jnp.asarray(starts), jnp.asarray(kv_lens))
    number = int(tiles.number[0])
    assert tiles.count[:number].tolist() == [32, 32, 32, 4, 9, 32, 1]
    assert not tiles.count[number:].any()
    assert tiles.parts.number.tolist() == [tiles.starts[-1]] == [4 * 4 + 2 + 2 * 4]
    for tile in range(number):
        mine = slice(int(tiles.starts[tile]), int(tiles.starts[tile + 1]))
        (r,) = set(tiles.parts.row[mine].tolist())
        assert set(tiles.parts.token[mine].tolist()) == {int(tiles.token[tile])}
        assert set(tiles.parts.count[mine].tolist()) == {int(tiles.count[tile])}
        position = int(kv_lens[r] - query_lens[r] + tiles.token[tile] - starts[r])
        assert set(tiles.parts.position[mine].tolist()) == {position}
        low, high = tiles.parts.low[mine].tolist(), tiles.parts.high[mine].tolist()
        assert low == [0, *high[:-1]] and high[-1] >= kv_lens[r]
        assert not any(each % 128 for each in low)


def test_no_row_is_cut_where_tables_are_short_or_windows_leave_keys_behind():
    for num_keys, head_dim, window in ((2047, 128, None), (9000, 96, None), (9000, 128, 4096)):
        assert gpu_layout.Cuts.of(4, 100, num_keys, 32, 8, head_dim, window) is None
    assert gpu_layout.Cuts.of(4, 100, 2048, 32, 8, 128, None) is not None


@pytest.mark.parametrize("window", [None, 1, 100])
def test_query_tiles_are_all_queries_but_single_ones_and_the_longest_come_first(window):
    query_lens, padding, tile_q = (1, 70, 0, 32, 3), 5, 32
    kv_lens = np.asarray((33, 200, 0, 32, 90), np.int32)
    starts = np.cumsum((0, *query_lens)).astype(np.int32)
    num_tokens = starts[-1] + padding
    number, *lists, low, high = gpu_layout.query_tiles(
        jnp.asarray(starts), jnp.asarray(kv_lens), int(num_tokens), tile_q, window
    )
    assert low is None and high is None  # nothing is cut
    tiles = np.stack([np.asarray(x) for x in lists], axis=1)[: int(number[0])]
    assert lists[0].size >= len(tiles) == 3 + 1 + 1 + 1
    covered, lengths = [], []
    for row, token, count, position, begin, end in tiles.tolist():
        covered += range(token, token + count)
        if row == len(query_lens):  # of padding: before everything
            assert position + count <= 0
            lengths.append(0)
            continue
        assert end == kv_lens[row] and 0 < count <= tile_q
        assert position - (token - starts[row]) == kv_lens[row] - query_lens[row]
        oldest = kv_lens[row] - query_lens[row]
        assert begin == (0 if window is None else max(0, oldest - window + 1))
        lengths.append(min(position + count, (window or position) + count))
    assert sorted(covered) == list(range(1, num_tokens))  # all but the first row's
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype="float32"), "q is float32 and the pool float32; they must be bfloat16"),
        (dict(head_dim=80), "head dim 80 is none of"),
        (dict(block_size=4), "block size 4 is neither"),
        (dict(block_size=192), "block size 192 is neither"),  # a tile of 128 would cross blocks
        (dict(num_heads=128, num_kv_heads=1), "128 query heads per KV head are more than 64"),
        (
            dict(head_dim=512, num_heads=34, num_kv_heads=1),
            "34 query heads per KV head are more than 32",
        ),
        (dict(format="int8", num_kv_heads=1), "1 KV heads are odd"),
        (dict(format="int4", head_dim=96), "head dim 96 in int4 does not fit"),
        (dict(format="int4", head_dim=64), "head dim 64 in int4 does not fit"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_what_the_kernels_cannot_do_they_refuse_with_the_reason(change, reason):
    arguments = cases.arguments(replace(DECODE[0], query_lens=(1,), kv_lens=(3,), **change))
    with pytest.raises(NotImplementedError, match=reason):
        gpu.paged_attention(**arguments)


@pytest.mark.parametrize(
    ("width", "value_dim", "num_heads", "reason"),
    [
        (576, 512, 16, None),
        (600, 512, 16, "latents of 600 columns are no multiple of 64 up to 576"),
        (576, 64, 16, "values of 64 columns, of latents of 576, are no multiple of 128 up to 512"),
        (576, 512, 20, "20 query heads that read one latent are more than 16"),
    ],
)
def test_latents_that_the_kernel_cannot_read_are_named(width, value_dim, num_heads, reason):
    pool = LatentPool(jax.ShapeDtypeStruct((9, 64, width), jnp.bfloat16), value_dim)
    q = jax.ShapeDtypeStruct((1, num_heads, width), jnp.bfloat16)
    found = gpu_layout.unsupported_reason(q, pool)
    assert found is None if reason is None else str(found).startswith(reason)


def test_rows_take_turns_where_their_parts_would_be_too_many(monkeypatch):
    """Bit for bit what they are at once; and more parts than the last kernel has stages."""
    divided(monkeypatch, keys=128, parts=2)
    case = SMALL(name="", query_lens=(1,) * 5, kv_lens=(255, 10, 700, 520, 3), block_size=32)
    case = replace(case, num_heads=2, num_kv_heads=1)
    arguments = cases.arguments(case)
    options = dict(one_query_per_row=True, interpret=interpreter())
    at_once = run(gpu.paged_attention, arguments, **options)
    Hopper().compare(case, at_once, dense_attention(case, arguments))
    bytes_per_row = 4 * 64 * 8 * 3  # D, G as wgmma pads it, groups of the table's 24 blocks
    monkeypatch.setattr(gpu_layout, "PARTS_BYTES", 2 * bytes_per_row)
    assert gpu_layout.rows_at_once(5, bytes_per_row) == 2
    monkeypatch.setattr(gpu_combine, "_num_stages", lambda columns: 2)
    np.testing.assert_array_equal(run(gpu.paged_attention, arguments, **options), at_once)


LATENT = partial(Case, num_kv_heads=1, dtype="bfloat16")
# By name a case, and how many columns of its latents are values.
LATENTS = {
    "decode": (LATENT(name="", query_lens=(1,) * 4, kv_lens=(70, 1, 600, 0), head_dim=192), 128),
    "decode-16": (
        LATENT(name="", query_lens=(1, 1), kv_lens=(70, 530), num_heads=16, head_dim=576),
        512,
    ),
    "decode-9-float16": (
        LATENT(
            name="",
            query_lens=(1,),
            kv_lens=(200,),
            num_heads=9,
            head_dim=576,
            block_size=128,
            dtype="float16",
        ),
        512,
    ),
    "mixed": (
        LATENT(
            name="",
            query_lens=(1, 5, 0, 1),
            kv_lens=(130, 40, 0, 64),
            num_heads=2,
            head_dim=192,
            block_size=64,
            num_padding_tokens=3,
        ),
        128,
    ),
    "mixed-window-sinks": (
        LATENT(
            name="",
            query_lens=(1, 40, 1),
            kv_lens=(600, 90, 64),
            num_heads=2,
            head_dim=192,
            window=70,
            sinks=True,
        ),
        128,
    ),
}


def check_latents(name: str, **options: Any) -> None:
    """Against NumPy; of a poisoned pool. No value depends on the batch."""
    case, value_dim = LATENTS[name]
    if name.startswith("decode"):
        case, options = decoding(case), options | {"one_query_per_row": True}
    given, want = of_latents(case, made_on_the_host(case), value_dim)
    result = run(gpu.paged_attention, given, **options)
    assert result.shape == (*given["q"].shape[:2], value_dim) and np.isfinite(result).all()
    num_tokens = sum(case.query_lens)
    Hopper().compare(case, result[:num_tokens], want)
    # Rows before the longest have one query each. Beside a prompt it gives what it gives in a decode step.
    row = int(np.argmax(case.kv_lens))
    alone = alone_in(given, case, row, row, row + 1)
    options |= {"one_query_per_row": True}
    got = run(gpu.paged_attention, alone, **options)
    np.testing.assert_array_equal(got, result[row : row + 1])


@pytest.mark.parametrize("name", LATENTS)
def test_latents_of_rows_with_one_query(name):
    check_latents(name, interpret=interpreter())


def made_on_the_host(case: Case) -> dict:
    """The arguments, without the many small programs that make them: compiling these for a GPU takes seconds."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        arguments = cases.arguments(case)

    def put(x):
        return jax.device_put(x, jax.devices()[0]) if isinstance(x, jax.Array) else x

    return jax.tree.map(put, arguments)


def check_on_gpu(case: Case, **options) -> None:
    """As compiled: probabilities in registers, accumulators that begin at a value, approximate exp2 and division.

    Twice, the second result the first, bit for bit.
    """
    arguments = made_on_the_host(case)
    static = {k: arguments.pop(k) for k in ("scale", "window", "soft_cap")}
    attend = jax.jit(partial(gpu.paged_attention, **static, **options))
    result = np.asarray(attend(**arguments), np.float64)
    assert np.isfinite(result).all()
    num_tokens = sum(case.query_lens)
    Hopper().compare(case, result[:num_tokens], dense_attention(case, arguments | static))
    np.testing.assert_array_equal(np.asarray(attend(**arguments), np.float64), result)


DECODE_OF_A_PART = next(case for case in DECODE if case.name == "head-dim-512")
PROMPTS_OF_A_PART = next(case for case in MIXED if case.name == "head-dim-512")


def as_part(own: jax.Array, index: int) -> PoolPart:
    """A layer's pool as part number `index` of two, in an array of heads half as large; NaN in the other part."""
    num_blocks, block_size, columns, head_dim = own.shape
    shared = jnp.full((num_blocks, block_size, 4 * columns, head_dim // 2), jnp.nan, own.dtype)
    pool = PoolPart(shared, columns // 2, 2, index)
    pieces = own.reshape(num_blocks, block_size, 2 * columns, head_dim // 2)
    return replace(pool, pool=shared.at[:, :, pool.places(2)].set(pieces))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    "case", [decoding(DECODE_OF_A_PART), PROMPTS_OF_A_PART], ids=("decode", "prompts")
)
def test_a_part_of_a_pool_reads_like_a_pool(case, index):
    """Bit for bit."""
    arguments, decodes = cases.arguments(case), max(case.query_lens) == 1
    how = dict(one_query_per_row=decodes, interpret=interpreter())
    want = run(gpu.paged_attention, arguments, **how)
    part = as_part(arguments["pool"], index)
    result = run(gpu.paged_attention, arguments | {"pool": part}, **how)
    np.testing.assert_array_equal(result, want)


def check_part_on_gpu(case: Case, **options: Any) -> None:
    arguments = made_on_the_host(decoding(case) if options else case)
    want = run(gpu.paged_attention, arguments, **options)
    for index in (0, 1):
        part = arguments | {"pool": as_part(arguments["pool"], index)}
        np.testing.assert_array_equal(run(gpu.paged_attention, part, **options), want)


# Keys: 79 parts, of which the last kernel of a decode step has 16 in its stages.
LONG = 20_000


def check_repeats_on_gpu() -> None:
    """The same bits 200 times, of long rows and short ones, with more or fewer other launches just before."""
    lens = (LONG, 30, 900, 513, LONG)
    case = SMALL(name="", query_lens=(1, 1, 40, 1, 25), kv_lens=lens, head_dim=128)
    arguments, others = (made_on_the_host(each) for each in (case, of_a_model(1, 16, 2)))
    static = ("scale", "window", "soft_cap", "one_query_per_row")
    attend = jax.jit(gpu.paged_attention, static_argnames=static)
    first = np.asarray(attend(**arguments).astype(jnp.float32))
    for i in range(200):
        for _ in range(i % 4):
            attend(**others, one_query_per_row=True)
        result = np.asarray(attend(**arguments).astype(jnp.float32))
        np.testing.assert_array_equal(result, first)


def check_alone_on_gpu() -> None:
    """Each row alone in a narrow table gives what it gives among the others."""
    case = SMALL(name="", query_lens=(1, 1, 20, 1, 25), kv_lens=(LONG, 30, 90, 513, LONG))
    arguments = made_on_the_host(case)
    together = run(gpu.paged_attention, arguments)
    starts = np.cumsum((0, *case.query_lens))
    for row, (first, last) in enumerate(zip(starts, starts[1:], strict=False)):
        alone = alone_in(arguments, case, row, first, last)
        np.testing.assert_array_equal(run(gpu.paged_attention, alone), together[first:last])


def check_turns_on_gpu() -> None:
    case = SMALL(name="", query_lens=(1,) * 40, kv_lens=tuple(range(3, 6003, 150)), head_dim=128)
    gpu_layout.PARTS_BYTES = 1 << 18  # of 1 MB
    check_on_gpu(case, one_query_per_row=True)


def check_groups_on_gpu(**options: Any) -> None:
    """Rows among many, whose parts one program adds up, give what they give alone, where `gpu_combine.py` does."""
    case = replace(of_a_model(1, 16, 2), **options)
    arguments = made_on_the_host(case)
    together = run(gpu.paged_attention, arguments, one_query_per_row=True)
    by_row = ("q", "block_table", "kv_lens")
    for row in range(0, len(case.kv_lens), 4):
        alone = arguments | {k: arguments[k][row : row + 1] for k in by_row}
        result = run(gpu.paged_attention, alone, one_query_per_row=True)
        np.testing.assert_array_equal(result, together[row : row + 1])


def of_a_model(query_len: int, heads: int, kv_heads: int, **options: Any) -> Case:
    """Enough groups of parts for all SMs; or prompts, of which NumPy computes a few: see `with_few_programs`."""
    step = 1000 if query_len > 1 else 30 * kv_heads
    lens = tuple(range(300, 4300, step))
    options = {"head_dim": 128, "num_heads": heads, "num_kv_heads": kv_heads, **options}
    return SMALL(name="", query_lens=(query_len,) * len(lens), kv_lens=lens, **options)


def with_few_programs(case: Case) -> None:
    """Many tiles for each of them."""
    every_sm, hopper.num_sms = hopper.num_sms, lambda: 8
    try:
        check_on_gpu(case)
    finally:
        hopper.num_sms = every_sm


SIZES = gpu_layout.TileSizes(tile_kv=64, stages=3, programs_per_sm=2)
# The simplest first: where everything fails these tell most.
ON_GPU: dict[str, Callable[[], None]] = {
    **{
        f"decode-{case.name}": partial(check_on_gpu, decoding(case), one_query_per_row=True)
        for case in DECODE
    },
    **{f"mixed-{case.name}": partial(check_on_gpu, case) for case in Hopper.cases},
    **{f"latents-{name}": partial(check_latents, name) for name in LATENTS},
    "alone": check_alone_on_gpu,
    "long-row": partial(
        check_on_gpu,
        SMALL(name="", query_lens=(1, 1), kv_lens=(LONG, 8193), head_dim=128, block_size=64),
        one_query_per_row=True,
    ),
    "longest-row": partial(
        check_on_gpu,
        SMALL(name="", query_lens=(1, 1), kv_lens=(70_001, 700), block_size=64),
        one_query_per_row=True,
    ),
    "long-rows-and-prompts": partial(
        check_on_gpu, SMALL(name="", query_lens=(1, 9, 1), kv_lens=(LONG, 9000, 40), sinks=True)
    ),
    **{
        f"few-queries-{name}": partial(
            check_on_gpu,
            SMALL(name="", query_lens=(100, 1, 9), kv_lens=(LONG, 40, 5000), **options),
        )
        for name, options in {
            "128": dict(head_dim=128, num_heads=8),
            "256": dict(head_dim=256, sinks=True),
            "512": dict(head_dim=512, sinks=True),
            "int8": dict(format="int8"),
            "192": dict(head_dim=192),
            "group-of-three": dict(num_heads=3, num_kv_heads=1),
            "group-of-seven": dict(num_heads=14, num_kv_heads=2, head_dim=128),
        }.items()
    },
    "repeats": check_repeats_on_gpu,
    "turns": check_turns_on_gpu,
    **{
        f"groups-{name}": partial(check_groups_on_gpu, **options)
        for name, options in {
            "128": {},
            "96": dict(head_dim=96, sinks=True),
            "window": dict(window=3000),
            "int8": dict(format="int8"),
        }.items()
    },
    "other-sizes": partial(check_on_gpu, MIXED[0], sizes=SIZES),
    "model-decode-16-2": partial(check_on_gpu, of_a_model(1, 16, 2), one_query_per_row=True),
    "model-decode-32-8": partial(check_on_gpu, of_a_model(1, 32, 8), one_query_per_row=True),
    "model-prompts-16-2": partial(with_few_programs, of_a_model(300, 16, 2)),
    "model-prompts-32-8": partial(with_few_programs, of_a_model(300, 32, 8)),
    "model-prompts-192": partial(with_few_programs, of_a_model(130, 16, 2, head_dim=192)),
    "model-prompts-256": partial(with_few_programs, of_a_model(130, 16, 2, head_dim=256)),
    "model-prompts-512": partial(with_few_programs, of_a_model(130, 16, 2, head_dim=512)),
    "part-decode": partial(check_part_on_gpu, DECODE_OF_A_PART, one_query_per_row=True),
    "part-prompts": partial(check_part_on_gpu, PROMPTS_OF_A_PART),
    "model-prompts-window": partial(with_few_programs, of_a_model(130, 16, 2, window=300)),
    "model-int8": partial(with_few_programs, of_a_model(130, 16, 2, format="int8")),
}
SECONDS_A_CHECK, SECONDS_IN_ALL = 45, 300
PROCESSES = max(1, min(14, (os.cpu_count() or 1) - 2))  # most of a check is compiling


def main(names: list[str]) -> None:
    """Run checks and print what became of each; one that takes too long ends the process."""
    for name in names:
        faulthandler.dump_traceback_later(SECONDS_A_CHECK, exit=True)
        print(json.dumps({"name": name, "error": "the process ended in it"}), flush=True)
        error = None
        try:
            ON_GPU[name]()
        except Exception:
            error = traceback.format_exc()[-3000:]
        print(json.dumps({"name": name, "error": error}), flush=True)
        if error:
            (
                jnp.ones(8) + 1
            ).block_until_ready()  # raises after an illegal access: nothing runs any more
        faulthandler.cancel_dump_traceback_later()


def run_all(names: list[str]) -> dict[str, str | None]:
    """By check its error, None where there was none. As many processes as it takes, PROCESSES of them at a time."""
    shares = [names[i::PROCESSES] for i in range(PROCESSES)]
    with ThreadPoolExecutor(PROCESSES) as pool:
        found = {
            name: error for share in pool.map(_run_share, shares) for name, error in share.items()
        }
    return {name: found[name] for name in names}


def _run_share(names: list[str]) -> dict[str, str | None]:
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    end = time.monotonic() + SECONDS_IN_ALL
    errors: dict[str, str | None] = {}
    while pending := [name for name in names if name not in errors]:
        command = [sys.executable, "-m", "tests.kernels.test_paged_attention_gpu", *pending]
        process = subprocess.Popen(
            ["timeout", str(max(1, int(end - time.monotonic()))), *command],
            cwd=Path(__file__).parents[2],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        stdout, stderr = process.communicate()
        lines = [json.loads(line) for line in stdout.splitlines() if line.startswith('{"name"')]
        errors |= {line["name"]: line["error"] for line in lines}
        if lines and lines[-1]["error"] == "the process ended in it":
            code = f"exit status {process.returncode}"
            errors[lines[-1]["name"]] = f"the process ended in it, {code}: {stderr[-3000:]}"
        if not lines or time.monotonic() > end:
            why = stderr[-3000:] if not lines else f"{SECONDS_IN_ALL} s were over before"
            return dict.fromkeys(names, f"not run: {why}") | errors
    return errors


@pytest.fixture(scope="module")
def on_gpu():
    return run_all(list(ON_GPU))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_on_a_real_gpu(name, on_gpu):
    assert on_gpu[name] is None, on_gpu[name]


if __name__ == "__main__":
    main(sys.argv[1:])
