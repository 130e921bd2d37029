"""Steps of models with a recurrent state, compiled for TPUs and an H200 that are not there."""

from __future__ import annotations

import pytest

from tests.aot.compiling import missing, seen
from tests.aot.recurrent import ATTENTION_LAYERS, LAYERS, PLACES, Place
from tests.aot.test_steps import MIB, check_places

pytestmark = pytest.mark.aot


@pytest.fixture(params=PLACES, ids=lambda place: place.name)
def place(request) -> Place:
    if reason := missing(request.param.name):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def found(place) -> list[dict]:
    """`decode`, `forward`, `copy states`"""
    by_name = {each["name"].split()[0]: each for each in seen("recurrent", place.name).programs}
    decode, forward, copy = (by_name[name] for name in ("decode", "forward", "copy"))
    assert decode["bucket"]["decode"] and not forward["bucket"]["decode"]
    return [decode, forward, copy]


def test_pool_and_states_stay_where_they_are(found):
    check_places(found)
    for each in found:
        assert each["num_layers"] == LAYERS
        assert each["state_copies"] == [], each["name"]


def test_one_state_at_a_time_is_copied(found):
    """In each of six layers 2.1 MB, and inputs of the convolution."""
    *_, copy = found
    assert copy["temp_bytes"] <= 13 * MIB


def test_kernels_serve(place, found):
    """In steps with prompts a TPU's has two launches of attention, see `paged_attention.tpu`, and two that change
    states: by windows, and for rows of one token, which alone are a GPU's kernel's.
    """
    decode, forward = (len(each["attention_calls"]) for each in found[:2])
    of_states = [each["state_calls"] for each in found[:2]]
    recurrent = LAYERS - ATTENTION_LAYERS
    if place.target.startswith("h200"):
        assert decode > 0 and forward > 0 and of_states == [recurrent, recurrent]
    else:
        assert (decode, forward) == (ATTENTION_LAYERS, 2 * ATTENTION_LAYERS)
        assert of_states == [recurrent, 2 * recurrent]
