"""Rotary embeddings through the compilers of TPUs, on a machine that has none."""

from __future__ import annotations

import pytest

from tests.aot import rope
from tests.aot.compiling import missing, seen

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("target", rope.TARGETS)
def test_heads_are_split_and_turned_by_one_kernel_and_copied_by_none(target):
    if reason := missing(target):
        pytest.skip(reason)
    programs = seen("rope", target).programs
    assert sorted(each["name"] for each in programs) == sorted(each.name for each in rope.calls())
    for each in programs:
        assert each["kernel_calls"] == 1, each
        # What is given may be fetched into VMEM, memory space 1, before the kernel begins; its layout stays.
        assert [line for line in each["copies"] if "S(1)" not in line] == [], each
        # That, and factors of each token in float32, which steps compute once for all layers.
        factors = each["num_tokens"] * 3 * 2 * 384 * 4
        assert each["temp_bytes"] <= each["given_bytes"] + factors + 2**20, each
