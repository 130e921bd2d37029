"""Steps with an EAGLE-3 head, compiled for TPUs and an H200 that are not there."""

from __future__ import annotations

import pytest

from pallas_kernels.paged_attention.gpu_prompts import FEW_TURNS
from tests.aot.compiling import missing, seen
from tests.aot.drafts import NUM_DRAFTS, PLACES, ROWS, Place
from tests.aot.heads import HEAD
from tests.aot.steps import FEW, MODELS
from tests.aot.test_steps import by_kind, check_places, check_temporaries

pytestmark = pytest.mark.aot


@pytest.fixture(params=PLACES, ids=lambda place: place.name)
def place(request) -> Place:
    if reason := missing(request.param.name):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def found(place) -> list[dict]:
    """`forward`, `decode` and `draft`."""
    forward, decode, draft = sorted(
        seen("heads", place.name).programs, key=lambda each: "fdd".index(each["name"][0])
    )
    if decode["name"] > draft["name"]:
        decode, draft = draft, decode
    return [forward, decode, draft]


def test_they_are_programs_of_the_same_model(found):
    forward, decode, draft = found
    rows = draft["max_num_seqs"]
    assert forward["bucket"]["num_tokens"] >= ROWS * (1 + NUM_DRAFTS)
    assert (decode["name"], draft["name"]) == (f"decode R={rows}", f"draft R={rows}")
    assert all(each["num_layers"] == FEW for each in found)


def test_pools_and_state_stay_where_they_are(found):
    """The head's pool, too, and what it reads of the model."""
    check_places(found)
    assert all(each["pool_bytes"] > FEW * each["array_bytes"] for each in found)


def test_temporaries_are_those_of_other_steps(place, found):
    check_temporaries(place, found)


def test_attention_is_the_kernel(place, found):
    """In `forward` and `decode` the head only writes KV, of the pair before a row's tokens and of these."""
    calls = [len(each["attention_calls"]) for each in found]
    if place.target == "h200":
        assert calls[0] / FEW in {5 + 2 * more for more in range(FEW_TURNS)}
        assert calls[1:] == [2 * FEW, 2]
    else:
        assert calls == [3 * FEW + 2, FEW + 2, 1]


def test_devices_exchange_what_the_head_needs_besides(place, found):
    """The embeddings of its pairs, in one call with the model's; and where it drafts the logits of the tokens that it
    knows, which each device spreads over its share of the vocabulary.
    """
    if place.num_devices == 1:
        assert not any(each["exchanges"] for each in found)
        return
    forward, decode, draft = found
    model, rows = MODELS[place.whole], draft["max_num_seqs"]
    row_bytes = 2 * model["hidden_size"]
    tokens = forward["bucket"]["num_tokens"]
    of_embedding = (2 * tokens + forward["bucket"]["num_rows"]) * row_bytes
    assert by_kind(forward["exchanges"]) == {"all-reduce": (1 + 2 * FEW, of_embedding)}
    of_shares = (1, 4 * rows * model["vocab_size"] // place.num_devices)
    in_decode, in_draft = by_kind(decode["exchanges"]), by_kind(draft["exchanges"])
    assert in_decode["all-to-all"] == in_draft["all-to-all"] == of_shares
    assert in_decode["all-reduce"] == (1 + 2 * FEW + 2, 3 * rows * row_bytes)
    assert in_draft["all-gather"] == (1, 4 * rows * HEAD["draft_vocab_size"])
    assert in_draft["all-reduce"] == (3 + 1, rows * row_bytes)
