"""The gated delta rule and Mamba-2 through the compilers of TPUs and an H200, on a machine that has none."""

from __future__ import annotations

import pytest

from pallas_kernels.hopper import unsupported_jax
from tests.aot import delta_rule
from tests.aot.compiling import missing, seen

pytestmark = pytest.mark.aot


TPUS = tuple(target for target in delta_rule.TARGETS if target != "h200")


@pytest.mark.parametrize("target", TPUS)
def test_states_change_in_place(target):
    if reason := missing(target):
        pytest.skip(reason)
    programs = seen("delta_rule", target).programs
    assert sorted(each["name"] for each in programs) == sorted(delta_rule.NAMES)
    for each in programs:
        assert each["kernel_calls"] == 1, each
        # Small states may be fetched into VMEM, memory space 1, before the kernel begins, and back. Lines of ends do
        # not say where from.
        copies = [line for line in each["copies"] if "copy-done(" not in line]
        assert [line for line in copies if "S(1)" not in line] == [], each


@pytest.mark.skipif(unsupported_jax() is not None, reason="kernels for GPUs need a newer jax")
def test_one_kernel_of_a_gpu_changes_states_in_place_and_spills_nothing():
    """At D = 128 an SM, which has 65,536 registers, has room for three programs of 128 threads."""
    if reason := missing("h200"):
        pytest.skip(reason)
    programs = seen("delta_rule", "h200").programs
    assert sorted(each["name"] for each in programs) == sorted(delta_rule.NAMES_OF_GPU)
    for each in programs:
        assert each["kernel_calls"] == 1 and each["copies"] == [], each
        assert each["alias_bytes"] > 100 * each["temp_bytes"], each
        assert each["ptxas"]["spilled"] == [0] and each["ptxas"]["for_hopper"] == 1, each
        is_wide = each["name"].startswith("wide-keys") or each["name"] == "wide-state"
        assert is_wide or each["ptxas"]["registers"] <= [65536 // (3 * 128) // 8 * 8], each
