"""The pictures of one prompt, and where they stand in it: what a request has of them.

Knows token indices. Must not know the engine, nor how a picture becomes embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpage.pictures.border import Expanded, Picture


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptPictures:
    """Pictures in the order of the prompt. The embeddings of a picture stand in the place of the tokens of its span.

    A video whose frames stand apart is a picture for each row of them.
    """

    pictures: tuple[Picture, ...]
    spans: tuple[tuple[int, int], ...]  # (first token, number of tokens) of each, ascending
    # int32[3, P]: rotary positions of the first P tokens. Those of all later ones, generated ones included, are their
    # index plus `position_offset`.
    positions: np.ndarray | None = None
    position_offset: int = 0

    @classmethod
    def of(cls, expanded: Expanded, pictures: Sequence[Picture]) -> PromptPictures:
        """Those of an expanded prompt. Raises ValueError if spans and pictures do not match."""
        parts = [part for picture in pictures for part in picture.parts]
        wanted = [part.num_tokens for part in parts]
        if [number for _, number in expanded.spans] != wanted:
            raise ValueError(
                f"the spans {expanded.spans} are not those of pictures of {wanted} tokens"
            )
        order = sorted(range(len(wanted)), key=lambda i: expanded.spans[i][0])
        offset, positions = expanded.next_position - len(expanded.token_ids), expanded.positions
        if positions is not None:
            regular = np.arange(positions.shape[1], dtype=np.int32) + offset
            others = np.flatnonzero((positions != regular).any(0))
            count = int(others[-1]) + 1 if len(others) else 0
            positions = np.ascontiguousarray(positions[:, :count], np.int32)
        return cls(
            pictures=tuple(parts[i] for i in order),
            spans=tuple(expanded.spans[i] for i in order),
            positions=positions,
            position_offset=offset,
        )

    def within(self, start: int, end: int) -> Iterator[tuple[Picture, int, int]]:
        """(picture, first token, number of tokens) of the spans that touch tokens `start .. end`."""
        for picture, (first, number) in zip(self.pictures, self.spans, strict=True):
            if first < end and start < first + number:
                yield picture, first, number

    @property
    def content_hashes(self) -> set[bytes]:
        """The content hashes of the pictures, each once."""
        return {picture.content_hash for picture in self.pictures}
