"""Steps with drafts, compiled for TPUs and an H200 that are not there."""

from __future__ import annotations

import pytest

from pallas_kernels.paged_attention.gpu_prompts import FEW_TURNS
from tests.aot.compiling import missing, seen
from tests.aot.drafts import NUM_DRAFTS, PLACES, ROWS, Place
from tests.aot.steps import FEW, MODELS
from tests.aot.test_steps import by_kind, check_collectives, check_places, check_temporaries

pytestmark = pytest.mark.aot


@pytest.fixture(params=PLACES, ids=lambda place: place.name)
def place(request) -> Place:
    if reason := missing(request.param.name):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def found(place) -> list[dict]:
    """`forward`, `verify` of few rows and of all, `forward` with a draft model, and `draft`."""
    by_name = {each["name"]: each for each in seen("drafts", place.name).programs}
    few, verify = sorted((n for n in by_name if n.startswith("verify")), key=len)
    with_model = next(name for name in by_name if "with a draft model" in name)
    forward = with_model.removesuffix(" with a draft model")
    draft = verify.replace("verify", "draft")
    assert len(by_name) == 5
    return [by_name[name] for name in (forward, few, verify, with_model, draft)]


def test_they_are_programs_of_the_same_model(found):
    forward, few, verify, same_forward, draft = found
    assert forward["bucket"]["num_tokens"] >= 5 * ROWS and not verify["bucket"]
    assert forward["bucket"] == same_forward["bucket"]
    assert (few["name"], verify["name"]) == ("verify R=8", f"verify R={verify['max_num_seqs']}")
    assert draft["name"] == f"draft R={draft['max_num_seqs']}"
    assert all(each["num_layers"] == FEW for each in found)


def test_pools_and_state_stay_where_they_are(found):
    """The draft model's pool, too."""
    check_places(found)
    _, _, _, forward, draft = found
    assert forward["pool_bytes"] == draft["pool_bytes"] > FEW * draft["array_bytes"]


def test_temporaries_are_those_of_other_steps(place, found):
    """The logits of one token of each row at a time, or of all if there are few rows."""
    forward, few, verify, same_forward, draft = found
    check_temporaries(place, [forward, verify, same_forward, draft])
    all_logits = 8 * (1 + NUM_DRAFTS) * MODELS[place.whole]["vocab_size"] * 4
    few = few | {"temp_bytes": few["temp_bytes"] - 2 * all_logits}
    check_temporaries(place, [few])


def test_attention_is_the_kernel(place, found):
    """That of both models; only the keys and values of the draft model's last layer are needed after `forward`."""
    forward, few, verify, same_forward, draft = found
    calls = [len(each["attention_calls"]) for each in found]
    if place.target == "h200":
        of_layer = calls[0] / FEW
        assert of_layer in {5 + 2 * more for more in range(FEW_TURNS)}
        assert calls[3] == of_layer * (2 * FEW - 1) and calls[4] == 2 * FEW
    else:
        # The last two of three would only read, see `paged_attention.tpu`.
        assert (calls[0], calls[3], calls[4]) == (3 * FEW, 6 * FEW - 2, FEW)
    assert few["attention_calls"] == verify["attention_calls"] == []


def test_devices_exchange_what_other_steps_do(place, found):
    """The draft model's logits are divided like the model's."""
    forward, few, verify, _, draft = found
    check_collectives(place, [forward, verify])
    if place.num_devices == 1:
        assert not any(each["exchanges"] for each in found)
        return
    logits = verify["max_num_seqs"] * MODELS[place.whole]["vocab_size"] * 4
    assert by_kind(draft["exchanges"])["all-to-all"] == (1, logits // place.num_devices)
    assert by_kind(few["exchanges"])["all-to-all"][0] == 1
    largest = max(num_bytes for _, _, num_bytes in draft["exchanges"])
    assert largest == logits // place.num_devices
