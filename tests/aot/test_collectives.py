"""What is read out of the text of compiled programs about collectives. The instructions are shortened ones of real
programs.
"""

from __future__ import annotations

from jaxpage.aot.collectives import exchanges


def test_collectives_are_counted_by_kind_and_size():
    text = """
      %all-reduce.1 = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} all-reduce(%x), channel_id=3, to_apply=%add
      %all-reduce.2 = bf16[8,64]{1,0} all-reduce(%x), channel_id=4, to_apply=%add
      %all_to_all.1 = f32[8,1,32]{2,1,0:T(8,128)S(1)} all-to-all(%y), channel_id=1, dimensions={0}
      ROOT %done = bf16[8,64]{1,0} fusion(%all-reduce.2), kind=kLoop, calls=%computation
    """
    assert exchanges(text) == [("all-reduce", 2, 1024), ("all-to-all", 1, 1024)]


def test_one_that_is_written_down_twice_is_one():
    text = """
      %all-reduce.1 = f32[8,64]{1,0} all-reduce(%x), channel_id=3, to_apply=%add
      %all-reduce.2 = f32[8,64]{1,0} all-reduce(%x), channel_id=3, to_apply=%add
    """
    assert exchanges(text) == [("all-reduce", 1, 2048)]


def test_those_of_a_shard_map_share_a_channel():
    text = """
      %psum.28 = bf16[16,64]{1,0} all-reduce(%quant_matmul.31), channel_id=1, to_apply=%add
      %psum.29 = bf16[16,64]{1,0} all-reduce(%quant_matmul.34), channel_id=1, to_apply=%add
    """
    assert exchanges(text) == [("all-reduce", 2, 2048)]


def test_arrays_that_are_exchanged_together_are_one_call():
    text = """
      %all-reduce.3 = (s32[256]{0:T(256)}, s32[256]{0:T(256)}) all-reduce(%a, %b), channel_id=1, to_apply=%add
    """
    assert exchanges(text) == [("all-reduce", 1, 2048)]


def test_an_asynchronous_call_makes_its_operands_too():
    text = """
      %all-reduce-start = ((bf16[4,8]{1,0}), bf16[4,8]{1,0}) all-reduce-start(%x), channel_id=7, to_apply=%add
      %all-reduce-done = bf16[4,8]{1,0} all-reduce-done(%all-reduce-start)
      %all-gather-start = ((s32[2], pred[2,4]{1,0}), (s32[8], pred[8,4]{1,0})) all-gather-start(%y, %z), channel_id=1
      %all-gather-done = (s32[8]{0}, pred[8,4]{1,0}) all-gather-done(%all-gather-start)
    """
    assert exchanges(text) == [("all-gather", 1, 64), ("all-reduce", 1, 64)]


def test_arrays_of_8_bit_floats_and_tokens_are_counted():
    text = """
      %all-gather.1 = (f8e4m3fn[8,128]{1,0}, pred[8]{0}) all-gather(%a, %b), channel_id=1, dimensions={0}
      %all-reduce.2 = (bf16[8,64]{1,0}, token[]) all-reduce(%a, %b), channel_id=2, to_apply=%add
    """
    assert exchanges(text) == [("all-gather", 1, 1032), ("all-reduce", 1, 1024)]
