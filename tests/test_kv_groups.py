"""Which layers share block tables, and how many blocks a sequence holds at most."""

from __future__ import annotations

import pytest

from jaxpage.kv_groups import (
    Location,
    first_seen_block,
    group_layers,
    longest_fitting,
    most_blocks,
)


def gemma3(num_layers: int) -> tuple[int | None, ...]:
    """Of six layers the last sees everything, the others 1024 tokens."""
    return tuple(None if layer % 6 == 5 else 1024 for layer in range(num_layers))


@pytest.mark.parametrize("windows", [(None,) * 4, (64,) * 4])
def test_layers_that_see_equally_far_are_one_group(windows):
    groups = group_layers(windows, max_model_len=100)
    assert groups.windows == windows[:1] and groups.num_arrays == 4
    assert groups.layer_locations == tuple(Location(0, array) for array in range(4))


def test_a_window_that_no_sequence_outgrows_is_none():
    assert group_layers((100, None), max_model_len=100).windows == (None,)
    assert group_layers((99, None), max_model_len=100).windows == (99, None)


def test_layers_of_one_kind_are_cut_into_groups_of_equal_size():
    groups = group_layers(gemma3(48), max_model_len=32768)  # the 12B model: 40 and 8
    assert groups.windows == (1024,) * 5 + (None,) and groups.num_arrays == 8
    everywhere = [Location(g, a) for g in range(6) for a in range(8)]
    assert sorted(groups.layer_locations) == everywhere
    assert groups.layer_locations[5][:2] == (5, 0) and groups.layer_locations[47][:2] == (5, 7)


def test_the_last_group_of_a_kind_may_have_fewer_layers():
    groups = group_layers(gemma3(26), max_model_len=32768)  # the 1B model: 22 and 4
    assert groups.windows == (1024,) * 6 + (None,) and groups.num_arrays == 4
    assert len(set(groups.layer_locations)) == 26


def test_kinds_of_nearly_equal_number_are_a_group_each():
    groups = group_layers((8,) * 6 + (None,) * 5, max_model_len=100)
    assert groups.windows == (8, None) and groups.num_arrays == 6


def test_every_layer_has_a_place_of_its_own():
    windows = (8, None, 16, 8, None, 8, 16, 8, 8)
    groups = group_layers(windows, max_model_len=100)
    assert len(set(groups.layer_locations)) == len(windows)
    assert [groups.windows[location.group] for location in groups.layer_locations] == list(windows)


def test_layers_with_smaller_kv_share_arrays():
    """25 layers of size 8 have a window and 5 of size 4 none, as in Gemma 4 26B: two of these share an array."""
    windows = tuple(None if layer % 6 == 5 else 1024 for layer in range(30))
    sizes = tuple(4 if window is None else 8 for window in windows)
    groups = group_layers(windows, 32768, sizes)
    assert groups.windows == (1024,) * 9 + (None,) and groups.num_arrays == 3
    full = [groups.layer_locations[layer] for layer in range(5, 30, 6)]
    assert full == [Location(9, number // 2, number % 2) for number in range(5)]
    assert len(set(groups.layer_locations)) == 30
    assert all(location.part == 0 for location in set(groups.layer_locations) - set(full))


def test_layers_of_different_size_and_the_same_window_are_groups_of_their_own():
    groups = group_layers((None,) * 6, 100, (2, 1, 1, 2, 1, 1))
    assert groups.windows == (None, None) and groups.num_arrays == 2
    assert len(set(groups.layer_locations)) == 6


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("start", range(20))
def test_the_first_seen_block_has_the_first_key_that_a_token_sees(window, start):
    keys = [key for key in range(start + 1) if key > start - window]  # the attention's own rule
    assert first_seen_block(window, start, 4) == keys[0] // 4


def test_the_longest_sequence_that_fits_needs_no_more_than_there_is():
    for windows in [(None,), (7, None), (5, 9, None, None)]:
        for num_blocks in range(4, 60):
            sizes = {"block_size": 4, "max_query_len": 6}
            longest = longest_fitting(windows, 500, num_blocks=num_blocks, **sizes)
            assert longest < 500
            assert most_blocks(windows, longest + 1, **sizes) > num_blocks
            if longest:
                assert most_blocks(windows, longest, **sizes) <= num_blocks
