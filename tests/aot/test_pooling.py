"""The chunks of long texts in a pooling model, compiled for devices that are not there."""

from __future__ import annotations

import pytest

from pallas_kernels.hopper import unsupported_jax
from tests.aot.compiling import missing, seen
from tests.aot.pooling import CHUNK, FEW, TARGETS

__test__ = unsupported_jax() is None
pytestmark = pytest.mark.aot


@pytest.fixture(params=TARGETS)
def programs(request) -> list[dict]:
    """Texts of the shortest size and of the longest, then tokens of the longest."""
    if reason := missing(request.param):
        pytest.skip(reason)
    programs = seen("pooling", request.param).programs
    return sorted(programs, key=lambda each: (each["per_token"], each["longest"]))


def test_the_kv_of_a_text_stays_in_place(programs):
    assert [each["per_token"] for each in programs] == [False, False, True]
    assert {each["num_tokens"] for each in programs} == {CHUNK}
    assert [each["longest"] for each in programs] == [2 * CHUNK, 32768, 32768]
    for each in programs:
        vector = 4 * each["hidden_size"]  # `pooled`, carried from chunk to chunk
        assert each["alias_bytes"] >= each["pool_bytes"] + vector, each
        assert each["pool_copies"] == [] and each["exchanges"] == [], each


def test_a_kernel_attends_in_each_layer(programs):
    for each in programs:
        assert each["attention_calls"] >= FEW, each


def test_scores_are_made_tile_by_tile(programs):
    """All scores of a chunk and the longest text would be 2 MB per token."""
    for each in programs:
        assert each["temp_bytes"] < 2**16 * each["num_tokens"], each
        if each["per_token"]:
            made = 4 * each["num_tokens"] * each["hidden_size"]
            assert each["output_bytes"] >= each["pool_bytes"] + made, each
