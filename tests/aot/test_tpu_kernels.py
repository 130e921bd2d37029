"""The TPU kernel compiled by the compiler of TPUs, for four chips, on a machine that has none.

That it compiles says: Mosaic knows every operation, and registers, VMEM (a limit is given) and scalar memory suffice.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec

import pytest

from pallas_kernels.paged_attention import tune
from pallas_kernels.paged_attention.tpu_layout import VMEM_BYTES
from tests.aot import tpu

pytestmark = pytest.mark.aot


@cache
def compiled() -> dict[str, list[dict]]:
    """Of all chips, two processes at a time."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(tpu.TOPOLOGIES, pool.map(tpu.compile_all, tpu.TOPOLOGIES), strict=True))


@pytest.fixture(params=tpu.TOPOLOGIES)
def programs(request) -> dict[str, dict]:
    if find_spec("libtpu") is None:
        pytest.skip("the compiler of TPUs is missing: pip install 'jax[tpu]' (Linux on x86)")
    return {each["name"]: each for each in compiled()[request.param]}


def test_every_program_compiles(programs):
    assert list(programs) == [program.name for program in tpu.PROGRAMS]
    # The kernel asks for less VMEM than any chip has, and gets it.
    assert {each["name"]: each["limits"] for each in programs.values()} == {
        program.name: [VMEM_BYTES] * program.num_layers for program in tpu.PROGRAMS
    }


def test_tiles_as_large_as_any_that_are_tried_are_among_them():
    largest = [dict(program.sizes) for program in tpu.PROGRAMS if program.sizes]
    tried = [values for _, values in tune.CANDIDATES["tpu"]]
    assert largest == [{k: max(v) for values in tried for k, v in values.items()}] * len(largest)
    assert len(largest) >= 3


def test_the_pool_stays_where_it_is(programs):
    for each in programs.values():
        assert each["alias_bytes"] == each["pool_bytes"], each
        assert each["copies"] == [], each
        # Tiles of queries and results, where a head_dim of 96 is padded to 256 lanes; at most 144 MB of 1.6 GB here.
        assert each["temp_bytes"] < 12 * each["q_bytes"] + 2**23, each


def test_heads_on_several_chips_need_no_collective(programs):
    assert {
        each["name"]: each["collectives"] for each in programs.values() if each["collectives"]
    } == {}
