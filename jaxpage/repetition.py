"""Detection of repetition in the output. Names and meanings are vLLM's.

Knows token ids only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class RepetitionDetectionParams:
    """When a sequence ends because its output repeats itself. Names, defaults and ranges are vLLM's (0.32).

    It ends as soon as its last tokens are one pattern `min_count` times in a row. Raises ValueError for values out of
    range.
    """

    max_pattern_size: int = 0  # longest pattern, in tokens; 0: no detection
    min_pattern_size: int = 0  # shortest; 0 means 1
    min_count: int = 0  # at least 2 with detection

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} of repetition_detection must be an int, got {value!r}")
        if not 0 <= self.min_pattern_size <= self.max_pattern_size:
            raise ValueError(
                "repetition_detection needs 0 <= min_pattern_size <= max_pattern_size, got "
                f"min_pattern_size={self.min_pattern_size} and max_pattern_size={self.max_pattern_size}"
            )
        if self.max_pattern_size and self.min_count < 2:
            raise ValueError(
                f"min_count of repetition_detection must be at least 2, got {self.min_count}"
            )


def to_repetition_detection(value: Any) -> RepetitionDetectionParams | None:
    """A copy of the params, or of a dict of their fields; None if they detect nothing. Raises ValueError."""
    if value is None:
        return None
    fields = vars(value) if isinstance(value, RepetitionDetectionParams) else value
    names = [field.name for field in dataclasses.fields(RepetitionDetectionParams)]
    if not isinstance(fields, Mapping) or not set(fields) <= set(names):
        raise ValueError(
            f"repetition_detection must be a RepetitionDetectionParams or a dict of {', '.join(names)}, got {value!r}"
        )
    params = RepetitionDetectionParams(**fields)
    return params if params.max_pattern_size else None


def repeats_itself(
    token_ids: Sequence[int], num_output: int, params: RepetitionDetectionParams
) -> bool:
    """Whether the last `num_output` of the ids end with one pattern `min_count` times in a row."""
    times = params.min_count
    longest = min(params.max_pattern_size, num_output // times)
    return any(
        token_ids[-size * (times - 1) :] == token_ids[-size * times : -size]
        for size in range(max(1, params.min_pattern_size), longest + 1)
    )
