"""KV-cache groups: layers that see equally far back share a block table.

A layer with a sliding window never reads what lies behind it, so it needs no blocks for that; a layer without one needs
the blocks of all tokens. Layers of one kind form groups of equal size. The i-th layers of all groups keep their keys
and values in the i-th array of the pool, so a block of any group has equally many bytes, and all groups take their
blocks from one pool. A model whose layers all see equally far is one group.

What this file knows: windows and layers as numbers. What it must never learn: sequences, devices.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

Windows = tuple[int | None, ...]  # of each group; None: it sees everything


@dataclass(frozen=True)
class KVGroups:
    """G groups. Those with a window come first: their block tables are the first to need a block."""

    windows: Windows  # G of them, in tokens: a token sees itself and `window - 1` before it
    layer_locations: tuple[tuple[int, int], ...]  # of each layer: (group, array of the pool)

    @property
    def num_arrays(self) -> int:
        """Of the pool: the layers of one group."""
        return 1 + max(array for _, array in self.layer_locations)


def group_layers(windows: Windows, max_model_len: int) -> KVGroups:
    """The groups of layers with these windows (one entry a layer).

    A window that no sequence outgrows is none. Groups have as many layers as the rarest kind, or as the most frequent
    one if that has less than a quarter more (as vLLM); the last group of a kind may have fewer, and leaves the rest of
    its blocks unused.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        seen = None if window is None or window >= max_model_len else window
        kinds.setdefault(seen, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    group_windows: list[int | None] = []
    layer_locations = [(0, 0)] * len(windows)
    for window in sorted(kinds, key=lambda w: (w is None, w)):
        for number, layer in enumerate(kinds[window]):
            if number % size == 0:
                group_windows.append(window)
            layer_locations[layer] = (len(group_windows) - 1, number % size)
    return KVGroups(tuple(group_windows), tuple(layer_locations))


def first_seen_block(window: int | None, start: int, block_size: int) -> int:
    """Index of the first block that tokens from `start` on can see. Those before it are not needed any more."""
    return 0 if window is None else max(start - window + 1, 0) // block_size


def most_blocks(windows: Windows, num_tokens: int, block_size: int, max_query_len: int) -> int:
    """Blocks that one sequence holds at most until `num_tokens` of its tokens have KV.

    `max_query_len`: the most tokens of it that are computed in one step.
    """
    whole = -(-num_tokens // block_size)
    seen = num_seen_blocks(windows, block_size, max_query_len)
    return sum(whole if window is None else min(whole, seen) for window in windows)


def longest_fitting(
    windows: Windows, limit: int, *, num_blocks: int, block_size: int, max_query_len: int
) -> int:
    """Tokens, up to `limit`, of the longest sequence that `num_blocks` blocks can hold; 0 if they hold none."""
    lengths = range(1, limit + 1)
    return bisect_right(
        lengths, num_blocks, key=lambda n: most_blocks(windows, n, block_size, max_query_len)
    )


def num_seen_blocks(windows: Windows, block_size: int, max_query_len: int) -> int:
    """Blocks that a group with a window holds at most: all such groups reach as far back as the widest of them may."""
    return -(-(widest_window(windows) - 1 + max_query_len) // block_size) + 1


def widest_window(windows: Windows) -> int:
    """0 if no group has one."""
    return max((window for window in windows if window is not None), default=0)
