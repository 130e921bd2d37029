"""KV-cache groups: layers with the same attention window share a block table.

A layer with a sliding window needs no blocks behind the window; a layer without one needs the blocks of all tokens.
Layers with the same window form groups of equal size. The i-th layers of all groups store their keys and values in the
i-th array of the pool, so blocks of all groups have the same number of bytes, and all groups allocate from one pool. A
model whose layers all have the same window is one group. Where layers have KV of different size (Gemma 4), several of
the smaller ones share an array.

Knows windows and layers as numbers. Must not know sequences or devices.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

Windows = tuple[int | None, ...]  # of each group; None: no window


class Location(NamedTuple):
    """Where the pool has the keys and values of a layer."""

    group: int
    array: int
    part: int = 0  # of the array, if several layers of a group share it


@dataclass(frozen=True)
class KVGroups:
    """G groups. Groups with a window come first: their block tables are the first to need another block."""

    windows: Windows  # G of them, in tokens: a token sees itself and `window - 1` before it
    layer_locations: tuple[Location | None, ...]  # of each layer; None: it has no KV

    @property
    def num_arrays(self) -> int:
        """Number of arrays in the pool: as many as a group has layers."""
        return 1 + max(location.array for location in self.layer_locations if location)


def group_layers(
    windows: Windows, max_model_len: int, sizes: tuple[int, ...] | None = None
) -> KVGroups:
    """The groups of layers with these windows (one entry per layer).

    A window of at least `max_model_len` counts as none. Groups have as many arrays as the rarest kind of layer, or as
    the most frequent one if that has less than a quarter more (as in vLLM). The last group of each kind may have fewer,
    and leaves the rest of its blocks unused. sizes: of each layer's KV, in any unit; all are equal by default. An array
    has room for the largest, or for as many smaller ones as fit.
    """
    sizes = sizes or (1,) * len(windows)
    kinds: dict[tuple[int | None, int], list[int]] = {}  # (window, layers in an array) -> layers
    for layer, (window, size) in enumerate(zip(windows, sizes, strict=True)):
        seen = None if window is None or window >= max_model_len else window
        kinds.setdefault((seen, max(sizes) // size), []).append(layer)
    counts = [-(-len(layers) // sharing) for (_, sharing), layers in kinds.items()]
    num_arrays = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    group_windows: list[int | None] = []
    layer_locations = [Location(0, 0)] * len(windows)
    for kind in sorted(kinds, key=lambda kind: (kind[0] is None, kind)):
        window, sharing = kind
        for number, layer in enumerate(kinds[kind]):
            array, part = divmod(number, sharing)
            if number % (num_arrays * sharing) == 0:
                group_windows.append(window)
            layer_locations[layer] = Location(len(group_windows) - 1, array % num_arrays, part)
    return KVGroups(tuple(group_windows), tuple(layer_locations))


def first_seen_block(window: int | None, start: int, block_size: int) -> int:
    """Index of the first block that tokens from `start` on can see. Earlier blocks are no longer needed."""
    return 0 if window is None else max(start - window + 1, 0) // block_size


def most_blocks(windows: Windows, num_tokens: int, block_size: int, max_query_len: int) -> int:
    """The most blocks that a sequence holds at any time until `num_tokens` of its tokens have KV.

    `max_query_len`: the most tokens of it that are computed in one step.
    """
    whole = -(-num_tokens // block_size)
    seen = num_seen_blocks(windows, block_size, max_query_len)
    return sum(whole if window is None else min(whole, seen) for window in windows)


def longest_fitting(
    windows: Windows, limit: int, *, num_blocks: int, block_size: int, max_query_len: int
) -> int:
    """Length in tokens of the longest sequence that fits into `num_blocks` blocks, at most `limit`; 0 if none fits."""
    lengths = range(1, limit + 1)
    return bisect_right(
        lengths, num_blocks, key=lambda n: most_blocks(windows, n, block_size, max_query_len)
    )


def num_seen_blocks(windows: Windows, block_size: int, max_query_len: int) -> int:
    """The most blocks that a group with a window holds; all such groups reach back as far as the widest window."""
    return -(-(widest_window(windows) - 1 + max_query_len) // block_size) + 1


def widest_window(windows: Windows) -> int:
    """The widest window in tokens; 0 if no group has one."""
    return max((window for window in windows if window is not None), default=0)
