"""Which layers share block tables, and how many blocks a sequence holds at most."""

from __future__ import annotations

import pytest

from jaxpage.kv_groups import first_seen_block, group_layers, longest_fitting, most_blocks


def gemma3(num_layers: int) -> tuple[int | None, ...]:
    """Of six layers the last sees everything, the others 1024 tokens."""
    return tuple(None if layer % 6 == 5 else 1024 for layer in range(num_layers))


@pytest.mark.parametrize("windows", [(None,) * 4, (64,) * 4])
def test_layers_that_see_equally_far_are_one_group(windows):
    groups = group_layers(windows, max_model_len=100)
    assert groups.windows == windows[:1] and groups.num_arrays == 4
    assert groups.layer_locations == ((0, 0), (0, 1), (0, 2), (0, 3))


def test_a_window_that_no_sequence_outgrows_is_none():
    assert group_layers((100, None), max_model_len=100).windows == (None,)
    assert group_layers((99, None), max_model_len=100).windows == (99, None)


def test_layers_of_one_kind_are_cut_into_groups_of_equal_size():
    groups = group_layers(gemma3(48), max_model_len=32768)  # the 12B model: 40 and 8
    assert groups.windows == (1024,) * 5 + (None,) and groups.num_arrays == 8
    assert sorted(groups.layer_locations) == [(g, a) for g in range(6) for a in range(8)]
    assert groups.layer_locations[5] == (5, 0) and groups.layer_locations[47] == (5, 7)


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
    assert [groups.windows[group] for group, _ in groups.layer_locations] == list(windows)


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
