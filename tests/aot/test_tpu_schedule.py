"""How libtpu's dump of a schedule is read. The text is shortened from that of a real kernel."""

from __future__ import annotations

import dataclasses

import pytest

from jaxpage.aot.tpu_schedule import Region, dump_variables, parse, table, take_schedules

# A loop of four turns in a loop without a number, in which a jump leaves two bundles out.
BUNDLES = """= control target key start
LB: loop body
= control target key end

     0   :  { %s9_s0 = inlined_call_operand.hbm [shape: bf16[8,128], index: 0, kind: output, shape index: {0}] /* o */ }
   0x1   :  { %s3_s1 = smov 0 /* copy for cssa */ }
   0x2 LB: > { %s7_s2 = sphi %s1_s1, %s8_s2 /* phi copy */ } /* Start region 10 */
   0x3   : > { %12 = sbr.rel (%p4_p1) target = $region11 }
   0x4   :  {}
   0x5   :  {}
   0x6   :  {}
   0x7   :  {}
   0x8   : > { %v1_v0 = vadd.f32 %v2_v1, %v3_v2 }
   0x9   : > { %14 = dma.hbm_to_vmem [thread:$0]  %s1_s1, 512 }
   0xa PF: > { %v5_v5 = vld [vmem:[%s1_s1] sm:$0xff] } /* Start/End empty region 11 */
   0xb LB: >> { %s5_s3 = sphi %s3_s1, %s6_s3 /* phi copy */ } /* Start region 12 :: Start region 13 */
   0xc   : >> { %s6_s3 = sadd.s32 1, %s5_s3 /* copy for cssa */  ;;  %v6_v6 = vmatmul.mubr.bf16.gmra.mxu0 %v5_v5 }
   0xd   : >> { %p6_p2 = scmp.ge.s32.totalorder %s6_s3, 4 /* loop exit test */
 and more of the same bundle }
   0xe   : >> { %15 = sbr.rel (!%p6_p2) target = $region12 }
   0xf   :  {}
  0x10   :  {}
  0x11   : > { %16 = dma.done.wait %s1_s1, 512 }
  0x12   :  {}
  0x13   : > { %p8_p3 = scmp.ge.s32.totalorder %s8_s2, %s2_s2 }
  0x14   : > { %17 = sbr.rel (!%p8_p3) target = $region10 }
  0x15   :  {}
  0x16   :  {}
  0x17   :  {}
  0x18   :  {} /* End region 10 */
  0x19   :  { %18 = vsyncmov [#allocation5] }
"""
SLOTS = "== CAPACITY:\nMXU, VALU, VSTORE:SPILL\n  2  4  2\n== UTILIZATION:\n" + "\n".join(
    {0x8: "0 4 0", 0xA: "0 0 1", 0xC: "1 0 2"}.get(number, "0 0 0") for number in range(0x1A)
)


def test_loops_nest_and_say_how_often_they_run():
    schedule = parse("kernel.1", BUNDLES, SLOTS)
    (turn,) = schedule.main_loops
    (inner,) = turn.loops
    assert schedule.results == ("bf16[8,128]",)
    assert (schedule.program.own, turn.begin, inner.begin, inner.own) == (3, 2, 0xB, 8)
    assert (turn.trips, inner.trips) == (None, 4)
    assert turn.bundles == 15 + 4 * 8
    assert turn.starts and not turn.waits and inner.waits


@pytest.mark.parametrize(
    ("old", "spilled"), [("sadd.s32 1, %s5_s3", "%s5_s3"), ("totalorder %s6_s3", "%s6_s3")]
)
def test_a_counter_may_be_in_the_scalar_memory_meanwhile(old, spilled):
    head, line, tail = BUNDLES.partition(next(x for x in BUNDLES.splitlines() if old in x))
    line = line.replace(old, old.replace(spilled, "%s17_s4"))
    moved = f"%16 = sst [smem:[#a9_spill]] {spilled}  ;;  %s17_s4 = sld [smem:[#a9_spill]]  ;;  "
    text = head + line.replace("{ ", "{ " + moved, 1) + tail
    (turn,) = parse("kernel.1", text, SLOTS).main_loops
    assert turn.loops[0].trips == 4
    (turn,) = parse("kernel.1", text + moved, SLOTS).main_loops
    assert turn.loops[0].trips is None


def test_what_a_jump_leaves_out_is_a_branch():
    (turn,) = parse("kernel.1", BUNDLES, SLOTS).main_loops
    (branch,) = turn.branches
    assert (branch.begin, branch.own, branch.num_starts, branch.condition) == (8, 2, 1, "%p4_p1")
    assert (turn.own, turn.straight) == (13, 15)


@pytest.mark.parametrize("end, is_branch", [("4", True), ("%s9_s9", False)])
def test_a_jump_over_a_loop_that_may_run_0_times_is_the_loops(end, is_branch):
    """A jump over a loop with a known number of trips is a condition in the kernel."""
    lines = [
        "%s1_s1 = smov 0",
        "%1 = sbr.rel (%p1_p1) target = $region2",
        *[""] * 4,
        "%s2_s2 = sphi %s1_s1, %s3_s3 } /* Start region 1 */ {",
        "%s3_s3 = sadd.s32 1, %s2_s2 ;; %p2_p2 = scmp.ge.s32.totalorder %s3_s3, " + end,
        "%2 = sbr.rel (!%p2_p2) target = $region1",
        *[""] * 4,
        "} /* Start region 2 */ {",
    ]
    text = "\n".join(f"   {i:#x}   : {{ {line} }}" for i, line in enumerate(lines))
    program = parse("kernel.1", text, SLOTS).program
    assert [len(each.loops) for each in program.branches] == [1] * is_branch
    (loop,) = program.loops
    assert (program.own, loop.own) == (7, 7) and (loop.trips is not None) == is_branch


def test_on_a_tpu7x_fewer_bundles_follow_a_jump_and_more_of_a_loop():
    """Comments say where a region begins. The branch has nothing but a loop that may run 0 times."""
    lines = [
        "%1 = sbr.rel (%p1_p1) target = $region3",
        "",
        "%2 = sbr.rel (%p2_p2) target = $region3 } /* Start region 1 */ {",
        "",
        "%v1_v1 = vmatmul.mubr.bf16.gmra.mxu0 %v2_v2 } /* Start region 2 */ {",
        "%3 = sbr.rel (!%p3_p3) target = $region2",
        "%4 = dma.hbm_to_vmem [thread:$0]  %s1_s1, 512 } /* End region 2 */ {",
        "",
        "",
        "",
        "",
        "",
        "} /* Start/End empty region 3 */ {",
    ]
    text = "\n".join(f"   {i:#x}   : {{ {line} }}" for i, line in enumerate(lines))
    program = parse("kernel.1", text, SLOTS).program
    (branch,) = program.branches
    (loop,) = branch.inner
    assert (branch.begin, branch.own, branch.condition) == (2, 2, "%p1_p1")
    assert (loop.begin, loop.own, loop.is_branch, loop.starts) == (4, 8, False, True)


def test_slots_are_counted_as_often_as_a_loop_runs():
    schedule = parse("kernel.1", BUNDLES, SLOTS)
    (turn,) = schedule.main_loops
    assert turn.slots == {"VSTORE:SPILL": 1} and turn.branches[0].slots == {"VALU": 4}
    assert turn.multiplies and turn.used("VSTORE:SPILL") == 1 + 4 * 2
    assert schedule.capacity["MXU"] == 2


def test_a_counter_that_begins_anywhere_has_no_number_of_turns():
    text = BUNDLES.replace("%s3_s1 = smov 0", "%s3_s1 = sld [smem:[#allocation2]]")
    (turn,) = parse("kernel.1", text, SLOTS).main_loops
    assert turn.loops[0].trips is None and turn.bundles == 15 + 8


def test_loops_survive_as_plain_values():
    program = parse("kernel.1", BUNDLES, SLOTS).program
    assert Region.of(dataclasses.asdict(program)) == program


def test_a_folder_is_read_by_name_and_cleared(tmp_path):
    for stamp, name in (("17", "kernel.1"), ("18", "fusion.3")):
        (tmp_path / f"{stamp}-{name}-02-final_bundles.txt").write_text(BUNDLES)
        slots = f"{stamp}-{name}-00-final_hlo-static-per-bundle-utilization.txt"
        (tmp_path / slots).write_text(SLOTS)
    (found,) = take_schedules(tmp_path, ["kernel"])
    assert found.name == "kernel.1" and not list(tmp_path.iterdir())
    assert "0xb" in table(found) and table(found).splitlines()[0] == "kernel.1"


def test_flags_of_the_user_stay(tmp_path):
    asked = dump_variables(tmp_path, flags="--xla_tpu_scoped_vmem_limit_kib=65536 ")[
        "LIBTPU_INIT_ARGS"
    ]
    assert asked.startswith("--xla_tpu_scoped_vmem_limit_kib=65536 --xla_jf_dump_to=")
    assert dump_variables(tmp_path)["LIBTPU_INIT_ARGS"] == asked.partition(" ")[2]
