"""How many tokens of waiting prompts a step takes, as steps are padded to a few sizes.

66 tokens run as a step of 128. If 64 of them run now, and the other two with what is decoded in the step after that,
the device computes 80. Knows sizes and numbers of tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Padding:
    """What steps with prompts are padded to, and what they cost besides."""

    sizes: tuple[int, ...] = ()  # tokens, smallest first; (): nothing is padded
    overhead: int = 0  # tokens that a device computes in the time in which it reads the weights

    def budget(self, planned: int, most: int, waiting: Iterable[int]) -> int:
        """Of at most `most` tokens, how many a step takes of prompts that wait, beside `planned` ones of running rows.

        `waiting`: tokens of each. What of them is in the prefix cache is not known yet; they may need less.
        """
        wanted = planned
        for count in waiting:
            wanted += count
            if wanted >= planned + most:
                return most
        return self._fit(wanted, planned) - planned if wanted > planned else most

    def _fit(self, wanted: int, num_rows: int) -> int:
        """`wanted` tokens, or the size below if it costs less to leave the rest to a step that decodes `num_rows`."""
        index = bisect_left(self.sizes, wanted)
        if index == 0 or index == len(self.sizes) or self.sizes[index - 1] <= num_rows:
            return wanted
        less = self.sizes[index - 1]
        in_two = self._cost(less) + self._cost(wanted - less + num_rows)
        return less if in_two < self._cost(wanted) else wanted

    def _cost(self, num_tokens: int) -> int:
        """Of a step, in tokens computed."""
        index = bisect_left(self.sizes, num_tokens)
        return self.overhead + self.sizes[min(index, len(self.sizes) - 1)]


NO_PADDING = Padding()
