"""What the schedules of the kernels for TPUs take, against what they took when the ceilings were written."""

from __future__ import annotations

import pytest

from tests.aot.compiling import missing, seen_on
from tests.aot.schedules import SLACK, TARGETS, ceilings, exceeded, kept

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("target", TARGETS)
def test_no_loop_takes_more_than_it_did(target):
    """After a change that is worth it: `python -m tests.aot.evidence schedules && python -m tests.aot.schedules`."""
    if reason := missing(target):
        pytest.skip(reason)
    found = {
        each.pop("name"): each for each in map(dict, seen_on("schedules", TARGETS)[target].programs)
    }
    assert exceeded(found, ceilings()[target]) == {}


@pytest.mark.parametrize("target", TARGETS)
def test_a_turn_takes_the_branches_of_its_keys(target):
    """One tile of a fetch takes less than all; with prompts, whose fetch is one tile, all take less than a part, which
    has a mask. Branches that are not recognised any more may count too little, too.
    """
    found = kept()[target]
    of_one_head = found["paged_attention_tpu llama-8b-of-tp8-decode"]
    assert of_one_head["part"] < 0.8 * of_one_head["whole"]
    of_prompts = found["paged_attention_tpu llama-8b"]
    assert of_prompts["whole"] < of_prompts["part"]
    for name, ceiling in ceilings()[target].items():
        for figure in ceiling.keys() & {"whole", "part"}:
            assert found[name][figure] > ceiling[figure] / SLACK, (name, figure)


def test_what_exceeds_a_ceiling_is_named():
    ceiling = {"a": {"bundles": 1000, "spills": 0}, "b": {"bundles": 10, "spills": 4}}
    found = {"a": {"bundles": int(1000 * SLACK), "spills": 1}, "b": {"bundles": 11, "spills": 4}}
    assert exceeded(found, ceiling) == {"a spills": (1, 0), "b bundles": (11, 10)}
    assert exceeded({"c": {"bundles": 1}}, ceiling) == {
        "a": "not compiled",
        "b": "not compiled",
        "c": "no ceiling",
    }
