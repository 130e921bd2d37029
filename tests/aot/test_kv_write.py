"""Writes of new keys and values, compiled for an H200 that is not there."""

from __future__ import annotations

import pytest

from pallas_kernels.kv_write.quantized import LEVELS
from tests.aot import kv_write
from tests.aot.compiling import missing, seen

pytestmark = pytest.mark.aot


@pytest.fixture
def programs() -> list[dict]:
    if reason := missing("h200"):
        pytest.skip(reason)
    found = seen("kv_write", "h200").programs
    assert len(found) == len(kv_write.FORMATS) * len(kv_write.NUM_TOKENS)
    return found


def test_the_pool_stays_where_it_is_and_is_not_copied(programs):
    for each in programs:
        assert each["alias_bytes"] == each["pool_bytes"], each
        assert (each["copies"], each["loops"]) == ([], 0), each


def test_values_are_not_written_atomically(programs):
    assert not any(each["atomic"] for each in programs)


def test_a_scatter_is_one_kernel_and_needs_no_memory(programs):
    """After one that makes the slots distinct. With scales two, and kernels that find a vector's range; with many
    tokens these make K and V one array first.
    """
    for each in programs:
        scatters = [name for name in each["kernels"] if "scatter" in name]
        if each["format"] in LEVELS:
            assert len(scatters) == 2 and len(each["kernels"]) <= 6, each
            assert each["temp_bytes"] < 1.2 * each["new_bytes"], each
        else:
            assert len(scatters) == 1 and len(each["kernels"]) == 2, each
            assert each["temp_bytes"] <= max(1024, 4 * each["num_tokens"]), each
