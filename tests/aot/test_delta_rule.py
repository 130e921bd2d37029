"""The gated delta rule through the compilers of TPUs, on a machine that has none."""

from __future__ import annotations

import pytest

from tests.aot import delta_rule
from tests.aot.compiling import missing, seen

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("target", delta_rule.TARGETS)
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
