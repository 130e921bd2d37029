"""Lookups of tokens through the compilers of TPUs, on a machine that has none."""

from __future__ import annotations

import math

import pytest

from pallas_kernels.embedding import tpu
from tests.aot import embedding
from tests.aot.compiling import missing, seen

pytestmark = pytest.mark.aot


@pytest.fixture(params=embedding.TARGETS)
def target(request) -> str:
    if reason := missing(request.param):
        pytest.skip(reason)
    return request.param


def found(target: str) -> dict[str, dict]:
    return {each["name"]: each for each in seen("embedding", target).programs}


def test_one_kernel_reads_a_table_where_it_is(target):
    """Also where a head reads it, and in the share of each of four devices, which add up the rows once."""
    programs = found(target)
    for call in embedding.CALLS:
        each = programs[call.name]
        assert each["lies_by_column"], each
        if call.by == "xla":
            continue
        assert each["kernels"] == 1 and each["copies"] == [], each
        rows = 2 * call.num_tokens * call.width
        is_divided = call.num_devices > 1
        assert each["exchanges"] == ([["all-reduce", 1, rows]] if is_divided else []), each
        assert each["temp_bytes"] <= 4 * rows + 2**20, each


def test_why_it_is_not_xla_s_own(target):
    """XLA copies the table into another order."""
    programs = found(target)
    for call in embedding.CALLS:
        if call.by == "xla":
            each = programs[call.name]
            assert each["kernels"] == 0, each
            assert each["copies"], each
            assert each["temp_bytes"] > 2 * math.prod(call.share), each


def test_which_tables_lie_by_column(target):
    """What the kernel serves follows from it."""
    programs = found(target)
    for num_rows, width in embedding.TABLES:
        for dtype in ("bfloat16", "float32"):
            each = programs[f"table {num_rows} x {width} {dtype}"]
            assert each["lies_by_column"] == tpu.lies_by_column(num_rows, width), each


def test_steps_of_gpt_oss_copy_no_embedding(target):
    """For decode and for prompts, on one device and four: one kernel finds the rows. Only of more tokens than it serves
    does XLA, which copies the table.
    """
    programs = found(target)
    for place in embedding.STEPS:
        if place.target == target:
            names = [n for n in programs if n.startswith(f"step TP {place.num_devices} ")]
            assert len(names) == 2
            for name in names:
                each = programs[name]
                is_served = each["num_tokens"] <= tpu.most_tokens(each["share"][0])
                assert is_served == (place.num_devices == 1 or "decode" in name), each
                assert each["lookups"] == is_served, each
                assert len(each["copies"]) == (not is_served), each
