"""The grouped product at the sizes of two models, compiled for two TPUs and an H200 that are not there."""

from __future__ import annotations

import pytest

from pallas_kernels.grouped_matmul import cases
from pallas_kernels.hopper import unsupported_jax
from tests.aot import grouped_matmul
from tests.aot.compiling import missing, seen

__test__ = unsupported_jax() is None
pytestmark = pytest.mark.aot


@pytest.fixture(params=grouped_matmul.TARGETS)
def target(request) -> str:
    if reason := missing(request.param):
        pytest.skip(reason)
    return request.param


def test_one_kernel_reads_the_weights_where_they_are(target):
    """With the default sizes and with others, with quantized weights, and on TPUs in float32, whose tiles are not to be
    larger.
    """
    found = seen("grouped_matmul", target).programs
    ours = [each for each in found if not each["name"].endswith("ragged_dot")]
    forms = len(grouped_matmul.FORMATS) + (2 if target == "h200" else 3)
    assert len(ours) == forms * len(cases.MODELS) * len(cases.TOKENS)
    for each in ours:
        assert each["kernels"] == 1 and each["copies"] == [], each
        # Rows are padded to whole tiles, and rows of no group become 0 in a second array.
        most = each["x_bytes"] + each["out_bytes"] + 2**21
        # There each tile of rows that are not rounded has a place of its own for results.
        if target == "h200" and ("int4" in each["name"] or "fp8" in each["name"]):
            model = next(model for model in cases.MODELS if each["name"].startswith(model.name))
            most += 4 * model.num_outputs * model.num_groups * (64 + 8)
        assert each["temp_bytes"] <= most, each


def test_what_a_hopper_gpu_sums_stays_in_registers():
    """And no product waits for itself, which ptxas would say."""
    if reason := missing("h200"):
        pytest.skip(reason)
    for each in seen("grouped_matmul", "h200").programs:
        if each["kernels"]:
            assert each["ptxas"]["spilled"] == [0], each
            assert each["ptxas"]["for_hopper"] == 1, each
            assert not each["ptxas"]["waits"], each


def test_why_it_is_not_jax_s_own(target):
    """With weights as they are stored it copies all of them, on each of these chips; on an H200 more than that."""
    for each in seen("grouped_matmul", target).programs:
        if each["name"].endswith("ragged_dot"):
            assert each["temp_bytes"] > 0.99 * each["weight_bytes"], each
            assert target != "h200" or each["temp_bytes"] > 1.02 * each["weight_bytes"], each
