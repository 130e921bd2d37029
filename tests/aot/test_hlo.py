"""What is read out of the text of compiled programs. The instructions are shortened ones of real programs."""

from __future__ import annotations

from jaxpage.aot.hlo import collectives, copies_of_size, kernel_calls


def test_a_copy_of_the_pool_would_be_found():
    text = """
      %pool.1 = bf16[64,128,256]{2,1,0:T(8,128)(2,1)} parameter(0)
      %copy.2 = bf16[64,2,128,128]{3,1,2,0:T(8,128)(2,1)} copy(%pool.1)
      %copy-start.1 = (u8[64,128,256]{2,1,0:T(8,128)(4,1)S(1)}, u32[]{:S(2)}) copy-start(%pool.1)
      ROOT %select.3 = bf16[64,128,256]{2,1,0} select(%mask, %pool.1, %other)
      %all-gather.1 = bf16[64,128,256]{2,1,0} all-gather(%share), channel_id=1
      %small.1 = bf16[64,128]{1,0} copy(%other)
    """
    found = copies_of_size(text, [(64, 128, 256)])
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
    assert list(copies_of_size(text, [(64, 128, 256)])) == []


def test_a_collective_is_counted_once_however_often_it_is_written_down():
    text = """
      %all-reduce.1 = f32[8,64]{1,0} all-reduce(%x), channel_id=3, replica_groups={{0,1}}, to_apply=%add
      %all-reduce.2 = f32[8,64]{1,0} all-reduce(%x), channel_id=3, replica_groups={{0,1}}, to_apply=%add
      %all-reduce-start.1 = (bf16[4]{0}, bf16[16]{0}) all-reduce-start(%y, %z), channel_id=4, to_apply=%add
      %gather.1 = f32[8,1024]{1,0} all-gather(%w), channel_id=5, dimensions={1}
    """
    assert collectives(text) == {
        "all-reduce": {"count": 2, "largest": 512},
        "all-gather": {"count": 1, "largest": 8192},
    }


def test_calls_of_kernels_and_what_they_may_use():
    text = """
      %k.1 = bf16[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="f/k/pallas_call"},\
 backend_config={"scoped_memory_configs":[{"memory_space":"1","offset":"256","size":"4096"}]}
      %k.2 = bf16[8]{0} custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/g"}
      %k.3 = bf16[8]{0} custom-call(%x), custom_call_target="TopK"
    """
    assert kernel_calls(text) == [("f/k/pallas_call", 4096), ("jit(f)/g", None)]
