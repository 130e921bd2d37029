"""Steps with quantised weights, compiled for a v6e and an H200 that are not there."""

from __future__ import annotations

import pytest

from tests.aot.compiling import missing, seen
from tests.aot.quantised import PLACES, Place
from tests.aot.steps import FEW
from tests.aot.test_steps import check_places, check_registers

pytestmark = pytest.mark.aot


@pytest.fixture(params=PLACES, ids=lambda place: place.name)
def place(request) -> Place:
    if reason := missing(request.param.name):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def found(place) -> list[dict]:
    return seen("quantised", place.name).programs


def test_every_product_of_a_layer_is_the_kernel(place, found):
    """q, k and v, o, gate and up, down: on one device joined as four products."""
    of_layer = 4 if place.num_devices == 1 else 7
    assert [each["products"] for each in found] == [of_layer * FEW] * 2


def test_weights_stay_as_small_as_they_are_stored(place, found):
    """4 bits and, for each 128 of them, a scale and a zero; 8 bits and a scale. Embedding and head are bfloat16."""
    model = place.model
    size, inner = model["hidden_size"], model["intermediate_size"]
    kv = model["num_key_value_heads"] * size // model["num_attention_heads"]
    of_layers = FEW * (2 * size * size + 2 * size * kv + 3 * size * inner)
    bytes_of_one = {"awq": 0.5 + 5 / 128, "fp8": 1 + 4 / 128}[place.method]
    expected = of_layers * bytes_of_one + 2 * 2 * size * model["vocab_size"]
    for each in found:
        assert each["weight_bytes"] == pytest.approx(expected / place.num_devices, rel=1e-3)


def test_no_weight_is_dequantised_in_memory(place, found):
    """A decode step has room for some arrays of a device's logits, not for one of the MLP's weights in bfloat16 too."""
    decode, _ = found
    model = place.model
    logits = decode["bucket"]["num_rows"] * model["vocab_size"] * 4 // place.num_devices
    weight = 2 * model["hidden_size"] * model["intermediate_size"] // place.num_devices
    assert decode["temp_bytes"] < min(5.5 * logits, 2 * logits + weight)


def test_pool_and_state_stay_where_they_are(found):
    check_places(found)


def test_registers_suffice(place, found):
    check_registers(place, found)
