"""How long collectives take, and which links there are: arithmetic that one can redo on paper."""

from __future__ import annotations

import pytest

from jaxpage.aot.exchange import Collective, bytes_sent, seconds_of
from jaxpage.aot.targets import CHIPS, Links, Target, parse_target

# A GB/s, 3 steps of a millisecond.
LINKS = Links(bytes_per_second=1e9, steps=3, seconds_per_step=1e-3, seconds_per_call=0.0)


@pytest.mark.parametrize(
    ("kind", "num_bytes", "num_devices", "sent"),
    [
        ("all-reduce", 800, 8, 2 * 700),
        ("all-gather", 800, 8, 700),
        ("reduce-scatter", 800, 8, 700),
        ("all-to-all", 800, 8, 700),
        ("all-reduce", 100, 2, 100),
    ],
)
def test_all_but_its_own_share_is_sent(kind, num_bytes, num_devices, sent):
    assert bytes_sent(kind, num_bytes, num_devices) == sent


def test_bytes_and_steps_of_all_calls_add_up():
    once = Collective("all-gather", 1, 1e6)
    # 8 rows of a MB, of which each device sends 7/8; 3 steps.
    assert seconds_of(once, 8, 8, LINKS) == pytest.approx(7e-3 + 3e-3)
    sums = Collective("all-reduce", 5, 1e6)
    assert seconds_of(sums, 8, 8, LINKS) == pytest.approx(5 * 2 * (7e-3 + 3e-3))


def test_rows_are_padded_and_a_device_alone_sends_nothing():
    gather = Collective("all-gather", 1, 1e6)
    assert seconds_of(gather, 1, 4, LINKS) == seconds_of(gather, 4, 4, LINKS)
    assert seconds_of(gather, 5, 4, LINKS) == seconds_of(gather, 8, 4, LINKS)
    assert seconds_of(gather, 8, 1, LINKS) == 0.0


def test_each_call_has_its_price():
    links = Links(bytes_per_second=1e9, steps=0, seconds_per_step=0.0, seconds_per_call=1e-3)
    assert seconds_of(Collective("all-reduce", 7, 0), 8, 8, links) == pytest.approx(7e-3)


@pytest.mark.parametrize(
    ("target", "num_devices", "gigabytes", "steps"),
    [
        ("v5e:2x4", 2, 50, 1),  # neighbours: one link
        ("v5e:2x4", 4, 100, 2),
        ("v5e:2x4", 8, 100, 4),
        ("v5e:4x4", 16, 100, 8),
        ("v6e:2x4", 8, 200, 4),
        ("v5p:2x2x2", 4, 200, 2),
        ("v5p:2x2x2", 8, 300, 4),
        ("tpu7x:2x2x1", 2, 600, 1),  # the two halves of a chip
        ("tpu7x:2x2x1", 4, 100, 2),  # two chips
        ("tpu7x:2x2x1", 8, 200, 4),
        ("h200:8", 2, 450, 1),
        ("h200:8", 8, 450, 7),  # one way round
    ],
)
def test_links_between_the_first_devices_of_a_target(target, num_devices, gigabytes, steps):
    links = parse_target(target).links(num_devices)
    assert (links.bytes_per_second, links.steps) == (gigabytes * 1e9, steps)


def test_chips_in_a_row_have_the_links_of_one_axis():
    links = Target(CHIPS["v5e"], (1, 4)).links(4)
    assert (links.bytes_per_second, links.steps) == (50e9, 2)


def test_links_are_slower_than_memory():
    for chip in CHIPS.values():
        assert 4 < chip.bytes_per_second / chip.link_bytes_per_second < 40
