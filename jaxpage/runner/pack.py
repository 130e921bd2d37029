"""Turns a plan into the calls that execute it. Pure functions of NumPy arrays, without a device.

The calls of a plan, in order: block contents move between device, host and disk; adapters are loaded into their slots;
sequences are admitted, some with a recurrent state of the prefix cache; forced tokens are stored; masks are set;
pictures are encoded; then the step runs, either `decode`, or `forward` and, with the scoring of prompts in between,
`sample` or `verify`. Rows that an earlier step computed take part in the latter only. `draft` comes before `forward`,
whose tokens it makes. Last, the prefix cache gets copies of recurrent states.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from jaxpage.plan import NULL_BLOCK, BlockTransfers, StepPlan
from jaxpage.runner.buckets import Bucket, StepPrograms
from jaxpage.runner.calls import (
    ADMIT,
    BLOCKS_PER_CALL,
    CAPTURE,
    COPY_STATES,
    LOAD,
    LOAD_ADAPTER,
    MASKS_PER_CALL,
    SCORE,
    SET_MASKS,
    SET_TOKENS,
    STATES_PER_CALL,
    STORE_DEVICE,
    STORE_HOST,
    SWAP_IN,
    SWAP_OUT,
    TOKENS_PER_CALL,
    VOCABULARY,
    VOCABULARY_ROWS,
    Call,
)
from jaxpage.runner.encoder import pack_encode, pack_picture_tokens
from jaxpage.runner.kept_rows import words_of
from jaxpage.runner.layout import Layout
from jaxpage.runner.slots import pack_admission
from jaxpage.runner.spec import PictureSpec

Other = TypeVar("Other")


def pack(
    plan: StepPlan,
    programs: StepPrograms,
    layouts: dict[str, Layout],
    pictures: PictureSpec | None = None,
) -> list[Call]:
    """The calls of a plan. `programs` must hold the plan's tokens and rows; `layouts` are those of all programs."""
    calls = [] if plan.transfers is None else list(_transfers(plan.transfers))
    for slot, arrays in plan.adapter_loads:
        calls.append(Call(LOAD_ADAPTER, (np.array(slot, np.int32), *arrays)))
    calls += [Call(ADMIT, (pack_admission(a, layouts[ADMIT]),)) for a in plan.admissions]
    found = [(a.state_slot, a.slot) for a in plan.admissions if a.state_slot]
    calls += _state_copies(found, layouts)
    calls += [*_host_tokens(plan, layouts), *_masks(plan, layouts)]
    for picture, rows in plan.encodes:
        assert pictures is not None, "a picture for a model that takes none"
        calls.append(pack_encode(picture, rows, pictures))
    if programs.draft is not None:
        packed = _pack_computed(plan, layouts[programs.draft], changes_blocks=True)
        calls.append(Call(programs.draft, (packed,)))
    if programs.bucket is not None:
        # `draft` has changed the blocks; a second copy would see what it wrote.
        changes_blocks = programs.draft is None
        packed = _pack_step(plan, layouts[programs.bucket.name], changes_blocks=changes_blocks)
        calls.append(Call(programs.bucket.name, (packed, *_embeds(plan, programs.bucket))))
    calls += [*_captures(plan, programs.bucket, layouts), *_scores(plan, layouts)]
    calls += _vocabulary(plan, layouts)
    if programs.sample is not None:
        packed = _pack_rows(plan, layouts[programs.sample], plan.num_rows)
        calls.append(Call(programs.sample, (packed,)))
    return calls + _state_copies(plan.state_saves, layouts)


def _pack_rows(plan: StepPlan, layout: Layout, num_rows: int) -> np.ndarray:
    """int32[layout.size] with the first `num_rows` rows of a plan."""
    buffer = layout.new_buffer()
    layout.view(buffer, "features")[()] = plan.features
    layout.view(buffer, "num_steps")[()] = plan.num_steps
    for name in ("slots", "starts", "num_tokens", "samples"):
        layout.view(buffer, name)[:num_rows] = getattr(plan, name)[:num_rows]
    for row, number in plan.num_drafts.items():
        layout.view(buffer, "num_drafts")[row] = number
    return buffer


def _pack_step(plan: StepPlan, layout: Layout, *, changes_blocks: bool) -> np.ndarray:
    """The rows that compute tokens, what changes before they run, and what some tokens are."""
    buffer = _pack_computed(plan, layout, changes_blocks=changes_blocks)
    for row, drafts in plan.drafts.items():
        layout.view(buffer, "drafts")[row, : len(drafts)] = drafts
    if plan.picture_tokens or plan.positions:
        row_starts = np.cumsum([0, *plan.num_tokens])
        pack_picture_tokens(layout.views(buffer), row_starts, plan.picture_tokens, plan.positions)
    return buffer


def _pack_computed(plan: StepPlan, layout: Layout, *, changes_blocks: bool) -> np.ndarray:
    """The rows that compute tokens, and the changes of block tables and pool before they run."""
    buffer = _pack_rows(plan, layout, plan.num_rows - plan.num_late_rows)
    if plan.table_updates and changes_blocks:
        updates = np.asarray(plan.table_updates, np.int32)
        for column, name in enumerate(("slots", "groups", "indices", "blocks")):
            layout.view(buffer, f"update_{name}")[: len(updates)] = updates[:, column]
    if plan.block_copies and changes_blocks:
        copies = np.asarray(plan.block_copies, np.int32)
        layout.view(buffer, "copy_sources")[: len(copies)] = copies[:, 0]
        layout.view(buffer, "copy_destinations")[: len(copies)] = copies[:, 1]
    return buffer


def _embeds(plan: StepPlan, bucket: Bucket) -> tuple[np.ndarray, ...]:
    """The embeddings among the step's tokens as words [T, E], and bool[T] that marks them; () if there are none."""
    if not plan.input_embeds:
        return ()
    row_starts = np.cumsum([0, *plan.num_tokens])
    _, first = plan.input_embeds[0]
    words = np.zeros((bucket.num_tokens, first.shape[1]), words_of(first.dtype))
    where = np.zeros(bucket.num_tokens, np.bool_)
    for row, embeds in plan.input_embeds:
        start = row_starts[row]
        words[start : start + len(embeds)] = embeds.view(words.dtype)
        where[start : start + len(embeds)] = True
    return words, where


def _host_tokens(plan: StepPlan, layouts: dict[str, Layout]) -> list[Call]:
    """Calls that store forced tokens."""
    calls = []
    where = [
        (slot, (start + offset, token_id))
        for slot, start, token_ids in plan.forced_tokens
        for offset, token_id in enumerate(token_ids)
    ]
    for slots, tokens in portions(where, TOKENS_PER_CALL):
        buffer = layouts[SET_TOKENS].new_buffer()
        views, num = layouts[SET_TOKENS].views(buffer), len(slots)
        views["slots"][:num] = slots
        views["positions"][:num], views["token_ids"][:num] = zip(*tokens, strict=True)
        calls.append(Call(SET_TOKENS, (buffer,)))
    return calls


def _captures(plan: StepPlan, bucket: Bucket | None, layouts: dict[str, Layout]) -> Iterator[Call]:
    """One call for each run of tokens in the same piece, in the order of the plan. A decode step has one piece."""
    if not plan.captured:
        return
    assert bucket is not None, "tokens that are captured are computed"
    size = bucket.num_rows if bucket.decode else _piece_size(layouts)
    row_starts = np.cumsum([0, *plan.num_tokens])
    places = [int(row_starts[row]) + offset for row, offsets in plan.captured for offset in offsets]
    for piece, run in itertools.groupby(places, lambda place: place // size):
        rows = [place - piece * size for place in run]
        yield Call(CAPTURE, (np.array(piece, np.int32), np.array(rows, np.int32)))


def _piece_size(layouts: dict[str, Layout]) -> int:
    """Tokens in each piece of hidden states that `forward` returns."""
    return layouts[SCORE].view(layouts[SCORE].new_buffer(), "rows").size


def _scores(plan: StepPlan, layouts: dict[str, Layout]) -> list[Call]:
    """Calls that score prompt tokens; those that return the whole vocabulary come last."""
    if not plan.prompt_scores:
        return []
    size = _piece_size(layouts)
    row_starts = np.cumsum([0, *plan.num_tokens])
    pieces: dict[tuple[bool, int], list[tuple[int, int]]] = {}
    for row, offset, next_ids, whole in plan.prompt_scores:
        first = int(row_starts[row]) + offset
        for position, token_id in enumerate(next_ids, start=first):
            piece, place = divmod(position, size)
            pieces.setdefault((whole, piece), []).append((place, token_id))
    calls = []
    for whole, piece in sorted(pieces):
        tokens = pieces[whole, piece]
        buffer = layouts[SCORE].new_buffer()
        views = layouts[SCORE].views(buffer)
        views["num"][()], views["whole"][()] = len(tokens), whole
        views["rows"][: len(tokens)], views["token_ids"][: len(tokens)] = zip(*tokens, strict=True)
        calls.append(Call(SCORE, (np.array(piece, np.int32), buffer)))
    return calls


def _vocabulary(plan: StepPlan, layouts: dict[str, Layout]) -> list[Call]:
    calls, wanted = [], plan.vocabulary_rows
    for start in range(0, len(wanted), VOCABULARY_ROWS):
        rows = wanted[start : start + VOCABULARY_ROWS]
        buffer = layouts[VOCABULARY].new_buffer()
        views = layouts[VOCABULARY].views(buffer)
        views["features"][()], views["num"][()] = plan.features, len(rows)
        for name in ("slots", "starts", "num_tokens"):
            values = getattr(plan, name)
            views[name][: len(rows)] = [values[row] for row in rows]
        calls.append(Call(VOCABULARY, (buffer,)))
    return calls


def _masks(plan: StepPlan, layouts: dict[str, Layout]) -> list[Call]:
    calls, masks = [], [(plan.slots[row], mask) for row, mask in plan.masks.items()]
    for slots, words in portions(masks, MASKS_PER_CALL):
        buffer = layouts[SET_MASKS].new_buffer()
        views = layouts[SET_MASKS].views(buffer)
        views["slots"][: len(slots)] = slots
        views["masks"][: len(slots)] = words
        calls.append(Call(SET_MASKS, (buffer,)))
    return calls


def _state_copies(pairs: list[tuple[int, int]], layouts: dict[str, Layout]) -> list[Call]:
    """Calls that copy recurrent states: pairs of (source, destination)."""
    calls = []
    for sources, destinations in portions(pairs, STATES_PER_CALL):
        buffer = layouts[COPY_STATES].new_buffer()
        views, num = layouts[COPY_STATES].views(buffer), len(sources)
        views["num"][()] = num
        views["sources"][:num], views["destinations"][:num] = sources, destinations
        calls.append(Call(COPY_STATES, (buffer,)))
    return calls


def _transfers(transfers: BlockTransfers) -> Iterator[Call]:
    """Calls that move block contents between disk, host memory and the pool, in the order of `BlockTransfers`."""
    if transfers.stores:
        yield _store(STORE_HOST, transfers.stores)
    for host_id, content in transfers.loads:
        yield Call(LOAD, (np.array(host_id, np.int32), *map(np.asarray, content)))
    for block_ids, host_ids in portions(transfers.swaps_out):
        yield Call(SWAP_OUT, (padded(block_ids), np.array(host_ids, np.int32)))
    for host_ids, block_ids in portions(transfers.swaps_in):
        yield Call(SWAP_IN, (np.array(host_ids, np.int32), padded(block_ids)))


def pack_stores(
    device: Sequence[tuple[int, bytes]], host: Sequence[tuple[int, bytes]]
) -> list[Call]:
    """The calls that write the contents of blocks to disk: pairs of (device or host block, hash)."""
    calls = [_store(STORE_HOST, host)] if host else []
    for start in range(0, len(device), BLOCKS_PER_CALL):
        calls.append(_store(STORE_DEVICE, device[start : start + BLOCKS_PER_CALL]))
    return calls


def _store(program: str, blocks: Sequence[tuple[int, bytes]]) -> Call:
    """Buffers: int32[n] block ids, and uint8[n, 1 + longest hash]; the first byte of a row is the hash's length."""
    ids = np.array([block_id for block_id, _ in blocks], np.int32)
    length = max(len(block_hash) for _, block_hash in blocks)
    hashes = np.zeros((len(blocks), 1 + length), np.uint8)
    for row, (_, block_hash) in zip(hashes, blocks, strict=True):
        row[0] = len(block_hash)
        row[1 : 1 + len(block_hash)] = np.frombuffer(block_hash, np.uint8)
    return Call(program, (ids, hashes))


def unpack_stores(ids: np.ndarray, hashes: np.ndarray) -> list[tuple[int, bytes]]:
    """Pairs of (block, hash) from a call that stores blocks."""
    rows = zip(ids.tolist(), hashes, strict=True)
    return [(block_id, row[1 : 1 + row[0]].tobytes()) for block_id, row in rows]


def portions(
    pairs: Sequence[tuple[int, Other]], size: int = BLOCKS_PER_CALL
) -> Iterator[tuple[list[int], list[Other]]]:
    """The first and second elements of at most `size` pairs at a time."""
    for start in range(0, len(pairs), size):
        some = pairs[start : start + size]
        yield [first for first, _ in some], [second for _, second in some]


def padded(block_ids: Sequence[int]) -> np.ndarray:
    """int32[BLOCKS_PER_CALL]: the given ids, padded with the null block."""
    ids = np.full(BLOCKS_PER_CALL, NULL_BLOCK, np.int32)
    ids[: len(block_ids)] = block_ids
    return ids
