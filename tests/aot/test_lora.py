"""Low-rank adapters through the compilers of TPUs, on a machine that has none."""

from __future__ import annotations

import pytest

from tests.aot import lora
from tests.aot.compiling import missing, seen

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("target", lora.TARGETS)
def test_every_layer_compiles_into_one_kernel_and_moves_no_weight(target):
    """That it compiles says: every operation is known, and VMEM, of which a limit is given, suffices."""
    if reason := missing(target):
        pytest.skip(reason)
    programs = seen("lora", target).programs
    assert [each["name"] for each in programs] == [each.name for each in lora.layers()]
    for each in programs:
        assert each["kernel_calls"] == 1, each
        # A small weight may be fetched into VMEM, memory space 1, before the kernel begins; its layout stays.
        assert [line for line in each["copies"] if "S(1)" not in line] == [], each
        # Lists of what is visited, tokens with padding, and what was fetched; of 2048 tokens their slots as a column.
        assert each["temp_bytes"] < 2**23, each
