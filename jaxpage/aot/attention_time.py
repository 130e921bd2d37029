"""How long the TPU attention kernel takes for some rows: the bundles of its schedule, times how often each region runs.

Regions are identified by what they do. Outermost loops that start DMAs and wait for some write new keys and values, a
chunk at a time, unless they multiply: that loop runs once for each *unit*, a tile of queries. Its loop that multiplies
runs once for each *turn*, the keys of one fetch in one or several tiles. A fetch that brings fewer keys than it may (a
*part*) runs other branches of a turn than a whole one, and so does one whose keys are masked. Pure arithmetic on
`tpu_schedule.Region`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from jaxpage.aot.tpu_schedule import Region

FIRST_ROWS = 6  # whose only tokens are written before the first turn


@dataclass(frozen=True, kw_only=True)
class Turn:
    """is_whole: whether the fetch brings as many keys as it may. num_blocks, num_tiles: with keys. num_cleared: other
    blocks of these tiles. begins_within, ends_within: whether not all of the first, or last, block is fetched.
    is_masked: whether some query does not see all keys.
    """

    is_whole: bool
    begins_within: bool = False
    ends_within: bool
    is_masked: bool
    num_blocks: int
    num_tiles: int
    num_cleared: int


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Equal rows. kv_len: of each, including its queries; tile_q, tile_kv: queries and keys at once; tile_tokens:
    tokens whose queries come at once; fetch_kv: keys of a turn; write_sizes: slots written at once by each loop that
    writes; window: the keys that a query sees, itself included; one_tile_per_row: whether a row has one tile of
    queries, wherever it begins.
    """

    count: int
    query_len: int
    kv_len: int
    tile_q: int
    tile_tokens: int
    tile_kv: int
    fetch_kv: int
    block_size: int
    write_sizes: tuple[int, ...]
    window: int | None = None
    one_tile_per_row: bool = False

    def units(self) -> Iterator[tuple[int, int]]:
        """The queries [first, end) of each unit, counted in its row. Tiles of queries begin at multiples of `tile_q`
        packed tokens, wherever rows begin.
        """
        for row in range(self.count):
            if self.one_tile_per_row:
                yield 0, self.query_len
                continue
            begin = row * self.query_len
            for tile in range(
                begin // self.tile_q * self.tile_q, begin + self.query_len, self.tile_q
            ):
                yield max(tile - begin, 0), min(tile + self.tile_q - begin, self.query_len)

    def num_chunks(self, size: int) -> int:
        """How many chunks of `size` slots are written before the first turn."""
        if self.query_len == 1:
            return min(FIRST_ROWS, self.count)
        return self.count * -(-self.query_len // size)

    def turns(self) -> Counter[Turn]:
        """The turns of all units. A tile of queries needs the keys from the first that its first query sees to its last
        query.
        """
        found: Counter[Turn] = Counter()
        before = self.kv_len - self.query_len
        for (first, last), count in Counter(self.units()).items():
            seen = 0 if self.window is None else max(before + first - self.window + 1, 0)
            for begin in range(seen // self.fetch_kv * self.fetch_kv, before + last, self.fetch_kv):
                found[self._turn(begin, seen, before + first, before + last)] += count
        return found

    def _turn(self, begin: int, seen: int, first_query: int, end: int) -> Turn:
        """The turn that fetches from `begin`; `seen`: the first key that is needed, `end`: after the last one."""
        low, high = max(seen - begin, 0), min(end - begin, self.fetch_kv)
        num_blocks, num_tiles = (
            -(-high // size) - low // size for size in (self.block_size, self.tile_kv)
        )
        is_left_behind = self.window is not None and begin < end - self.window
        return Turn(
            is_whole=high - low == self.fetch_kv,
            begins_within=low % self.block_size > 0,
            ends_within=high % self.block_size > 0,
            is_masked=begin + self.fetch_kv > first_query + 1 or is_left_behind,
            num_blocks=num_blocks,
            num_tiles=num_tiles,
            num_cleared=num_tiles * self.tile_kv // self.block_size - num_blocks,
        )


def bundles(program: Region, rows: Rows, *, is_of_drafts: bool = False) -> float:
    """Bundles of one launch. Of those of a step with prompts one writes, and computes all rows but those with one
    query, of which there are none here, and those with drafts. is_of_drafts: whether it is that of the latter.
    """
    total: float = program.straight
    writing = [loop for loop in program.loops if _writes(loop)]
    for loop, size in zip(writing, rows.write_sizes, strict=False):
        total += rows.num_chunks(size) * loop.bundles
    if is_of_drafts != rows.one_tile_per_row or not (writing or is_of_drafts):
        return total
    return total + sum(_of_units(loop, rows) for loop in program.loops if loop.multiplies)


def _writes(loop: Region) -> bool:
    """Whether an outermost loop writes new keys and values."""
    return loop.starts and loop.waits and not loop.multiplies


def _of_units(unit: Region, rows: Rows) -> float:
    """The bundles of all units. A branch with a loop over heads runs once for all tokens that come at once. The few
    bundles that start the copy of these, or of their results, are counted for each unit.
    """
    once: float = unit.own
    for each in unit.inner:
        if each.multiplies:
            continue
        share = rows.tile_q / rows.tile_tokens if each.is_branch and each.loops else 1
        once += share * (each.trips or 1) * each.bundles
    turns = [each for each in unit.loops if each.multiplies]
    in_turns = sum(
        count * bundles_of_turn(loop, turn)
        for loop in turns
        for turn, count in rows.turns().items()
    )
    return sum(1 for _ in rows.units()) * once + in_turns


def bundles_of_turn(region: Region, turn: Turn) -> float:
    """The bundles of a turn, or of a branch that it takes. Loops over blocks start DMAs, wait for them, or clear blocks
    without keys. Two loops clear whole blocks, and two branches parts of a block: before the keys and after them. The
    copies that a turn starts are for a later one, and are counted as its own.
    """
    total: float = region.own
    clears = False
    for loop in (each for each in region.inner if not each.is_branch):
        if loop.multiplies:
            total += (loop.trips or turn.num_tiles) * loop.bundles
        elif loop.starts or loop.waits:
            total += turn.num_blocks * loop.bundles
        else:
            clears = True
            total += turn.num_cleared * loop.bundles / 2
    if clears:
        before, after = region.branches[:1], region.branches[-1:]
        taken = [*(before if turn.begins_within else ()), *(after if turn.ends_within else ())]
    else:
        taken = _taken(region, turn)
    return total + sum(bundles_of_turn(branch, turn) for branch in taken)


def _taken(region: Region, turn: Turn) -> list[Region]:
    """The branches that a turn runs. One with a loop whose trips are not known is for parts of a fetch, and one with
    the opposite condition for whole ones. Of two others that multiply the longer one masks.
    """
    of_parts = [each for each in region.branches if _is_of_part(each, region)]
    opposites = [_opposite(each.condition) for each in of_parts]
    of_whole = [each for each in region.branches if each.condition in opposites]
    taken = of_whole if turn.is_whole else of_parts
    others = [each for each in region.branches if each not in of_parts and each not in of_whole]
    products = sorted((each for each in others if each.multiplies), key=lambda each: each.bundles)
    if len(products) > 1:
        products = products[turn.is_masked :][:1]
    return [*taken, *products, *(each for each in others if not each.multiplies)]


def _is_of_part(branch: Region, around: Region) -> bool:
    """Whether a branch is for parts of a fetch. A loop that starts DMAs is for whole fetches too, unless those are
    started otherwise.
    """
    loops = [each for each in branch.inner if not each.is_branch and each.trips is None]
    if not loops or not all(each.starts for each in loops):
        return bool(loops)
    others = (each.starts for each in around.branches if each is not branch)
    return around.num_starts > 0 or any(others)


def _opposite(condition: str | None) -> str:
    text = condition or ""
    return text[1:] if text.startswith("!") else f"!{text}"
