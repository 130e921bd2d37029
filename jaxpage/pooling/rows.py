"""Packs texts into rows of a few lengths, and rows into launches of a few sizes.

Knows nothing about texts except their lengths.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

SHORTEST = 64  # tokens in the shortest row
_FEW_ROWS = 8
TOKENS_PER_TEXT = 8  # a launch of T tokens holds T / 8 texts


@dataclass(frozen=True, order=True)
class Size:
    """B rows of L tokens."""

    length: int
    num_rows: int

    def name(self, *, per_token: bool) -> str:
        return f"{'tokens' if per_token else 'texts'} B={self.num_rows} L={self.length}"

    @property
    def num_texts(self) -> int:
        """The most texts in a launch."""
        return self.num_rows * texts_per_row(self.length)


@dataclass(frozen=True)
class Place:
    """The position of a text in a launch: in row `row`, starting at token `start`."""

    text: int  # index of the text
    row: int
    start: int


@dataclass(frozen=True)
class Launch:
    """Texts that are computed together."""

    size: Size
    places: list[Place]


def texts_per_row(length: int) -> int:
    return length // TOKENS_PER_TEXT


def make_sizes(*, max_len: int, max_tokens: int) -> tuple[Size, ...]:
    """All sizes for texts of up to `max_len` tokens. Lengths double; rows are 1, a few, or `max_tokens` / length."""
    longest = _multiple(max_len, SHORTEST if max_len > SHORTEST else TOKENS_PER_TEXT)
    lengths = [min(SHORTEST, longest)]
    while lengths[-1] < longest:
        lengths.append(min(2 * lengths[-1], longest))
    sizes = []
    for length in lengths:
        most = max(1, max_tokens // length)
        rows = {1, most} | ({_FEW_ROWS} if most >= 2 * _FEW_ROWS else set())
        sizes += [Size(length, n) for n in sorted(rows)]
    return tuple(sizes)


def pack(lengths: Sequence[int], sizes: Sequence[Size]) -> list[Launch]:
    """Best fit, longest first: each text goes where it leaves the least room. Texts too long for any row are left out.

    A text that fits into no open row opens one of the shortest sufficient length.
    """
    known = sorted({size.length for size in sizes})
    rows: list[_Row] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    fitting = (text for text, length in enumerate(lengths) if length <= known[-1])
    for text in sorted(fitting, key=lambda i: -lengths[i]):
        length = lengths[text]
        at = bisect.bisect_left(room, (length, -1))
        if at < len(room):
            left, number = room.pop(at)
            row = rows[number]
        else:
            row_len = known[bisect.bisect_left(known, length)]
            left, number = row_len, len(rows)
            row = _Row(row_len, [])
            rows.append(row)
        row.texts.append((text, row.length - left))
        if left > length and len(row.texts) < texts_per_row(row.length):
            bisect.insort(room, (left - length, number))
    return _launches(rows, sizes)


@dataclass
class _Row:
    length: int
    texts: list[tuple[int, int]]  # (text, start)


def _launches(rows: Sequence[_Row], sizes: Sequence[Size]) -> list[Launch]:
    launches = []
    for length in sorted({row.length for row in rows}, reverse=True):
        of_length = [row for row in rows if row.length == length]
        counts = sorted(size.num_rows for size in sizes if size.length == length)
        while of_length:
            num_rows = _best(counts, len(of_length))
            taken, of_length = of_length[:num_rows], of_length[num_rows:]
            places = [
                Place(text, i, start) for i, row in enumerate(taken) for text, start in row.texts
            ]
            launches.append(Launch(Size(length, num_rows), places))
    return launches


def _best(counts: Sequence[int], wanted: int) -> int:
    """The smallest count that is enough, unless at least half would be padding: then the largest that can be filled."""
    holding = [n for n in counts if n >= wanted]
    if holding and wanted * 2 > holding[0]:
        return holding[0]
    return max((n for n in counts if n <= wanted), default=counts[0])


def _multiple(number: int, unit: int) -> int:
    return -(-number // unit) * unit
