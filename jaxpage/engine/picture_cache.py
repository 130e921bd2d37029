"""Which rows of the device's array of embeddings belong to which picture: the encoder's cache, by content.

What this file knows: pictures as hashes and numbers of embeddings, and which tokens of a sequence they stand for. What
it must never learn: pixels, and how they are encoded (the runner's).

A picture is encoded in the launch in which a row first needs it, before that row runs, and stays until its rows are
needed for another. Launches run in order, so rows may be given away as soon as no row of the same plan reads them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

import numpy as np

from jaxpage.pictures.border import Picture
from jaxpage.plan import StepPlan
from jaxpage.request import Request, Sequence

NULL_ROW = 0  # takes the writes of padding; stands for no picture


class PictureCache:
    """Gives rows to pictures, and says how far a sequence may be computed with what is encoded."""

    def __init__(self, num_rows: int, *, budget: int, whole: bool = False):
        """`num_rows` of the array, the null row included. `budget`: embeddings that a step encodes; one picture may be
        larger. `whole`: the tokens of a picture see each other, so a step computes all that is left of it or none; its
        tokens are at most `budget` then, which is the step's too.
        """
        self.num_rows = num_rows - 1  # that pictures can have
        self.num_encoded = 0  # pictures, since start
        self._budget, self._whole = budget, whole
        self._free = list(range(num_rows - 1, NULL_ROW, -1))
        # Content hash -> int32[num_tokens] rows; the least recently used first.
        self._rows: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._wanted: Counter[bytes] = Counter()  # by how many unfinished requests
        self._halfway: dict[Sequence, bytes] = {}  # pictures that were computed in part
        self._in_plan: set[bytes] = set()  # read by rows of the plan that is being made
        self._left = budget  # embeddings that the plan may still encode

    def check(self, request: Request) -> None:
        """Raise ValueError for a request with a picture that never fits."""
        for picture in () if request.pictures is None else request.pictures.pictures:
            if picture.num_tokens > self.num_rows:
                raise ValueError(
                    f"a picture takes {picture.num_tokens} embeddings, but mm_encoder_cache_bytes holds "
                    f"{self.num_rows}; make the picture smaller, or raise mm_encoder_cache_bytes"
                )
            if self._whole and picture.num_tokens > self._budget:
                raise ValueError(
                    f"a picture takes {picture.num_tokens} tokens, which this model computes in one step, but a step "
                    f"has {self._budget}: raise max_num_batched_tokens"
                )

    def add(self, request: Request) -> None:
        """A request begins: its pictures are kept before those of nobody."""
        if request.pictures is not None:
            self._wanted.update(request.pictures.content_hashes)

    def remove(self, request: Request) -> None:
        """A request has ended."""
        if request.pictures is not None:
            self._wanted -= Counter(request.pictures.content_hashes)

    def begin_plan(self) -> None:
        """The last plan was launched, or will never be."""
        self._in_plan.clear()
        self._left = self._budget

    def reach(self, plan: StepPlan, sequence: Sequence, start: int, count: int) -> int:
        """How many of `count` tokens from `start` a sequence can compute in this plan; perhaps none.

        Has the plan encode the pictures that this takes; the caller adds the row.
        """
        pictures, end = sequence.request.pictures, start + count
        self._halfway.pop(sequence, None)
        if pictures is None:
            return count
        for picture, first, number in pictures.within(start, end):
            if self._whole and end < first + number:
                return max(first - start, 0)
            key = picture.content_hash
            if key not in self._rows:
                if not self._may_encode(picture):
                    return max(first - start, 0)
                self._encode(plan, picture)
            self._rows.move_to_end(key)
            self._in_plan.add(key)
            if end < first + number:
                self._halfway[sequence] = key
        return count

    def may_begin(self, sequence: Sequence, start: int) -> bool:
        """Whether a sequence can compute its token `start` in this plan."""
        pictures = sequence.request.pictures
        if pictures is None:
            return True
        touched = pictures.within(start, start + 1)
        return all(p.content_hash in self._rows or self._may_encode(p) for p, _, _ in touched)

    def least(self, sequence: Sequence, start: int) -> int:
        """Tokens that a step must have room for if it computes the token `start` of a sequence."""
        pictures = sequence.request.pictures
        if pictures is None or not self._whole:
            return 1
        spans = pictures.within(start, start + 1)
        return next((first + number - start for _, first, number in spans), 1)

    def rows(self, picture: Picture) -> np.ndarray:
        """int32[num_tokens]: where the embeddings of a picture are that `reach` has just passed."""
        return self._rows[picture.content_hash]

    def release(self, sequence: Sequence) -> None:
        """A sequence ended, or was preempted: it is halfway through nothing."""
        self._halfway.pop(sequence, None)

    def forget_all(self) -> None:
        """Nothing is what it was: a step failed, or the weights change."""
        for rows in self._rows.values():
            self._free += rows.tolist()
        self._rows.clear()
        self._halfway.clear()

    def _may_encode(self, picture: Picture) -> bool:
        if picture.num_tokens > self._left and self._left < self._budget:
            return False
        room = len(self._free) + sum(len(self._rows[key]) for key in self._evictable())
        return picture.num_tokens <= room

    def _encode(self, plan: StepPlan, picture: Picture) -> None:
        victims = iter(self._evictable())
        while len(self._free) < picture.num_tokens:
            self._free += self._rows.pop(next(victims)).tolist()
        taken = [self._free.pop() for _ in range(picture.num_tokens)]
        rows = self._rows[picture.content_hash] = np.array(taken, np.int32)
        plan.encodes.append((picture, rows))
        self._left -= picture.num_tokens
        self.num_encoded += 1

    def _evictable(self) -> list[bytes]:
        """Pictures that may go, in that order: those of no request first, then the least recently used."""
        needed = self._in_plan.union(self._halfway.values())
        found = [key for key in self._rows if key not in needed]
        return sorted(found, key=lambda key: key in self._wanted)
