"""What is found in compiled programs. The instructions are shortened ones of real programs."""

from __future__ import annotations

from jaxpage.aot.contents import copies_of_size, exchanges, kernel_calls
from jaxpage.aot.hlo import parse


def test_collectives_are_counted_by_kind_and_size():
    text = """
      %all-reduce.1 = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} all-reduce(%x), channel_id=3, to_apply=%add
      %all-reduce.2 = bf16[8,64]{1,0} all-reduce(%x), channel_id=4, to_apply=%add
      %all_to_all.1 = f32[8,1,32]{2,1,0:T(8,128)S(1)} all-to-all(%y), channel_id=1, dimensions={0}
      ROOT %done = bf16[8,64]{1,0} fusion(%all-reduce.2), kind=kLoop, calls=%computation
    """
    assert exchanges(parse(text)) == [("all-reduce", 2, 1024), ("all-to-all", 1, 1024)]


def test_one_that_is_written_down_twice_is_one():
    text = """
      %all-reduce.1 = f32[8,64]{1,0} all-reduce(%x), channel_id=3, to_apply=%add
      %all-reduce.2 = f32[8,64]{1,0} all-reduce(%x), channel_id=3, to_apply=%add
    """
    assert exchanges(parse(text)) == [("all-reduce", 1, 2048)]


def test_those_of_a_shard_map_share_a_channel():
    text = """
      %psum.28 = bf16[16,64]{1,0} all-reduce(%quant_matmul.31), channel_id=1, to_apply=%add
      %psum.29 = bf16[16,64]{1,0} all-reduce(%quant_matmul.34), channel_id=1, to_apply=%add
    """
    assert exchanges(parse(text)) == [("all-reduce", 2, 2048)]


def test_arrays_that_are_exchanged_together_are_one_call():
    text = """
      %all-reduce.3 = (s32[256]{0:T(256)}, s32[256]{0:T(256)}) all-reduce(%a, %b), channel_id=1, to_apply=%add
    """
    assert exchanges(parse(text)) == [("all-reduce", 1, 2048)]


def test_an_asynchronous_call_makes_its_operands_too():
    text = """
      %all-reduce-start = ((bf16[4,8]{1,0}), bf16[4,8]{1,0}) all-reduce-start(%x), channel_id=7, to_apply=%add
      %all-reduce-done = bf16[4,8]{1,0} all-reduce-done(%all-reduce-start)
      %all-gather-start = ((s32[2], pred[2,4]{1,0}), (s32[8], pred[8,4]{1,0})) all-gather-start(%y, %z), channel_id=1
      %all-gather-done = (s32[8]{0}, pred[8,4]{1,0}) all-gather-done(%all-gather-start)
    """
    assert exchanges(parse(text)) == [("all-gather", 1, 64), ("all-reduce", 1, 64)]


def test_arrays_of_8_bit_floats_and_tokens_are_counted():
    text = """
      %all-gather.1 = (f8e4m3fn[8,128]{1,0}, pred[8]{0}) all-gather(%a, %b), channel_id=1, dimensions={0}
      %all-reduce.2 = (bf16[8,64]{1,0}, token[]) all-reduce(%a, %b), channel_id=2, to_apply=%add
    """
    assert exchanges(parse(text)) == [("all-gather", 1, 1032), ("all-reduce", 1, 1024)]


def test_a_copy_of_the_pool_would_be_found():
    text = """
      %pool.1 = bf16[64,128,256]{2,1,0:T(8,128)(2,1)} parameter(0)
      %copy.2 = bf16[64,2,128,128]{3,1,2,0:T(8,128)(2,1)} copy(%pool.1)
      %copy-start.1 = (u8[64,128,256]{2,1,0:T(8,128)(4,1)S(1)}, u32[]{:S(2)}) copy-start(%pool.1)
      ROOT %select.3 = bf16[64,128,256]{2,1,0} select(%mask, %pool.1, %other)
      %all-gather.1 = bf16[64,128,256]{2,1,0} all-gather(%share), channel_id=1
      %small.1 = bf16[64,128]{1,0} copy(%other)
    """
    found = copies_of_size(parse(text), [(64, 128, 256)])
    names = [line.removeprefix("ROOT ").split()[0] for line in found]
    assert names == ["%copy.2", "%copy-start.1", "%select.3", "%all-gather.1"]


def test_what_is_updated_where_it_lies_is_no_copy():
    text = """
      ROOT %update.1 = bf16[64,128,256]{2,1,0} dynamic-update-slice(%pool.1, %new, %i, %zero, %zero)
      %scatter.1 = bf16[64,128,256]{2,1,0} scatter(%pool.1, %slots, %new), to_apply=%keep
      %fused.1 = bf16[64,128,256]{2,1,0} fusion(%pool.1, %new), kind=kLoop, calls=%computation.1
      %cond.1 = ((bf16[64,128,256]{2,1,0})) conditional(%some, %tuple.1, %tuple.2), branch_computations={%a, %b}
      %while.1 = (s32[], bf16[64,128,256]{2,1,0}) while(%tuple.3), condition=%c, body=%d
    """
    assert list(copies_of_size(parse(text), [(64, 128, 256)])) == []


def test_calls_of_kernels_and_what_they_may_use():
    text = """
      %k.1 = bf16[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="f/k/pallas_call"},\
 backend_config={"scoped_memory_configs":[{"memory_space":"1","offset":"256","size":"4096"}]}
      %k.2 = bf16[8]{0} custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/g"}
      %k.3 = bf16[8]{0} custom-call(%x), custom_call_target="TopK"
    """
    assert kernel_calls(parse(text)) == [("f/k/pallas_call", 4096), ("jit(f)/g", None)]
