"""Moves of whole blocks, compiled for two TPUs and an H200 that are not there."""

from __future__ import annotations

import pytest

from tests.aot import block_copy
from tests.aot.compiling import missing, seen

pytestmark = pytest.mark.aot


def compiled(target: str) -> dict[str, dict]:
    return {each["name"]: each for each in seen("block_copy", target).programs}


@pytest.fixture(params=block_copy.TARGETS)
def target(request) -> str:
    if reason := missing(request.param):
        pytest.skip(reason)
    return request.param


def test_the_pool_stays_where_it_is_and_is_not_copied(target):
    programs = compiled(target)
    assert len(programs) >= 17
    for name, each in programs.items():
        writes = name.endswith(("copy", "scatter", "write"))
        assert each["alias_bytes"] == (each["pool_bytes"] if writes else 0), each
        assert each["copies"] == [], each
        assert each["exchanges"] == [], each


def test_a_gpu_does_not_write_blocks_atomically(target):
    if target == "h200":
        assert not any(each["atomic"] for each in compiled(target).values())


def test_one_kernel_moves_the_blocks_of_all_layers_of_a_tpu(target):
    kernels = {each["kernel_calls"] for each in compiled(target).values()}
    assert kernels == ({0} if target == "h200" else {1})


def test_temporaries_are_the_blocks_that_move(target):
    """Of one layer, where sources must be read before; of all, where a host's separate arrays are joined."""
    pools = {pool.name: pool for pool in block_copy.POOLS}
    for name, each in compiled(target).items():
        pool, move = name.rsplit("-", 1)
        of_layer = each["block_bytes"] / pools[pool].num_layers
        most = {"copy": block_copy.NUM_COPIES * of_layer, "gather": 0, "scatter": 0}
        joined = block_copy.NUM_MOVED * each["block_bytes"]
        assert each["temp_bytes"] <= most.get(move, joined) + 2**22, each
