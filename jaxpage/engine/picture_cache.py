"""The cache of picture embeddings, by content: which rows of an array on the device belong to which picture.

Knows pictures as hashes and embedding counts, and which tokens of a sequence they replace. Must not know pixels or how
they are encoded (the runner does).

A picture is encoded in the launch in which a row first needs it, before that row runs, and stays until it is evicted
for another picture. Launches run in order, so a picture may be evicted as soon as no row of the same plan reads it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

import numpy as np

from jaxpage.pictures.border import Picture
from jaxpage.plan import StepPlan
from jaxpage.request import Request, Sequence

NULL_ROW = 0  # of tokens without an embedding; receives the writes of padding


class PictureCache:
    """Allocates rows to pictures, and says how far a sequence can be computed with the pictures that are encoded."""

    def __init__(self, num_rows: int, *, budget: int, whole: bool = False):
        """`num_rows` of the array, including the null row. `budget`: embeddings that a step may encode; one picture may
        have more. `whole`: tokens of a picture attend to each other, so a step computes either all remaining tokens of
        a picture or none. Then a picture has at most `budget` tokens, which is also the step's limit.
        """
        self.num_rows = num_rows - 1  # usable ones
        self.num_encoded = 0  # pictures, since start
        self._budget, self._whole = budget, whole
        self._free = list(range(num_rows - 1, NULL_ROW, -1))
        # Content hash -> int32[num_embeddings] rows; the least recently used first.
        self._rows: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._wanted: Counter[bytes] = Counter()  # content hash -> unfinished requests with it
        self._halfway: dict[Sequence, bytes] = {}  # pictures that are computed in part
        self._in_plan: set[bytes] = set()  # pictures read by rows of the current plan
        self._left = budget  # embeddings that the plan may still encode

    def check(self, request: Request) -> None:
        """Raise ValueError for a request with a picture that can never fit."""
        for picture in () if request.pictures is None else request.pictures.pictures:
            if picture.num_embeddings > self.num_rows:
                raise ValueError(
                    f"a picture takes {picture.num_embeddings} embeddings, but mm_encoder_cache_bytes holds "
                    f"{self.num_rows}; make the picture smaller, or raise mm_encoder_cache_bytes"
                )
            if self._whole and picture.num_tokens > self._budget:
                raise ValueError(
                    f"a picture takes {picture.num_tokens} tokens, which this model computes in one step, but a step "
                    f"has {self._budget}: raise max_num_batched_tokens"
                )

    def add(self, request: Request) -> None:
        """A request begins: pictures of unfinished requests are evicted last."""
        if request.pictures is not None:
            self._wanted.update(request.pictures.content_hashes)

    def remove(self, request: Request) -> None:
        """A request has ended."""
        if request.pictures is not None:
            self._wanted -= Counter(request.pictures.content_hashes)

    def begin_plan(self) -> None:
        """Start a new plan; the last one was launched or discarded."""
        self._in_plan.clear()
        self._left = self._budget

    def reach(self, plan: StepPlan, sequence: Sequence, start: int, count: int) -> int:
        """How many of `count` tokens from `start` a sequence can compute in this plan; possibly 0.

        Adds the encoding of the pictures needed for that to the plan; the caller adds the row.
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

    def discard(self, plan: StepPlan) -> None:
        """The plan will not be launched: forget the pictures that it would have encoded."""
        for picture, rows in plan.encodes:
            del self._rows[picture.content_hash]
            self._free += rows.tolist()
            self.num_encoded -= 1

    def may_begin(self, sequence: Sequence, start: int) -> bool:
        """Whether a sequence can compute its token `start` in this plan."""
        pictures = sequence.request.pictures
        if pictures is None:
            return True
        touched = pictures.within(start, start + 1)
        return all(p.content_hash in self._rows or self._may_encode(p) for p, _, _ in touched)

    def least(self, sequence: Sequence, start: int) -> int:
        """The fewest tokens that a step can compute of a sequence from token `start` on."""
        pictures = sequence.request.pictures
        if pictures is None or not self._whole:
            return 1
        spans = pictures.within(start, start + 1)
        return next((first + number - start for _, first, number in spans), 1)

    def rows(self, picture: Picture) -> np.ndarray:
        """int32[num_tokens]: the rows of a picture that `reach` has just included in the plan, null rows at breaks."""
        rows, breaks = self._rows[picture.content_hash], picture.breaks
        return np.insert(rows, np.array(breaks, int) - np.arange(len(breaks)), NULL_ROW)

    def release(self, sequence: Sequence) -> None:
        """A sequence ended or was preempted, so it no longer needs a partly computed picture."""
        self._halfway.pop(sequence, None)

    def forget_all(self) -> None:
        """Evict all pictures, because a step failed or the weights change."""
        for rows in self._rows.values():
            self._free += rows.tolist()
        self._rows.clear()
        self._halfway.clear()

    def _may_encode(self, picture: Picture) -> bool:
        if picture.num_embeddings > self._left and self._left < self._budget:
            return False
        room = len(self._free) + sum(len(self._rows[key]) for key in self._evictable())
        return picture.num_embeddings <= room

    def _encode(self, plan: StepPlan, picture: Picture) -> None:
        victims = iter(self._evictable())
        while len(self._free) < picture.num_embeddings:
            self._free += self._rows.pop(next(victims)).tolist()
        taken = [self._free.pop() for _ in range(picture.num_embeddings)]
        rows = self._rows[picture.content_hash] = np.array(taken, np.int32)
        plan.encodes.append((picture, rows))
        self._left -= picture.num_embeddings
        self.num_encoded += 1

    def _evictable(self) -> list[bytes]:
        """Pictures in the order of eviction: those of no unfinished request first, then the least recently used."""
        needed = self._in_plan.union(self._halfway.values())
        found = [key for key in self._rows if key not in needed]
        return sorted(found, key=lambda key: key in self._wanted)
