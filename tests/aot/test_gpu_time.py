"""Bytes and flops of a GPU program's kernels, from texts such as XLA writes."""

from __future__ import annotations

import dataclasses

import pytest

from jaxpage.aot.cycles import costs_of
from jaxpage.aot.gpu_time import nanoseconds
from jaxpage.aot.hlo import parse
from jaxpage.aot.program_time import time_of
from jaxpage.aot.targets import CHIPS

# A byte takes a nanosecond, an operation a picosecond, a launch nothing.
CHIP = dataclasses.replace(
    CHIPS["h200"],
    bytes_per_second=1e9,
    flops_per_second=1e12,
    copy_share=1.0,
    product_share=1.0,
    seconds_per_kernel=0.0,
)
TEXT = """HloModule jit_step

%fused_product (param_0: bf16[4,64], param_1: bf16[64,32]) -> f32[4,32] {
  %param_0 = bf16[4,64]{1,0} parameter(0)
  %param_1 = bf16[64,32]{1,0} parameter(1)
  ROOT %dot.1 = f32[4,32]{1,0} dot(%param_0, %param_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_write (param_0.1: bf16[1000,64], param_1.1: bf16[4,64], param_2.1: s32[4]) -> bf16[1000,64] {
  %param_0.1 = bf16[1000,64]{1,0} parameter(0)
  %param_2.1 = s32[4]{0} parameter(2)
  %bitcast.1 = s32[4,1]{1,0} bitcast(%param_2.1)
  %param_1.1 = bf16[4,64]{1,0} parameter(1)
  ROOT %scatter.1 = bf16[1000,64]{1,0} scatter(%param_0.1, %bitcast.1, %param_1.1), to_apply=%keep
}

%fused_read (param_0.2: bf16[1000,64], param_1.2: s32[4]) -> bf16[4,64] {
  %param_0.2 = bf16[1000,64]{1,0} parameter(0)
  %bitcast.2 = bf16[1000,64]{1,0} bitcast(%param_0.2)
  %param_1.2 = s32[4]{0} parameter(1)
  ROOT %gather.1 = bf16[4,64]{1,0} gather(%bitcast.2, %param_1.2), slice_sizes={1,64}
}

%body (arg: (s32[], bf16[1000,64])) -> (s32[], bf16[1000,64]) {
  %arg = (s32[], bf16[1000,64]{1,0}) parameter(0)
  %pool = bf16[1000,64]{1,0} get-tuple-element(%arg), index=1
  %i = s32[] get-tuple-element(%arg), index=0
  %slots = s32[4]{0} iota(), iota_dimension=0
  %read = bf16[4,64]{1,0} fusion(%pool, %slots), kind=kLoop, calls=%fused_read
  %written = bf16[1000,64]{1,0} fusion(%pool, %read, %slots), kind=kInput, calls=%fused_write
  %mpmd.1 = bf16[4,64]{1,0} custom-call(%read, %written), metadata={op_name="jit(f)/paged_decode/mpmd_map"}
  %mpmd.2 = bf16[4,64]{1,0} custom-call(%mpmd.1), metadata={op_name="jit(f)/paged_combine/mpmd_map"}
  %mpmd.3 = bf16[1000,64]{1,0} custom-call(%written), metadata={op_name="jit(f)/delta_rule/mpmd_map"}
  ROOT %out = (s32[], bf16[1000,64]{1,0}) tuple(%i, %written)
}

ENTRY %main (x: bf16[4,64], w: bf16[64,32], pool.1: bf16[1000,64]) -> f32[4,32] {
  %x = bf16[4,64]{1,0} parameter(0)
  %w = bf16[64,32]{1,0} parameter(1)
  %pool.1 = bf16[1000,64]{1,0} parameter(2)
  %begin = (s32[], bf16[1000,64]{1,0}) tuple(%x, %pool.1)
  %loop = (s32[], bf16[1000,64]{1,0}) while(%begin), body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %cublas = (bf16[4,32]{1,0}, s8[0]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", CONTRACTED
  %sum = f32[4,32]{1,0} all-reduce(%product), channel_id=1
  ROOT %product = f32[4,32]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused_product
}
"""
CONTRACTED = 'backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}'
PROGRAM = parse(TEXT.replace("CONTRACTED", CONTRACTED))


def test_bytes_are_what_is_read_and_written():
    found = nanoseconds(PROGRAM, CHIP)
    row, slots = 64 * 2, 4 * 4
    assert found["read"] == 2 * 4 * row + slots
    assert found["written"] == 2 * 4 * row + slots  # in place, not the whole pool
    assert found["product"] == 4 * row + 64 * 32 * 2 + 4 * 32 * 4
    assert found["slots"] == slots
    assert not {"x", "pool", "out", "loop", "begin", "sum"} & set(found)


def test_products_take_their_flops_where_those_are_more():
    chip = dataclasses.replace(CHIP, flops_per_second=1e9)
    found = nanoseconds(PROGRAM, chip)
    assert found["product"] == found["cublas"] == 2 * 4 * 64 * 32
    half = dataclasses.replace(chip, product_share=0.5, seconds_per_kernel=7e-9)
    assert nanoseconds(PROGRAM, half)["product"] == 2 * 2 * 4 * 64 * 32 + 7


def test_loops_count_with_their_trips_and_kernels_whose_work_depends_on_the_batch_apart():
    found = nanoseconds(PROGRAM, CHIP)
    assert all(found[f"mpmd.{number}"] is None for number in (1, 2, 3))
    time = time_of(PROGRAM, CHIP, None)
    assert time["kernels"] == [
        {"name": "paged_attention", "count": 6, "program": None},
        {"name": "delta_rule", "count": 3, "program": None},
    ]
    in_loop = sum(found[name] for name in ("slots", "read", "written"))
    assert time["cycles"] == 3 * in_loop + found["product"] + found["cublas"]
    assert costs_of(PROGRAM) == []  # no estimates of XLA's own


@pytest.mark.parametrize("name", ["v6e", "tpu7x"])
def test_shares_are_a_gpu_s(name):
    assert (CHIPS[name].copy_share, CHIPS[name].seconds_per_kernel) == (1.0, 0.0)
