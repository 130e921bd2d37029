"""How `--tp auto` compares divisions of a target into replicas."""

from __future__ import annotations

import pytest

from jaxpage.aot.replicas import Division, best, show_divisions, sizes_of
from tests.aot.test_estimate import GB, measured


def division(num_devices: int, **changes) -> Division:
    """Of 4 devices; weights of 4 GB, of which each device has a share."""
    share = {
        "num_devices": num_devices,
        "num_chips": 4,
        "weight_bytes": 4 * GB // num_devices,
        "bytes_per_step": 4 * GB // num_devices,
        "block_bytes": 10**6 // num_devices,
        "flops_per_token": 3 * GB // num_devices,
        "experts": None,
        "encoder": None,
        "config": {"block_size": 100} | changes.pop("config", {}),
    }
    return Division(measured(**share | changes))


def exchanging(milliseconds: float) -> dict:
    """What takes so long, whatever the batch."""
    links = {"bytes_per_second": 1e9, "steps": 0, "seconds_per_step": 0.0}
    links["seconds_per_call"] = milliseconds / 1000
    return {"exchange": [["all-gather", 1, 0]], "links": links}


def test_all_devices_are_used_by_replicas():
    alone, pair = division(1), division(2)
    assert sizes_of(8) == [1, 2, 4, 8]
    assert (alone.num_replicas, pair.num_replicas) == (4, 2)
    assert alone.length == 1000 and alone.full_batch == 64
    # 64 sequences of 10 blocks of a MB, at 1 TB/s.
    assert alone.step(64).total == pytest.approx(4 + 0.64)
    assert alone.tokens_per_second == pytest.approx(4 * 64 / 4.64e-3)
    assert alone.tokens_per_second_per_chip == pytest.approx(64 / 4.64e-3)


def test_a_token_has_a_slot_in_each_kv_cache_group():
    alone = division(1)
    whole, in_groups = alone.num_kv_tokens, division(1, kv_groups=[[250, 14], [None, 14]])
    assert whole == alone.estimate.num_blocks * 100
    assert in_groups.num_kv_tokens == whole // 2


def test_the_shortest_step_is_taken_if_it_gives_up_little():
    """Sharing halves each step, and each replica has as large a batch: without exchange nothing is lost by it."""
    alone, pair, all_four = division(1), division(2), division(4)
    assert best([alone, pair, all_four]) is all_four
    # 4.64 ms alone; 2.32 for two, and of them all but a tenth must be left of the tokens.
    assert best([alone, division(2, **exchanging(0.25))]) is not alone
    assert best([alone, division(2, **exchanging(0.27))]) is alone


def test_room_for_more_sequences_is_worth_its_exchange():
    """Alone, weights leave room for 11 sequences a device; two devices have room for 64."""
    crowded = {"weight_bytes": 7.7 * GB, "bytes_per_step": 7.7 * GB, "blocks": {"1000": [10, 10]}}
    alone = division(1, **crowded, config={"max_model_len": 1000})
    assert alone.estimate.fits and alone.full_batch < 12
    pair = division(2, weight_bytes=3.9 * GB, bytes_per_step=3.9 * GB, **exchanging(2))
    assert best([alone, pair]) is pair


def test_what_does_not_fit_is_shown_and_not_chosen():
    small, large = division(1, weight_bytes=8 * GB), division(2)
    assert best([small, large]) is large and best([small]) is None
    lines = show_divisions([small, large]).splitlines()
    assert " no " in lines[3] and " yes " in lines[4]
    assert "Best: --tp 2, 2 replica(s)" in lines[-1] and "90%" in lines[-1]


NOT_INT8 = {"in_int8": {"weight_bytes": None, "block_bytes": None}}


@pytest.mark.parametrize(
    ("pair", "advice"),
    [
        (
            {"weight_bytes": 7.7 * GB},
            " The closest is --tp 2; it would fit with --max-model-len 100 or --quantization int8.",
        ),
        (
            {"weight_bytes": 8 * GB},
            " The closest is --tp 2; it would fit with --quantization int8.",
        ),
        ({"weight_bytes": 8 * GB} | NOT_INT8, ""),  # more devices alone would help
        (
            {"weight_bytes": 200 * GB} | NOT_INT8,
            " It takes a larger chip: neither a shorter length, smaller steps, int8 nor 8 times the devices is enough.",
        ),
    ],
)
def test_what_would_fit_is_said_if_nothing_does(pair, advice):
    divisions = [division(1, weight_bytes=8 * GB), division(2, **pair)]
    end = show_divisions(divisions).splitlines()[-1]
    assert end == f"None fits: no sequence of max_model_len=100000.{advice}"


def test_the_parts_of_a_step_are_shown():
    line = show_divisions([division(2, **exchanging(0.5))]).splitlines()[3]
    assert "2.50 (2.00 + 0.01 + 0.50)" in line  # a sequence alone
    assert "2.82 (2.00 + 0.32 + 0.50)" in line  # and 64
