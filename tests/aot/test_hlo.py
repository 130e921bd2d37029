"""The syntax of compiled programs. The text is a shortened one of a real program."""

from __future__ import annotations

import pytest

from jaxpage.aot.hlo import Array, arrays_in, parse

TEXT = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%fused_computation (param_0: f32[8]) -> f32[8] {
  %param_0 = f32[8]{0} parameter(0)
  ROOT %add.9 = f32[8]{0:T(256)} add(%param_0, %param_0), metadata={op_name="jit(step)/add" stack_frame_id=7}
}

ENTRY %main.4 (x: f32[8], w: bf16[8,4]) -> (f32[8], s4[16]) {
  %x = f32[8]{0} parameter(0), metadata={op_name="x"}
  %begin = ((bf16[8,4]{1,0:T(8,128)(2,1)}), bf16[8,4]{1,0}, /*index=2*/u32[]{:S(2)}) copy-start(%w)
  ROOT %done.1 = (f32[8]{0}, s4[16]{0}) fusion(%x, /*index=1*/%begin), kind=kLoop, calls=%fused_computation
}
"""


def test_a_program_is_computations_of_instructions():
    program = parse(TEXT)
    assert program.entry == "main.4"
    names = {name: [each.name for each in all] for name, all in program.computations.items() if all}
    assert names == {"fused_computation": ["param_0", "add.9"], "main.4": ["x", "begin", "done.1"]}
    assert [each.name for each in program] == [*names["fused_computation"], *names["main.4"]]


def test_an_instruction_makes_arrays_of_operands():
    _, add, x, begin, done = parse(TEXT)
    assert (add.opcode, add.operands, add.is_root) == ("add", ("param_0", "param_0"), True)
    assert (add.op_name, done.op_name) == ("jit(step)/add", "")
    assert not x.is_root and x.operands == ()
    assert begin.opcode == "copy-start" and list(map(str, begin.arrays)) == [
        "bf16[8,4]",
        "bf16[8,4]",
        "u32[]",
    ]
    assert done.operands == ("x", "begin")
    assert done.num_bytes == 8 * 4 + 16 // 2


@pytest.mark.parametrize(
    ("made", "shape", "num_bytes"),
    [
        ("bf16[64,128,256]{2,1,0:T(8,128)(2,1)}", (64, 128, 256), 2 * 64 * 128 * 256),
        ("f8e4m3fn[8,128]", (8, 128), 1024),
        ("pred[8]", (8,), 8),
        ("f32[]", (), 4),
        ("s8[0]", (0,), 0),
    ],
)
def test_bytes_of_arrays(made, shape, num_bytes):
    (array,) = arrays_in(made)
    assert (array.shape, array.num_bytes) == (shape, num_bytes)


def test_tokens_are_no_arrays():
    assert arrays_in("(bf16[8,64]{1,0}, token[])") == (Array("bf16", (8, 64)),)
