"""What is made of the compiler's numbers before they are milliseconds."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest

from jaxpage.aot.attention_time import Rows, bundles
from jaxpage.aot.estimate import estimate
from jaxpage.aot.step_time import show_times, step_times
from jaxpage.aot.targets import CHIPS
from jaxpage.aot.tpu_schedule import Region
from tests.aot.test_estimate import OF_DRAFTS, measured

COPY = Region(begin=12, own=14, num_starts=1)
WAIT = Region(begin=13, own=8, num_waits=1)
CLEAR = Region(begin=14, own=16)
KEEP = Region(begin=15, own=44, is_branch=True)
DIVIDE = Region(begin=18, own=30, trips=2, slots={"EUP": 1})
SPREAD = Region(begin=5, own=14, trips=8)
WRITE = Region(
    begin=5,
    own=20,
    num_waits=1,
    inner=(Region(begin=6, own=180, is_branch=True, num_starts=2, num_waits=2),),
)


def branch(own, *inner, condition=None, **others) -> Region:
    return Region(
        begin=20, own=own, is_branch=True, condition=condition, inner=tuple(inner), **others
    )


UNROLLED = branch(
    20,
    branch(100, condition="%p1", num_starts=8),
    branch(5, COPY, condition="!%p1"),
)


def program(*products: Region, begin_fetch: Region = UNROLLED) -> Region:
    """With what multiplies in a turn, and what starts a fetch's copies."""
    wait_for_part = branch(35, WAIT, CLEAR, CLEAR, KEEP, KEEP, condition="!%p2")
    turn = Region(begin=10, own=60, num_waits=1, inner=(begin_fetch, wait_for_part, *products))
    unit = Region(
        begin=9, own=70, num_starts=1, inner=(branch(9, SPREAD, num_waits=2), turn, DIVIDE)
    )
    # Loops before and after, which only start DMAs and only wait, write nothing.
    return Region(begin=0, own=200, inner=(COPY, WRITE, branch(100, COPY), unit, WAIT))


MASKED, CLEAR_OF_MASK = (branch(own, slots={"MXU": 32}) for own in (900, 800))
OF_PROMPT = program(CLEAR_OF_MASK, MASKED)
PRODUCTS_OF_TILES = (
    branch(600, condition="%p2", slots={"MXU": 256}),
    branch(5, Region(begin=30, own=200, slots={"MXU": 64}), condition="!%p2"),
)
OF_TILES = program(*PRODUCTS_OF_TILES)
TILES = {
    "tile_q": 32,
    "tile_tokens": 32,
    "tile_kv": 512,
    "fetch_kv": 512,
    "block_size": 128,
    "write_sizes": (16,),
}
ONE_QUERY = {"tile_q": 1, "tile_tokens": 16, "fetch_kv": 2048}
ONCE_A_UNIT = 70 + 2 * 30
ALL_TILES = {"decode": TILES | ONE_QUERY, "prefill": TILES}


@pytest.mark.parametrize(
    "kv_len, in_turns",
    [
        (2048, 60 + 120 + 600),
        # All blocks are full, and two tiles too.
        (1024, 60 + 25 + 8 * 14 + 35 + 8 * 8 + 5 + 2 * 200),
        # Of two tiles two blocks are empty, and one block has keys of another row.
        (700, 60 + 25 + 6 * 14 + 35 + 6 * 8 + 2 * 16 + 44 + 5 + 2 * 200),
        (4096, 2 * (60 + 120 + 600)),
    ],
)
def test_a_fetch_with_fewer_keys_takes_what_these_take(kv_len, in_turns):
    rows = Rows(count=64, query_len=1, kv_len=kv_len, **TILES | ONE_QUERY)
    # All but the first rows write their tokens when their turns begin; 16 rows share a tile of tokens.
    assert (len(list(rows.units())), rows.num_chunks(16)) == (64, 6)
    unit = ONCE_A_UNIT + (9 + 8 * 14) / 16 + in_turns
    assert bundles(OF_TILES, rows) == 300 + 6 * 200 + 64 * unit


def test_a_window_leaves_keys_out():
    """Of the last fetch's 2048 keys it leaves 1000: the end of a block, and 7 more; two tiles of 512."""
    rows = Rows(count=1, query_len=1, kv_len=4096, window=1000, **TILES | ONE_QUERY)
    in_turn = 60 + 25 + 8 * 14 + 35 + 8 * 8 + 44 + 5 + 2 * 200
    assert bundles(OF_TILES, rows) == 300 + 200 + ONCE_A_UNIT + (9 + 8 * 14) / 16 + in_turn


def test_a_prompt_with_a_window_masks_its_begin_and_its_end():
    rows = Rows(count=1, query_len=1024, kv_len=1024, window=512, **TILES)
    # The first 16 tiles of queries see one fetch, which ends with them; the others two, the first of them in part.
    assert rows.turns().total() == 16 + 2 * 16
    assert all(turn.is_masked for turn in rows.turns())
    wide = dataclasses.replace(rows, window=1024)
    assert wide.turns() == dataclasses.replace(rows, window=None).turns()


def test_queries_of_a_chunk_see_the_keys_before_them():
    rows = Rows(count=1, query_len=1024, kv_len=2048, **TILES)
    assert len(list(rows.units())) == 32 and rows.num_chunks(16) == 1024 / 16
    # Sixteen tiles of queries end at up to 1536 keys, sixteen at up to 2048; the last fetch of each is masked.
    turns = rows.turns()
    assert turns.total() == 16 * 3 + 16 * 4
    assert sum(count for turn, count in turns.items() if turn.is_masked) == 32
    assert sum(count for turn, count in turns.items() if not turn.is_whole) == 30


def test_tiles_of_queries_begin_where_their_tokens_do():
    """Not where the row does: of three rows with 40 queries the second has them in tiles of 24 and of 16."""
    rows = Rows(count=3, query_len=40, kv_len=40, **TILES)
    assert list(rows.units()) == [(0, 32), (32, 40), (0, 24), (24, 40), (0, 16), (16, 40)]
    assert rows.turns().total() == 6


def test_scales_are_written_a_block_at_a_time():
    rows = Rows(count=1, query_len=1024, kv_len=1024, **TILES | {"write_sizes": (32, 128)})
    first, write, *rest = OF_PROMPT.inner
    assert write is WRITE
    of_scales = dataclasses.replace(WRITE, own=10, num_starts=1, inner=())
    both = dataclasses.replace(OF_PROMPT, inner=(first, WRITE, of_scales, *rest))
    only_data = bundles(OF_PROMPT, rows)
    assert bundles(both, rows) - only_data == 1024 / 128 * 10


def test_copies_of_many_blocks_are_a_loop_for_whole_fetches_too():
    rows = Rows(count=1, query_len=1, kv_len=2048, **TILES | ONE_QUERY | {"block_size": 16})
    unrolled, looped = OF_TILES, program(*PRODUCTS_OF_TILES, begin_fetch=branch(20, COPY))
    assert bundles(looped, rows) - bundles(unrolled, rows) == 128 * 14 - 100


def test_only_turns_with_a_mask_pay_for_it():
    whole = 60 + 120
    row = {"count": 1, "query_len": 32}
    once = 300 + 2 * 200 + ONCE_A_UNIT + 9 + 8 * 14
    masked = Rows(kv_len=512, **row, **TILES)
    assert bundles(OF_PROMPT, masked) == once + whole + 900
    both = Rows(kv_len=1024, **row, **TILES)
    assert bundles(OF_PROMPT, both) == once + 2 * whole + 800 + 900


def test_a_launch_that_writes_nothing_has_no_rows():
    """That of the rows with one query, in a step with prompts."""
    rows = Rows(count=1, query_len=1024, kv_len=2048, **TILES)
    inner = tuple(each for each in OF_PROMPT.inner if each is not WRITE)
    assert bundles(dataclasses.replace(OF_PROMPT, inner=inner), rows) == 300


WITH_DRAFTS = TILES | {"tile_q": 4, "tile_tokens": 4, "one_tile_per_row": True}


def test_rows_with_drafts_are_written_by_one_launch_and_computed_by_another():
    """Each has one unit, wherever it begins; longer rows are the first launch's, too."""
    rows = Rows(count=3, query_len=3, kv_len=512, **WITH_DRAFTS)
    assert list(rows.units()) == [(0, 3)] * 3
    inner = tuple(each for each in OF_PROMPT.inner if each is not WRITE)
    attends = dataclasses.replace(OF_PROMPT, inner=inner)
    assert bundles(OF_PROMPT, rows) == 300 + 3 * 200
    of_drafts = bundles(attends, rows, is_of_drafts=True)
    assert of_drafts == 300 + 3 * (ONCE_A_UNIT + 60 + 120 + 900 + 9 + 8 * 14)
    assert bundles(attends, rows) == 300
    longer = Rows(count=3, query_len=5, kv_len=512, **TILES)
    assert bundles(attends, longer, is_of_drafts=True) == 300


def kind(layers: int, *, window: int | None = None, width: int = 512, tiles: dict | None = None):
    """Of attention."""
    return {
        "window": window,
        "layers": layers,
        "width": width,
        "flops": 4 * width,
        "tiles": tiles or ALL_TILES,
    }


def of_tpu(**time) -> dict:
    kernel = {"name": "paged_attention", "count": 28, "program": dataclasses.asdict(OF_TILES)}
    parts = [{"what": "dot", "count": 28, "cycles": 900_000}]
    found = {"cycles": 1_000_000, "parts": parts, "kernels": [kernel]}
    programs = [
        {"name": "layers R=64", "time": found | time},
        {"name": "forward T=2048", "time": found},
        {"name": "sample R=64", "time": found | {"kernels": []}},
    ]
    chip = dataclasses.asdict(CHIPS["v6e"])
    values = measured(chip=chip, programs=programs, attention_kinds=[kind(28)])
    values["config"] |= {"max_num_batched_tokens": 2048, "block_size": 128}
    return values


def test_a_kernel_takes_the_greater_of_its_bundles_and_its_bytes():
    values = of_tpu()
    times = step_times(values, estimate(values))
    assert [each.name for each in times][-1] == "prefill 2048 tokens"
    (step, *_) = times
    clock = CHIPS["v6e"].clock
    xla = [
        part.ms for part in step.parts if "attention" not in part.what and part.what != "exchange"
    ]
    assert sum(xla) == pytest.approx(1000 * 2_000_000 / clock)
    values["layer_block_bytes"] *= 10**6
    (more, *_) = step_times(values, estimate(values))
    (attention,) = [part for part in more.parts if part.what == "attention (bytes)"]
    batch, length = map(int, more.name.split(",")[0].removeprefix("decode ").split(" x "))
    num_bytes = batch * -(-length // 128) * 28 * values["layer_block_bytes"]
    assert attention.ms == pytest.approx(1000 * num_bytes / values["chip"]["bytes_per_second"])


def test_attention_of_a_gpu_takes_its_flops_or_bytes_and_its_launches():
    values = of_tpu(kernels=[{"name": "paged_attention", "count": 56, "program": None}])
    chip = CHIPS["h200"]
    values |= {
        "chip": dataclasses.asdict(chip),
        "attention_kinds": [kind(28, width=16 * 128)],
    }
    *_, prefill = step_times(values, estimate(values))
    (attention,) = [part for part in prefill.parts if part.what == "attention (flops)"]
    flops = 28 * 4 * 16 * 128 * sum(range(1, 2049))
    seconds = flops / (chip.flops_per_second * chip.product_share)
    assert attention.ms == pytest.approx(1000 * (seconds + 28 * chip.seconds_per_kernel))
    values["layer_block_bytes"] *= 10**6
    (decode, *_) = step_times(values, estimate(values))
    (attention,) = [part for part in decode.parts if part.what == "attention (bytes)"]
    batch, length = map(int, decode.name.split(",")[0].removeprefix("decode ").split(" x "))
    num_bytes = batch * -(-length // 128) * 28 * values["layer_block_bytes"]
    seconds = num_bytes / (chip.bytes_per_second * chip.copy_share)
    assert attention.ms == pytest.approx(1000 * (seconds + 56 * chip.seconds_per_kernel))
    lines = show_times(step_times(values, estimate(values)), explain=False, is_gpu=True)
    assert "the kernels' bytes and flops" in lines[1] and "plus that of a launch" in lines[-1]


def test_layers_with_a_window_take_the_time_of_its_keys():
    def attention(**changes) -> float:
        values = of_tpu() | changes
        (decode, *_) = step_times(values, estimate(values))
        (part,) = [part for part in decode.parts if part.what == "attention (bundles)"]
        return part.ms

    whole, short = attention(), attention(attention_kinds=[kind(28, window=2)])
    mixed = [kind(21, window=2), kind(7)]
    assert attention(attention_kinds=mixed) == pytest.approx((3 * short + whole) / 4)
    assert short < whole


def test_steps_with_drafts_have_a_launch_for_their_rows():
    """Unless these have more queries than its tiles have."""

    def attention(num_tokens: int) -> float:
        tiles = ALL_TILES | {"drafts": WITH_DRAFTS}
        values = of_tpu() | {"attention_kinds": [kind(28, tiles=tiles)]}
        drafts = {"forward": "forward T=2048", "num_tokens": num_tokens, "model": None}
        forward, sample = values["programs"][1:]
        (writes,) = forward["time"]["kernels"]
        inner = tuple(each for each in OF_PROMPT.inner if each is not WRITE)
        writes |= {"program": dataclasses.asdict(OF_PROMPT)}
        attends = dataclasses.asdict(dataclasses.replace(OF_PROMPT, inner=inner))
        of_drafts = writes | {"name": "paged_attention_of_drafts", "program": attends}
        forward["time"] = forward["time"] | {"kernels": [writes, of_drafts]}
        values["programs"].append(sample | {"name": "verify R=64"})
        values["drafts"] = drafts
        (decode, *_) = step_times(values, estimate(values))
        (part,) = [part for part in decode.parts if part.what == "attention (bundles)"]
        assert not any("loops once" in part.what for part in decode.parts)
        return part.ms * values["chip"]["clock"] / 1000 / 28

    rows = partial(Rows, count=64, kv_len=1000)
    few, many = rows(query_len=4, **WITH_DRAFTS), rows(query_len=5, **TILES)
    inner = tuple(each for each in OF_PROMPT.inner if each is not WRITE)
    attends = dataclasses.replace(OF_PROMPT, inner=inner)
    of_few = bundles(OF_PROMPT, few) + bundles(attends, few, is_of_drafts=True)
    assert attention(3) == pytest.approx(of_few)
    assert attention(4) == pytest.approx(bundles(OF_PROMPT, many) + 300)


def test_layers_with_other_heads_have_kernels_of_their_own():
    """On a TPU the width of its results tells whose a kernel is; a GPU's flops are those of each kind."""
    wide = [kind(21, window=2), kind(7, width=1024)]
    values = of_tpu() | {"attention_kinds": wide}
    (kernel,) = values["programs"][0]["time"]["kernels"]
    both = [kernel | {"count": 21, "width": 512}, kernel | {"count": 7, "width": 1024}]
    values["programs"][0]["time"]["kernels"] = both
    (decode, *_) = step_times(values, estimate(values))
    (part,) = [part for part in decode.parts if part.what == "attention (bundles)"]
    rows = Rows(count=64, query_len=1, kv_len=1000, **TILES | ONE_QUERY)
    total = 21 * bundles(OF_TILES, dataclasses.replace(rows, window=2)) + 7 * bundles(
        OF_TILES, rows
    )
    assert part.ms == pytest.approx(1000 * total / values["chip"]["clock"])
    chip = CHIPS["h200"]
    values |= {"chip": dataclasses.asdict(chip)}
    *_, prefill = step_times(values, estimate(values))
    (part,) = [part for part in prefill.parts if part.what == "attention (flops)"]
    flops = 4 * (21 * 512 * (2 * 2048 - 1) + 7 * 1024 * sum(range(1, 2049)))
    seconds = flops / (chip.flops_per_second * chip.product_share)
    assert part.ms == pytest.approx(1000 * (seconds + 28 * chip.seconds_per_kernel))


def test_prompts_of_a_model_with_a_recurrent_state_take_its_chunks_too():
    recurrence = {
        "sequence_bytes": 10**6,
        "num_cached": 10,
        "flops_per_token": 10**8,
        "flops_in_prompts": 2 * 10**8,
    }
    values = of_tpu() | {"flops_per_token": 10**10}
    *_, plain = step_times(values, estimate(values))
    values |= {"recurrence": recurrence}
    *_, prefill = step_times(values, estimate(values))
    assert prefill.at_best == pytest.approx(1.02 * plain.at_best)


def test_the_kernels_of_the_delta_rule_take_their_bytes_or_flops():
    recurrence = {
        "sequence_bytes": 10**6,
        "num_cached": 10,
        "flops_per_token": 10,
        "flops_in_prompts": 10**9,
    }
    values = of_tpu() | {"recurrence": recurrence}
    (attention,) = values["programs"][0]["time"]["kernels"]
    of_rows = attention | {"name": "delta_rule", "count": 24}
    values["programs"][0]["time"]["kernels"] = [attention, of_rows]
    values["programs"][1]["time"] = values["programs"][1]["time"] | {
        "kernels": [attention, of_rows, of_rows | {"name": "delta_rule_windows"}]
    }
    decode, *_, prefill = step_times(values, estimate(values))
    found = [
        (part.count, part.ms)
        for step in (decode, prefill)
        for part in step.parts
        if "recurrent states" in part.what
    ]
    chip = values["chip"]
    bytes_of_rows, flops = 2 * 64 * 10**6, 2048 * 10**9
    assert found == [
        (24, pytest.approx(1000 * bytes_of_rows / chip["bytes_per_second"])),
        (48, pytest.approx(1000 * flops / chip["flops_per_second"])),
    ]
    assert not any("loops once" in part.what for part in decode.parts + prefill.parts)
    chip = CHIPS["h200"]  # whose kernels are for rows of one token
    values |= {"chip": dataclasses.asdict(chip)}
    decode, *_, prefill = step_times(values, estimate(values))
    found = [
        part.ms for step in (decode, prefill) for part in step.parts if "recurrent" in part.what
    ]
    of_rows = bytes_of_rows / (chip.bytes_per_second * chip.copy_share)
    assert found == [
        pytest.approx(1000 * (of_rows + 24 * chip.seconds_per_kernel)),
        pytest.approx(1000 * 48 * chip.seconds_per_kernel),
    ]


def lookups(*, num_tiles: int, trips: int | None = None) -> dict:
    """A kernel of `embedding/tpu.py`, as libtpu schedules it for one tile of tokens or for several."""
    found = branch(49, Region(begin=30, own=92, trips=5))
    missing = branch(13, Region(begin=40, own=23, trips=5))
    of_tokens = Region(
        begin=20, own=79, trips=trips, num_starts=1, num_waits=1, inner=(found, missing)
    )
    first_copies = Region(begin=10, own=47, trips=7, num_starts=1)
    if num_tiles == 1:
        program = Region(
            begin=0, own=462, num_starts=2, num_waits=2, inner=(first_copies, of_tokens)
        )
    else:
        # As on a TPU v5p, where the loop over tiles sends results and waits for them.
        tile = branch(429, first_copies, of_tokens, num_starts=1)
        tiles = Region(begin=7, own=13, trips=num_tiles + 1, num_waits=1, inner=(tile,))
        program = Region(begin=0, own=39, num_waits=1, inner=(tiles,))
    return {"name": "embedding", "count": 1, "program": dataclasses.asdict(program)}


def test_lookups_take_their_bundles_for_each_token():
    of_token, once, of_tile = 79 + 49 + 5 * 92, 462 + 7 * 47, 13 + 429 + 7 * 47
    # Each row has one token in a pass that makes drafts, and three where they are checked.
    wanted = {
        "layers": once + 64 * of_token,
        "draft": 2 * (once + 64 * of_token),
        "forward T=256": 39 + 3 * of_tile + 3 * 64 * of_token,
        "forward T=2048": 39 + 17 * of_tile + 2048 * of_token,
    }
    values = with_drafts()
    of_one_tile = lookups(num_tiles=1, trips=64)
    kernels = (of_one_tile, lookups(num_tiles=16), of_one_tile | {"count": 2}, lookups(num_tiles=2))
    names = ("layers R=64", "forward T=2048", "draft R=64", "forward T=256")
    times = {each["name"]: each["time"] for each in values["programs"]}
    for name, kernel in zip(names, kernels, strict=True):
        times[name]["kernels"] = [kernel]

    def check(values: dict, in_decode: list[str]) -> None:
        steps = {each.name.split(",")[0]: each for each in step_times(values, estimate(values))}
        cases = {"decode 64 x 1000": in_decode, "prefill 2048 tokens": ["forward T=2048"]}
        for step, programs in ((steps[name], programs) for name, programs in cases.items()):
            found = {part.what: part.ms for part in step.parts if "embedding" in part.what}
            assert found == {
                f"{name.split()[0]}: embedding": pytest.approx(
                    1000 * wanted[name] / values["chip"]["clock"]
                )
                for name in programs
            }

    check(values, ["forward T=256", "draft"])
    check(values | {"drafts": None}, ["layers"])


def with_drafts(**time) -> dict:
    """Two drafts a row, by a model that has an eighth of the model's heads; a pass has 24 layers."""
    values = of_tpu()
    (kernel,) = values["programs"][0]["time"]["kernels"]
    of_model, of_drafts = kernel | {"width": 512}, kernel | {"width": 64, "count": 24}
    found = {"cycles": 1_000_000, "parts": [], "kernels": [of_model, of_drafts]}
    in_drafts = {"kernels": [of_drafts | {"count": 48}]}
    values["programs"] += [
        {"name": "draft R=64", "time": found | in_drafts | time},
        {"name": "verify R=64", "time": found | {"kernels": []}},
        {"name": "forward T=256", "time": found},
    ]
    model = {"layer_block_bytes": values["layer_block_bytes"]} | OF_DRAFTS
    model |= {"attention_kinds": [kind(24, width=64)], "kv_groups": [[None, 24]]}
    return values | {"drafts": {"num_tokens": 2, "forward": "forward T=256", "model": model}}


def test_a_step_with_drafts_runs_the_programs_that_make_and_check_them():
    values = with_drafts()
    found = {each.name.split(",")[0]: each for each in step_times(values, estimate(values))}
    step, prefill = found["decode 64 x 1000"], found["prefill 2048 tokens"]
    programs = {part.what.split(":")[0] for part in step.parts}
    assert {"forward", "verify", "draft"} <= programs and step.name.endswith(", T=256")
    clock = values["chip"]["clock"]
    of_xla = [part.ms for part in step.parts if part.what.endswith(": others")]
    assert sum(of_xla) == pytest.approx(1000 * 3_000_000 / clock)
    kernels = {part.what.rpartition(" ")[0]: part for part in step.parts}
    # Two passes that make drafts, and the one in the step, whose rows have three tokens.
    of_drafts = "attention of the draft model in"
    counts = [kernels[f"{of_drafts} {name}"].count for name in ("draft", "forward")]
    assert counts == [48, 24] and kernels["attention"].count == 28
    once = bundles(OF_TILES, Rows(count=64, query_len=1, kv_len=1000, **TILES | ONE_QUERY))
    made = kernels[f"{of_drafts} draft"].ms
    assert made == pytest.approx(1000 * 48 * once / clock)
    assert not any(part.what.startswith("draft:") for part in prefill.parts)
    (line, *_) = show_times([step], explain=False, is_gpu=False)[2:]
    assert f"XLA {sum(of_xla):.2f}, attention {step.ms - sum(of_xla):.2f}" in line
    lookup = values | {"drafts": values["drafts"] | {"model": None}}
    (fewer, *_) = step_times(lookup, estimate(lookup))
    assert not any("draft" in part.what for part in fewer.parts)


def test_what_was_not_compiled_takes_no_time():
    values = measured()
    assert step_times(values, estimate(values)) == []
    assert show_times([], explain=True, is_gpu=False) == []


def test_ten_parts_are_explained():
    parts = [{"what": f"part {i}", "count": 1, "cycles": 1000 - i} for i in range(30)]
    values = of_tpu(parts=parts, cycles=100_000)
    lines = show_times(step_times(values, estimate(values)), explain=True, is_gpu=False)
    tables = [i for i, line in enumerate(lines) if line.endswith("part")]
    assert len(tables) == len(step_times(values, estimate(values)))
    assert lines[tables[0] + 11] == "" and lines[-1].startswith("not modelled: ")
