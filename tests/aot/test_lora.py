"""Low-rank adapters through the compilers of TPUs and an H200, on a machine that has none."""

from __future__ import annotations

import pytest

from pallas_kernels.hopper import unsupported_jax
from tests.aot import lora
from tests.aot.compiling import missing, seen

pytestmark = pytest.mark.aot


TPUS = tuple(target for target in lora.TARGETS if target != "h200")


@pytest.mark.parametrize("target", TPUS)
def test_every_layer_compiles_into_one_kernel_and_moves_no_weight(target):
    """That it compiles says: every operation is known, and VMEM, of which a limit is given, suffices."""
    if reason := missing(target):
        pytest.skip(reason)
    programs = seen("lora", target).programs
    assert sorted(each["name"] for each in programs) == sorted(
        each.name for each in lora.layers("tpu")
    )
    for each in programs:
        assert each["kernel_calls"] == 1, each
        # A small weight may be fetched into VMEM, memory space 1, before the kernel begins; its layout stays.
        assert [line for line in each["copies"] if "S(1)" not in line] == [], each
        # Lists of what is visited, tokens with padding, and what was fetched; of 2048 tokens their slots as a column.
        assert each["temp_bytes"] < 2**23, each


@pytest.mark.skipif(unsupported_jax() is not None, reason="kernels for GPUs need a newer jax")
def test_every_layer_compiles_into_two_kernels_for_a_gpu_and_spills_nothing():
    if reason := missing("h200"):
        pytest.skip(reason)
    programs = seen("lora", "h200").programs
    assert sorted(each["name"] for each in programs) == sorted(
        each.name for each in lora.layers("gpu")
    )
    for each in programs:
        assert each["kernel_calls"] == 2 and each["copies"] == [], each
        assert each["ptxas"]["spilled"] == [0, 0] and each["ptxas"]["for_hopper"] == 2, each
        assert not each["ptxas"]["waits"], each
        # Lists, tokens with padding, and parts of A x, unless these fit where the result will be.
        assert each["temp_bytes"] < 2**23, each
