"""Where a step would spend its time, from the result of `worker.measure`. Pure arithmetic.

On a TPU XLA's own instructions take the cycles that XLA estimates, and a kernel the larger of its bundles over the
clock and its bytes over the bandwidth. Loops of unknown length count once, but that of lookups once for each token,
and those of attention as `attention_time` says. On a GPU kernels take what `gpu_time` estimates, attention the larger
of its flops and its bytes over the rates that it uses, and the time of its launches, and kernels for recurrent states
that of the states of rows with one token and of their launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxpage.aot.attention_time import Rows, bundles
from jaxpage.aot.estimate import Estimate, kv_bytes, num_checked, without_head
from jaxpage.aot.tpu_schedule import Region

_OF_DRAFTS = "paged_attention_of_drafts"  # the kernel's launch for rows with drafts
_OF_STATES = ("delta_rule", "mamba2")  # beginnings of names of kernels for recurrent states
NOT_MODELLED = (
    "not modelled: waiting for DMAs within a kernel, gaps between programs and instructions, transfers that overlap "
    "with products, branches for requests that ask for more than sampling; XLA's estimates of passes over large "
    "arrays assume about 40 % of the bandwidth"
)
NOT_MODELLED_ON_GPUS = (
    "XLA has no estimates for a GPU: a kernel takes the time of its bytes or flops, at the rates that copies and "
    "products were measured to achieve, plus that of a launch; not modelled: how long attention waits for memory where "
    "rows are few, autotuning, gaps between programs, branches for requests that ask for more than sampling"
)


@dataclass(frozen=True, kw_only=True)
class Part:
    what: str
    count: int
    ms: float


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of a step in ms. at_best: bytes over bandwidth, or flops over peak, see `estimate`."""

    name: str
    parts: tuple[Part, ...]  # the largest first; one is the remaining XLA instructions
    at_best: float

    @property
    def ms(self) -> float:
        return sum(part.ms for part in self.parts)


def step_times(measured: dict[str, Any], estimated: Estimate) -> list[StepTime]:
    """A decode step of each batch in the estimate, and the largest chunk of a prompt; [] if nothing was compiled."""
    programs = {each["name"]: each for each in measured["programs"]}
    if not programs or any("time" not in each for each in programs.values()):
        return []
    # The first one of each kind is the largest.
    of_kind = {name.split()[0]: each for name, each in reversed(programs.items())}
    drafts, found = measured["drafts"], []
    in_decode = [of_kind["layers"], of_kind["sample"]]
    if drafts is not None:
        in_decode = [programs[drafts["forward"]], of_kind["verify"]]
        in_decode += [of_kind["draft"]] if drafts["model"] else []
    size = in_decode[0]["name"].split()[1]
    for (batch, length), best in estimated.decode.items():
        if batch == 1:  # runs a smaller program, which was not compiled
            continue
        queries = 1 if drafts is None else max(1, num_checked(measured, batch) // batch)
        parts = _parts(measured, in_decode, (batch, queries, length))
        parts.append(Part(what="exchange", count=1, ms=best.exchange))
        found.append(_step(f"decode {batch} x {length}, {size}", parts, best.total))
    chunk = measured["config"]["max_num_batched_tokens"]
    parts = _parts(measured, [of_kind["forward"], of_kind["sample"]], (1, chunk, chunk))
    chip, models = measured["chip"], [measured]
    models += [without_head(drafts["model"])] if drafts and drafts["model"] else []
    seconds = sum(
        max(
            chunk * _flops_in_prompts(model) / chip["flops_per_second"],
            model["bytes_per_step"] / chip["bytes_per_second"],
        )
        for model in models
    )
    found.append(_step(f"prefill {chunk} tokens", parts, 1000 * seconds))
    return found


def _flops_in_prompts(model: dict[str, Any]) -> int:
    """Of a token of a prompt, without attention."""
    recurrence = model["recurrence"]
    return model["flops_per_token"] + (recurrence["flops_in_prompts"] if recurrence else 0)


def _step(name: str, parts: list[Part], at_best: float) -> StepTime:
    largest = sorted((part for part in parts if part.ms), key=lambda part: -part.ms)
    return StepTime(name=name, parts=tuple(largest), at_best=at_best)


def _parts(
    measured: dict[str, Any], programs: list[dict[str, Any]], case: tuple[int, int, int]
) -> list[Part]:
    """case: rows, queries of each and their keys. Programs are as wide as they were compiled, however few the rows."""
    found: list[Part] = []
    of_cycle = 1000 / measured["chip"]["clock"]
    for program in programs:
        name, time = program["name"].split()[0], program["time"]
        listed = 0
        for each in time["parts"]:
            listed += each["cycles"]
            what = f"{name}: {each['what']}"
            found.append(Part(what=what, count=each["count"], ms=each["cycles"] * of_cycle))
        found.append(Part(what=f"{name}: others", count=1, ms=(time["cycles"] - listed) * of_cycle))
        for kernel in time["kernels"]:
            is_elsewhere = kernel["name"].startswith(("paged_attention", *_OF_STATES))
            if is_elsewhere or kernel["program"] is None:
                continue
            region = Region.of(kernel["program"])
            num_bundles, what = region.bundles, f"{name}: {kernel['name']}, loops once"
            if kernel["name"] == "embedding":
                num_tokens = case[0] * (1 if name == "draft" else case[1])
                num_bundles, what = _of_lookups(region, num_tokens), f"{name}: embedding"
            ms = kernel["count"] * num_bundles * of_cycle
            found.append(Part(what=what, count=kernel["count"], ms=ms))
    found += _recurrent_parts(measured, programs[0], case)
    return found + _attention_parts(measured, programs, case)


def _of_lookups(program: Region, num_tokens: int) -> int:
    """The bundles of a launch of `pallas_kernels/embedding/tpu.py`.

    Its innermost loop that starts copies and waits for them is over tokens. Each takes one of two branches: the longer
    one finds its row, the other has none to find. A repeated token takes neither, but is counted like the others.
    """
    loop = _innermost_copying(program)
    if loop is None:
        return program.bundles
    of_branches = [branch.bundles for branch in loop.branches]
    of_token = loop.bundles - sum(of_branches) + max(of_branches, default=0)
    return _bundles_without(program, loop) + num_tokens * of_token


def _innermost_copying(region: Region) -> Region | None:
    """The first such loop within."""
    for loop in region.loops:
        if found := _innermost_copying(loop):
            return found
        if loop.starts and loop.waits:
            return loop
    return None


def _bundles_without(region: Region, loop: Region) -> int:
    """`Region.bundles`, as if a loop within took none."""
    others = (each for each in region.inner if each is not loop)
    return region.own + sum((each.trips or 1) * _bundles_without(each, loop) for each in others)


def _recurrent_parts(
    measured: dict[str, Any], program: dict[str, Any], case: tuple[int, int, int]
) -> list[Part]:
    """The kernels for recurrent states, whose work is as long as there are rows: the states of all rows over the
    bandwidth, or on a TPU flops over the peak. On a GPU rows of several tokens are XLA's.
    """
    recurrence, chip, (count, query_len, _) = measured["recurrence"], measured["chip"], case
    kernels = [x for x in program["time"]["kernels"] if x["name"].startswith(_OF_STATES)]
    if not kernels or recurrence is None:
        return []
    of_states = 2 * count * recurrence["sequence_bytes"] / chip["bytes_per_second"]
    calls = sum(kernel["count"] for kernel in kernels)
    if chip["platform"] == "gpu":
        of_rows = of_states / chip["copy_share"] if query_len == 1 else 0.0
        ms = 1000 * (of_rows + calls * chip["seconds_per_kernel"])
        return [Part(what="recurrent states (bytes)", count=calls, ms=ms)]
    flops = recurrence["flops_per_token" if query_len == 1 else "flops_in_prompts"]
    of_products = count * query_len * flops / chip["flops_per_second"]
    bound = "flops" if of_products > of_states else "bytes"
    ms = 1000 * max(of_states, of_products)
    return [Part(what=f"recurrent states ({bound}, at best)", count=calls, ms=ms)]


def _attention_parts(
    measured: dict[str, Any], programs: list[dict[str, Any]], case: tuple[int, int, int]
) -> list[Part]:
    """Of the model, and of a draft model: in the first program, and in each pass of `draft`."""
    found = [_attention(measured, measured, programs[0], case, "attention")]
    drafts = measured["drafts"]
    if drafts is None or drafts["model"] is None:
        return found
    cases = [(programs[0], case)]
    cases += [(x, (case[0], 1, case[2])) for x in programs if x["name"].startswith("draft")]
    for program, its_case in cases:
        what = f"attention of the draft model in {program['name'].split()[0]}"
        found.append(_attention(measured, drafts["model"], program, its_case, what))
    return found


def _attention(
    measured: dict[str, Any],
    model: dict[str, Any],
    program: dict[str, Any],
    case: tuple[int, int, int],
    what: str,
) -> Part:
    """The attention of the plan's model or its draft model in a program."""
    chip, block_size = measured["chip"], measured["config"]["block_size"]
    kernels = _kernels_of(measured, model, program)
    calls = sum(kernel["count"] for kernel in kernels)
    passes = measured["drafts"]["num_tokens"] if program["name"].startswith("draft") else 1
    count, _, kv_len = case
    of_kv = 1000 * passes * kv_bytes(model, block_size, count, kv_len) / chip["bytes_per_second"]
    if chip["platform"] == "gpu":
        of_pairs = 1000 * passes * _seconds_of_pairs(chip, model, case)
        of_bytes = of_kv / chip["copy_share"]
        bound = "flops" if of_pairs > of_bytes else "bytes"
        ms = max(of_pairs, of_bytes) + 1000 * calls * chip["seconds_per_kernel"]
        return Part(what=f"{what} ({bound})", count=calls, ms=ms)
    kernels = [each for each in kernels if each["program"] is not None]
    total = 1000 / chip["clock"] * sum(_bundles(model, kernel, case) for kernel in kernels)
    bound = "bundles" if total > of_kv else "bytes"
    return Part(what=f"{what} ({bound})", count=calls or 1, ms=max(total, of_kv))


def _kernels_of(
    measured: dict[str, Any], model: dict[str, Any], program: dict[str, Any]
) -> list[dict[str, Any]]:
    """The attention kernels of a program that are of `model`, by the width of their results. Where this does not tell,
    all are the plan's model's, except in `draft`.
    """
    kernels = [
        x for x in program["time"]["kernels"] if x["name"] in ("paged_attention", _OF_DRAFTS)
    ]
    drafts = measured["drafts"] and measured["drafts"]["model"]
    if not drafts or program["name"].startswith("draft"):
        return kernels
    own, other = ({x["width"] for x in each["attention_kinds"]} for each in (measured, drafts))
    is_for_drafts = model is drafts
    return [x for x in kernels if (x.get("width") in other - own) == is_for_drafts]


def _bundles(model: dict[str, Any], kernel: dict[str, Any], case: tuple[int, int, int]) -> float:
    """The bundles of all calls of an attention kernel, by layers with results of its width. Those with a window call it
    for fewer keys.
    """
    (count, query_len, kv_len), region = case, Region.of(kernel["program"])
    all_kinds = model["attention_kinds"]
    kinds = [kind for kind in all_kinds if kind["width"] == kernel.get("width")] or all_kinds
    num_layers = sum(kind["layers"] for kind in kinds)
    total = 0.0
    for kind in kinds:
        tiles = _tiles_of_rows(kind["tiles"], query_len)
        rows = Rows(count=count, query_len=query_len, kv_len=kv_len, window=kind["window"], **tiles)
        of_launch = bundles(region, rows, is_of_drafts=kernel["name"] == _OF_DRAFTS)
        total += kernel["count"] * kind["layers"] / num_layers * of_launch
    return total


def _tiles_of_rows(tiles: dict[str, Any], query_len: int) -> dict[str, Any]:
    """Of those of a kind of attention."""
    if query_len == 1:
        return tiles["decode"]
    drafts = tiles.get("drafts")
    return drafts if drafts and query_len <= drafts["tile_q"] else tiles["prefill"]


def _seconds_of_pairs(
    chip: dict[str, Any], model: dict[str, Any], case: tuple[int, int, int]
) -> float:
    """Of all pairs of a query and a key that it sees, on a GPU."""
    count, query_len, kv_len = case
    ends = range(kv_len - query_len + 1, kv_len + 1)
    flops = sum(
        kind["flops"] * kind["layers"] * count * sum(_seen(end, kind["window"]) for end in ends)
        for kind in model["attention_kinds"]
    )
    return flops / (chip["flops_per_second"] * chip["product_share"])


def _seen(num_keys: int, window: int | None) -> int:
    return num_keys if window is None else min(num_keys, window)


def show_times(times: list[StepTime], *, explain: bool, is_gpu: bool) -> list[str]:
    """A line for each step; with `explain` a table of the ten parts of each that take the most."""
    if not times:
        return []
    whose = "the kernels' bytes and flops" if is_gpu else "the compiler's estimates"
    lines = ["", f"where the time would go, by {whose} (no step was measured):"]
    for step in times:
        attention = sum(part.ms for part in step.parts if part.what.startswith("attention"))
        exchange = sum(part.ms for part in step.parts if part.what == "exchange")
        lines.append(
            f"{step.name:<28}{step.ms:>9.2f} ms: XLA {step.ms - attention - exchange:.2f}, attention {attention:.2f}"
            + (f", exchange {exchange:.2f}" if exchange else "")
            + f"; at best {step.at_best:.2f}"
        )
    for step in times if explain else ():
        lines += ["", f"{step.name}: {'ms':>8}{'share':>7}{'times':>7}  part"]
        for part in step.parts[:10]:
            lines.append(
                f"{part.ms:>{len(step.name) + 10}.3f}{part.ms / step.ms:>7.0%}{part.count:>7}  {part.what}"
            )
    return [*lines, NOT_MODELLED_ON_GPUS if is_gpu else NOT_MODELLED]
