"""The TPU kernel compiled by the compiler of TPUs, for three chips, on a machine that has none.

That it compiles says: Mosaic knows every operation, and registers, VMEM (a limit is given) and scalar memory suffice.
"""

from __future__ import annotations

import pytest

from pallas_kernels.paged_attention import tune
from pallas_kernels.paged_attention.tpu_layout import VMEM_BYTES
from tests.aot.compiling import missing, seen_on
from tests.aot.paged_attention_tpu import CALLS, TARGETS

pytestmark = pytest.mark.aot


@pytest.fixture(params=TARGETS)
def programs(request) -> dict[str, dict]:
    if reason := missing(request.param):
        pytest.skip(reason)
    found = seen_on("paged_attention_tpu", TARGETS)[request.param].programs
    assert len(found) == len({each["name"] for each in found})
    return {each["name"]: each for each in found}


def test_every_program_compiles(programs):
    # The kernel asks for less VMEM than any chip has, and gets it; among prompts, rows with one query have a launch.
    assert {each["name"]: each["limits"] for each in programs.values()} == {
        call.name: [VMEM_BYTES] * call.num_layers * (1 if call.one_query_per_row else 2)
        for call in CALLS
    }


def test_tiles_as_large_as_any_that_are_tried_are_among_them():
    largest = [dict(call.sizes) for call in CALLS if call.sizes]
    tried = [values for _, values in tune.CANDIDATES["tpu"]]
    assert largest == [{k: max(v) for values in tried for k, v in values.items()}] * len(largest)
    assert len(largest) >= 3


def test_the_pool_stays_where_it_is(programs):
    of_latents = [call.name for call in CALLS if call.value_dim]
    for each in programs.values():
        assert each["alias_bytes"] == each["pool_bytes"], each
        assert each["copies"] == [], each
        # Queries, results, and new keys and values, which are as large where every head has its own.
        copies = 4
        if each["name"] in of_latents:
            # Steps have such queries by head. Here they are brought into that order, in wider rows.
            copies = 7
        assert each["temp_bytes"] < copies * each["q_bytes"] + 2**23, each


def test_heads_that_are_no_whole_registers_need_no_tiles_in_hbm(programs):
    """There they would be padded, before and after: more than three times the queries' bytes."""
    for name in ("qwen-0.5b", "gpt-oss", "llama-8b-int4", "head-dim-80", "head-dim-192"):
        assert programs[name]["temp_bytes"] < 3 * programs[name]["q_bytes"], programs[name]


def test_heads_on_several_chips_need_no_collective(programs):
    assert {
        each["name"]: each["exchanges"] for each in programs.values() if each["exchanges"]
    } == {}
