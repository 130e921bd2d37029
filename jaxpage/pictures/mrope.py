"""Positions of prompts with pictures, for families whose RoPE turns by time, height and width."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxpage.pictures.border import Picture


def mrope_positions(
    num_tokens: int,
    spans: Sequence[tuple[int, int]],
    pictures: Sequence[Picture],
    *,
    merge_size: int,
    tokens_per_second: float,
    max_positions: int = 2**31,
) -> tuple[np.ndarray, int]:
    """int32[3, num_tokens], and the position of the token after them.

    Text counts up on all three axes. A picture's tokens have the place of their grid, counted from the position where
    the picture begins; frames of a video are `tokens_per_second * second_per_grid` apart, rounded down. What follows
    has positions above all of the picture's. (transformers 5 goes on by the larger side of the grid instead, so that
    after a long video positions come again; the models were trained as it is here.)

    Raises ValueError if videos last so long that there would be more than `max_positions`; a long text is not refused.
    """
    positions = np.empty((3, num_tokens), np.int64)
    index = start = 0
    for (first, length), picture in sorted(zip(spans, pictures, strict=True), key=lambda x: x[0]):
        positions[:, index:first] = start + np.arange(first - index)
        start += first - index
        own = _grid_positions(picture, merge_size, tokens_per_second)
        positions[:, first : first + length] = start + own
        start += int(own.max()) + 1
        index = first + length
    positions[:, index:] = start + np.arange(num_tokens - index)
    following = start + num_tokens - index
    if following > max(num_tokens, max_positions):
        raise ValueError(
            f"the videos of the prompt last so long that its last position is {following - 1}, but the model "
            f"has {max_positions} positions; check fps, the frames that were taken of a second, or give shorter videos"
        )
    return positions.astype(np.int32), following


def _grid_positions(picture: Picture, merge_size: int, tokens_per_second: float) -> np.ndarray:
    """int64[3, num_tokens]: time, row and column of each embedding, from 0 on."""
    frames, height, width = picture.grid
    interval = np.float32(1.0)
    if picture.second_per_grid is not None:
        interval = np.float32(tokens_per_second) * np.float32(picture.second_per_grid)
    times = (np.arange(frames, dtype=np.float32) * interval).astype(np.int64)
    axes = (times, np.arange(height // merge_size), np.arange(width // merge_size))
    return np.stack(np.meshgrid(*axes, indexing="ij")).reshape(3, -1)
