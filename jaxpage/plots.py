"""Pictures of the KV pool: how full it is over time, who shares what, the tree of prefixes, what is waste and why.

They need matplotlib (extra `notebooks`) and the plain data of `LLM.stats` and `LLM.kv_snapshot`. Each function draws
into `ax`, or into a new figure, and returns the axes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxpage.plan import NULL_BLOCK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jaxpage.engine.snapshot import KVSnapshot
    from jaxpage.engine.stats import EngineStats

OWN, SHARED, HOST = "lightsteelblue", "tab:orange", "lightgrey"
# Of `KVSnapshot.unused_slots`.
CAUSES = {"partial": "rest of a last block", "ahead": "blocks ahead"}


def occupancy(stats: Sequence[EngineStats], ax: Axes | None = None) -> Axes:
    """Blocks that sequences hold, over the steps at which `stats` were taken.

    The dashed line is what they would hold if nothing were shared, the grey one what the pool has.
    """
    ax = _axes(ax)
    steps = [s.num_steps for s in stats]
    held = [s.num_blocks_used for s in stats]
    ax.fill_between(steps, held, step="post", color=OWN, label="held")
    references = [s.num_block_references for s in stats]
    ax.step(steps, references, where="post", ls="--", color=SHARED, label="held, if not shared")
    ax.axhline(stats[-1].num_blocks, color="grey", lw=1, label="in the pool")
    ax.set(xlabel="step", ylabel="KV blocks", ylim=(0, None))
    ax.legend(fontsize=8)
    return ax


def sharing(snapshot: KVSnapshot, ax: Axes | None = None) -> Axes:
    """A line for each sequence, its blocks from left to right with their ids; shared ones in one colour.

    Blocks of sequences that were swapped out are grey.
    """
    from matplotlib.colors import ListedColormap

    ax = _axes(ax)
    tables = snapshot.block_tables
    kinds = np.where(snapshot.tiers > 0, 2, snapshot.references > 1)
    drawn = np.ma.masked_array(kinds[tables], tables == NULL_BLOCK)
    edges = [np.arange(size + 1) - 0.5 for size in reversed(tables.shape)]
    colours = ListedColormap([OWN, SHARED, HOST])
    if tables.size:
        ax.pcolormesh(*edges, drawn, cmap=colours, vmin=0, vmax=2, edgecolors="white", linewidth=2)
    for (row, index), block_id in np.ndenumerate(tables):
        if block_id != NULL_BLOCK:
            ax.text(index, row, str(block_id), ha="center", va="center", fontsize=7)
    names = [f"{request_id}.{index}" for request_id, index in snapshot.sequences]
    ax.set(yticks=range(len(names)), yticklabels=names, xlabel="block of the sequence")
    ax.invert_yaxis()
    return ax


def prefix_tree(snapshot: KVSnapshot, ax: Axes | None = None) -> Axes:
    """Every block in the prefix cache as a dot, to the right of the block before it; darker is hit more often.

    The number of hits stands where it differs from that of the block before. Blocks of equal content are one dot.
    """
    from matplotlib.collections import LineCollection

    ax = _axes(ax)
    hits: dict[int, int] = defaultdict(int)
    parents: dict[int, int] = {}
    for block_id in np.flatnonzero(snapshot.hashes):
        block_hash = int(snapshot.hashes[block_id])
        hits[block_hash] += int(snapshot.hits[block_id])
        parents[block_hash] = int(snapshot.parents[block_id])
    positions = _tree_positions(parents)
    edges = []
    for block_hash, (depth, line) in positions.items():
        parent, count = parents[block_hash], str(hits[block_hash])
        if parent in positions:
            from_depth, from_line = positions[parent]
            edges.append([(from_depth, from_line), (from_depth + 0.5, line), (depth, line)])
        if parent not in positions or hits[parent] != hits[block_hash]:
            ax.annotate(count, (depth, line), (0, 5), textcoords="offset points", ha="center")
    ax.add_collection(LineCollection(edges, colors="silver", zorder=1))
    x, y = np.array(list(positions.values())).reshape(-1, 2).T
    counts = [hits[block_hash] for block_hash in positions]
    ax.scatter(x, y, c=counts, cmap="Oranges", vmin=0, edgecolors="black", zorder=2)
    ax.set(xlabel="block", yticks=[])
    ax.invert_yaxis()
    ax.margins(y=0.15)
    return ax


def waste(snapshots: Sequence[KVSnapshot], ax: Axes | None = None) -> Axes:
    """Share of the allocated slots that hold no KV, by cause, over the steps at which `snapshots` were taken."""
    ax = _axes(ax)
    steps = [s.num_steps for s in snapshots]
    shares = [
        [100 * s.unused_slots[cause] / max(s.num_allocated_slots, 1) for s in snapshots]
        for cause in CAUSES
    ]
    ax.stackplot(steps, shares, labels=list(CAUSES.values()), colors=[OWN, SHARED])
    ax.set(xlabel="step", ylabel="allocated slots without KV, %", ylim=(0, None))
    ax.legend(fontsize=8)
    return ax


def _tree_positions(parents: dict[int, int]) -> dict[int, tuple[int, float]]:
    """(depth, line) of each node of a forest given as node → parent; a parent outside of it makes a root.

    A leaf has a line to itself, other nodes stand in the middle of their children.
    """
    children: dict[int, list[int]] = defaultdict(list)
    for node, parent in parents.items():
        children[parent if parent in parents else 0].append(node)
    depths: dict[int, int] = {}
    stack = [(root, 0) for root in reversed(children[0])]
    while stack:  # not by recursion: a long prompt is a deep tree
        node, depth = stack.pop()
        depths[node] = depth
        stack += [(child, depth + 1) for child in reversed(children[node])]
    lines: dict[int, float] = {}
    leaves = [node for node in depths if not children[node]]
    lines.update({leaf: float(line) for line, leaf in enumerate(leaves)})
    for node in reversed(depths):  # children before their parent
        if children[node]:
            below = [lines[child] for child in children[node]]
            lines[node] = (min(below) + max(below)) / 2
    return {node: (depth, lines[node]) for node, depth in depths.items()}


def _axes(ax: Axes | None) -> Axes:
    """`ax` or new ones; steps and blocks, which lie on the x axis, are whole numbers."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    ax = plt.subplots(layout="constrained")[1] if ax is None else ax
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return ax
