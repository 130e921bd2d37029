"""Texts packed into rows: every text once, within the sizes, with little padding."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpage.pooling.rows import make_sizes, pack, texts_per_row


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), max_size=80),
    max_tokens=st.sampled_from([1, 64, 512, 2048]),
)
def test_every_text_has_a_place_of_its_own(lengths, max_tokens):
    sizes = make_sizes(max_len=300, max_tokens=max_tokens)
    launches = pack(lengths, sizes)
    places = [(n, place) for n, launch in enumerate(launches) for place in launch.places]
    assert sorted(place.text for _, place in places) == list(range(len(lengths)))
    taken = set()
    for number, place in places:
        size = launches[number].size
        assert size in sizes and 0 <= place.row < size.num_rows
        assert place.start + lengths[place.text] <= size.length
        slots = {(number, place.row, place.start + i) for i in range(lengths[place.text])}
        assert not slots & taken, "texts overlap"
        taken |= slots
    for launch in launches:
        assert len(launch.places) <= launch.size.num_texts
        rows = [place.row for place in launch.places]
        assert all(rows.count(row) <= texts_per_row(launch.size.length) for row in rows)


def test_sizes_double_up_to_the_longest_text():
    sizes = make_sizes(max_len=512, max_tokens=2048)
    assert sorted({size.length for size in sizes}) == [64, 128, 256, 512]
    assert [size.num_rows for size in sizes if size.length == 64] == [1, 8, 32]
    assert {size.length for size in make_sizes(max_len=20, max_tokens=64)} == {24}
    assert max(make_sizes(max_len=8192, max_tokens=2048)).num_rows == 1


def test_a_thousand_short_texts_have_little_padding():
    lengths = [8 + (i * 37) % 57 for i in range(1000)]
    launches = pack(lengths, make_sizes(max_len=512, max_tokens=2048))
    padded = sum(launch.size.length * launch.size.num_rows for launch in launches)
    assert padded < 1.05 * sum(lengths)
