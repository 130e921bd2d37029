"""How many tokens of waiting prompts a step takes, given that steps are padded to a few sizes.

66 tokens run as a step of 128. If 64 of them run now, and the other two together with the decoding rows of the next
step, the device computes only 80. Knows sizes and token counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Padding:
    """The padded sizes of steps with prompts, and their fixed cost."""

    sizes: tuple[int, ...] = ()  # tokens, smallest first; (): no padding
    overhead: int = 0  # tokens that the device computes in the time it takes to read the weights

    def budget(self, planned: int, most: int, waiting: Iterable[int]) -> int:
        """How many tokens of waiting prompts, at most `most`, a step takes beside `planned` tokens of running rows.

        `waiting`: the tokens of each waiting prompt. They may need fewer, because cache hits are not known yet.
        """
        wanted = planned
        for count in waiting:
            wanted += count
            if wanted >= planned + most:
                return most
        return self._fit(wanted, planned) - planned if wanted > planned else most

    def _fit(self, wanted: int, num_rows: int) -> int:
        """`wanted` tokens, or the next smaller size if the rest is cheaper in a step that decodes `num_rows` rows."""
        index = bisect_left(self.sizes, wanted)
        if index == 0 or index == len(self.sizes) or self.sizes[index - 1] <= num_rows:
            return wanted
        less = self.sizes[index - 1]
        in_two = self._cost(less) + self._cost(wanted - less + num_rows)
        return less if in_two < self._cost(wanted) else wanted

    def _cost(self, num_tokens: int) -> int:
        """The cost of a step, in tokens computed."""
        index = bisect_left(self.sizes, num_tokens)
        return self.overhead + self.sizes[min(index, len(self.sizes) - 1)]


NO_PADDING = Padding()
