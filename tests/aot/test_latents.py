"""Steps with multi-head latent attention, compiled for TPUs and an H200 that are not there."""

from __future__ import annotations

import pytest

from tests.aot.compiling import missing, seen
from tests.aot.latents import LAYERS, PLACES, Place
from tests.aot.test_steps import check_places

pytestmark = pytest.mark.aot


@pytest.fixture(params=PLACES, ids=lambda place: place.name)
def place(request) -> Place:
    if reason := missing(request.param.name):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def found(place) -> list[dict]:
    """`decode`, `forward` and, where the MTP layer drafts, `draft`"""
    programs = seen("latents", place.name).programs
    by_name = {each["name"].split()[0]: each for each in programs}
    kinds = ["decode", "forward", "draft"][: len(programs)]
    assert by_name.keys() == set(kinds) and (len(kinds) == 3) == (place.whole == "MTP")
    return [by_name[kind] for kind in kinds]


def test_pool_and_state_stay_where_they_are(found):
    check_places(found)
    assert all(each["num_layers"] == LAYERS for each in found)


def test_attention_of_all_layers_is_the_kernel(place, found):
    calls = [len(each["attention_calls"]) for each in found]
    if place.target == "h200":  # two launches in each layer, which take rows with one token
        assert calls == [2 * LAYERS, 2 * LAYERS]
    elif place.whole == "MTP":
        # In `decode` and `forward` the MTP layer only writes KV. Rows with drafts have a third launch.
        assert calls == [LAYERS + 2, 3 * LAYERS + 2, 1]
    else:
        # Two launches, see `paged_attention.tpu`.
        assert calls == [LAYERS, 2 * LAYERS]


def test_results_of_experts_come_in_the_order_that_they_are_added_up_in(place, found):
    """On a v6e slices of [T, k, E] took 0.66 ms for 2,048 tokens and six experts, by XLA's estimate."""
    taken = [each["slices_of_experts"] for each in found]
    # On a GPU XLA fuses slices with their sum, whatever the order.
    assert place.target == "h200" or not any(taken)
