"""Steps with drafts, compiled for TPUs and an H200 that are not there."""

from __future__ import annotations

import pytest

from pallas_kernels.paged_attention.gpu_prompts import FEW_TURNS
from tests.aot.compiling import missing, seen
from tests.aot.drafts import PLACES, ROWS, Place
from tests.aot.steps import FEW
from tests.aot.test_steps import check_collectives, check_places, check_temporaries

pytestmark = pytest.mark.aot


@pytest.fixture(params=PLACES, ids=lambda place: place.name)
def place(request) -> Place:
    if reason := missing(request.param.name):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def found(place) -> list[dict]:
    return seen("drafts", place.name).programs


def test_they_are_two_programs_of_the_same_model(found):
    forward, verify = found
    assert forward["bucket"]["num_tokens"] >= 5 * ROWS and not verify["bucket"]
    assert verify["name"] == f"verify R={verify['max_num_seqs']}"
    assert forward["num_layers"] == verify["num_layers"] == FEW


def test_pool_and_state_stay_where_they_are(found):
    check_places(found)


def test_temporaries_are_those_of_other_steps(place, found):
    """The logits of one token of each row at a time."""
    check_temporaries(place, found)


def test_attention_is_the_kernel(place, found):
    forward, verify = found
    calls = len(forward["attention_calls"]) / FEW
    if place.target == "h200":
        assert calls in {5 + 2 * more for more in range(FEW_TURNS)}
    else:
        assert calls == 2
    assert verify["attention_calls"] == []


def test_devices_exchange_what_other_steps_do(place, found):
    check_collectives(place, found)
