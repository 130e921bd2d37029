"""Steps of models with a recurrent state, compiled for TPUs and an H200 that are not there."""

from __future__ import annotations

import pytest

from tests.aot.compiling import missing, seen
from tests.aot.recurrent import ATTENTION_LAYERS, LAYERS, PLACES, WITH_DRAFTS, Place
from tests.aot.test_steps import MIB, check_places

pytestmark = pytest.mark.aot


@pytest.fixture(params=PLACES, ids=lambda place: place.name)
def place(request) -> Place:
    if reason := missing(request.param.name):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def found(place) -> list[dict]:
    """`decode`, `forward`, `copy states`; then `decode` and `forward` of an engine with drafts."""
    by_kind = {
        (each["name"].split()[0], each["name"].endswith(WITH_DRAFTS)): each
        for each in seen("recurrent", place.name).programs
    }
    kinds = [(kind, False) for kind in ("decode", "forward", "copy")]
    kinds += [(kind, True) for kind in ("decode", "forward")]
    found = [by_kind[kind] for kind in kinds]
    for decode, forward in (found[:2], found[3:]):
        assert decode["bucket"]["decode"] and not forward["bucket"]["decode"]
    return found


def test_pool_and_states_stay_where_they_are(found):
    check_places(found[:3])
    # Slots have drafts, too: 769 of them are padded to 776, and 18,624 numbers to 18,688.
    check_places(found[3:], padding=12 * MIB)
    for each in found:
        assert each["num_layers"] == LAYERS
        assert each["state_copies"] == [], each["name"]


def test_one_state_at_a_time_is_copied(found):
    """In each of six layers 2.1 MB, and inputs of the convolution."""
    copy = found[2]
    assert copy["temp_bytes"] <= 13 * MIB


def test_kernels_serve(place, found):
    """In steps with prompts a TPU's has two launches of attention, see `paged_attention.tpu`, and two that change
    states: by windows, and for rows of one token, which alone are a GPU's kernel's. Rows with drafts are a third of
    both.
    """
    programs = [*found[:2], *found[3:]]
    of_attention = [len(each["attention_calls"]) for each in programs]
    of_states = [each["state_calls"] for each in programs]
    recurrent = LAYERS - ATTENTION_LAYERS
    if place.target.startswith("h200"):
        assert min(of_attention) > 0 and of_states == [recurrent] * 4
    else:
        assert of_attention == [ATTENTION_LAYERS * number for number in (1, 2, 1, 3)]
        assert of_states == [recurrent * number for number in (1, 2, 2, 3)]
