"""Steps of models whose layers differ in heads, compiled for TPUs and an H200 that are not there."""

from __future__ import annotations

import pytest

from tests.aot.compiling import missing, seen
from tests.aot.gemma4 import LAYERS, PLACES, Place
from tests.aot.test_steps import check_places

pytestmark = pytest.mark.aot


@pytest.fixture(params=PLACES, ids=lambda place: place.name)
def place(request) -> Place:
    if reason := missing(request.param.name):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def found(place) -> list[dict]:
    """`decode`, `forward`"""
    decode, forward = seen("gemma4", place.name).programs
    assert decode["bucket"]["decode"] and not forward["bucket"]["decode"]
    return [decode, forward]


def test_pool_and_state_stay_where_they_are(found):
    """Layers read and write parts of the arrays, which nothing copies."""
    check_places(found)
    assert all(each["num_layers"] == LAYERS for each in found)


def test_attention_of_all_layers_is_the_kernel(place, found):
    decode, forward = (len(each["attention_calls"]) for each in found)
    if place.target == "h200":
        # Rows with one query, and what adds them up; prompts; and cut keys twice in the two layers without a window.
        assert (decode, forward) == (2 * LAYERS, 3 * LAYERS + 2 * 2)
    else:
        # Two launches, see `paged_attention.tpu`.
        assert (decode, forward) == (LAYERS, 2 * LAYERS)
