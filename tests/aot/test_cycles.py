"""What of a program's HLO is counted as time. The instructions are shortened ones of real programs."""

from __future__ import annotations

from jaxpage.aot.cycles import costs_of, grouped, total_cycles
from jaxpage.aot.hlo import parse

PROGRAM = parse("""HloModule jit_step, is_scheduled=true

%fused_computation (param_0: f32[8]) -> f32[8] {
  ROOT %add.9 = f32[8]{0} add(%param_0, %param_0), backend_config={"estimated_cycles":"7000"}
}

%body.1 (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %fusion.7 = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused_computation, backend_config={"estimated_cycles":"100"}
}

%idle.1 (arg: f32[8]) -> f32[8] {
  ROOT %copy.4 = f32[8]{0} copy(%arg), backend_config={"estimated_cycles":"10"}
}

%busy.1 (arg: f32[8]) -> f32[8] {
  ROOT %fusion.8 = f32[8]{0} fusion(%arg), calls=%fused_computation, backend_config={"estimated_cycles":"5010"}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %fusion.1 = bf16[8,4]{1,0:T(8,128)(2,1)} fusion(%x), calls=%fused_computation,\
 metadata={op_name="jit(step)/layers/1/dot"}, backend_config={"estimated_cycles":"40"}
  %fusion.2 = bf16[8,4]{1,0:T(8,128)(2,1)} fusion(%x), calls=%fused_computation,\
 metadata={op_name="jit(step)/layers/2/dot"}, backend_config={"estimated_cycles":"50"}
  %copy-done = f32[8]{0} copy-done(%x), backend_config={"estimated_cycles":"9223372036854775807"}
  %while.1 = (s32[], f32[8]{0}) while(%t), condition=%c, body=%body.1,\
 backend_config={"known_trip_count":{"n":"8"}}
  %conditional.3 = f32[8]{0} conditional(%p, %a, %b), branch_computations={%busy.1, %idle.1}
  ROOT %paged_attention.6 = (bf16[8,4]{1,0}, f32[9]{0}) custom-call(%x), custom_call_target="tpu_custom_call",\
 metadata={op_name="paged_attention/pallas_call"}, backend_config={"estimated_cycles":"9223372036854775807"}
}
""")


def test_loops_run_as_often_as_is_known_and_the_cheapest_branch_is_taken():
    assert total_cycles(costs_of(PROGRAM)) == 40 + 50 + 8 * 100 + 10


def test_loops_that_run_until_something_happens_run_as_often_as_is_said():
    text = """HloModule jit_step, is_scheduled=true

%inner.1 (arg: f32[8]) -> f32[8] {
  %fusion.7 = f32[8]{0} fusion(%x), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"100"}
}

%outer.1 (arg: f32[8]) -> f32[8] {
  %fusion.8 = f32[8]{0} fusion(%x), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"10"}
  %while.2 = f32[8]{0} while(%t), condition=%c, body=%inner.1
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %while.1 = f32[8]{0} while(%t), condition=%c, body=%outer.1
}
"""
    assert total_cycles(costs_of(parse(text))) == 110
    assert total_cycles(costs_of(parse(text), turns=4)) == 440
    known = text.replace(
        "body=%outer.1", 'body=%outer.1, backend_config={"known_trip_count":{"n":"2"}}'
    )
    assert total_cycles(costs_of(parse(known), turns=4)) == 2 * (10 + 4 * 100)


def test_a_kernel_has_no_estimate():
    (kernel,) = [each for each in costs_of(PROGRAM) if each.cycles is None]
    assert kernel.instruction.name == "paged_attention.6"
    assert kernel.origin == "paged_attention/pallas_call"


def test_layers_that_are_alike_are_one_line():
    groups = grouped(costs_of(PROGRAM))
    found = [(cost.instruction.name, count, cycles) for cost, count, cycles in groups]
    assert found == [("fusion.7", 8, 800), ("fusion.1", 2, 90), ("copy.4", 1, 10)]
