"""Where a step would spend its time, from the result of `worker.measure`. Pure arithmetic.

On a TPU XLA's own instructions take the cycles that XLA estimates, and a kernel the larger of its bundles over the
clock and its bytes over the bandwidth. On a GPU kernels take what `gpu_time` estimates, and attention the larger of its
flops and its bytes over the rates that it uses, and the time of its launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxpage.aot.attention_time import Rows, bundles
from jaxpage.aot.estimate import Estimate, kv_bytes
from jaxpage.aot.tpu_schedule import Region

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
    programs = {each["name"].split()[0]: each for each in measured["programs"]}
    if not programs or any("time" not in each for each in programs.values()):
        return []
    found = []
    rows = programs["layers"]["name"].split()[1]
    for (batch, length), best in estimated.decode.items():
        if batch == 1:  # runs a smaller program, which was not compiled
            continue
        parts = _parts(measured, [programs["layers"], programs["sample"]], (batch, 1, length))
        parts.append(Part(what="exchange", count=1, ms=best.exchange))
        found.append(_step(f"decode {batch} x {length}, {rows}", parts, best.total))
    chunk = measured["config"]["max_num_batched_tokens"]
    parts = _parts(measured, [programs["forward"], programs["sample"]], (1, chunk, chunk))
    chip = measured["chip"]
    seconds = max(
        chunk * measured["flops_per_token"] / chip["flops_per_second"],
        measured["bytes_per_step"] / chip["bytes_per_second"],
    )
    found.append(_step(f"prefill {chunk} tokens", parts, 1000 * seconds))
    return found


def _step(name: str, parts: list[Part], at_best: float) -> StepTime:
    largest = sorted((part for part in parts if part.ms), key=lambda part: -part.ms)
    return StepTime(name=name, parts=tuple(largest), at_best=at_best)


def _parts(
    measured: dict[str, Any], programs: list[dict[str, Any]], case: tuple[int, int, int]
) -> list[Part]:
    """case: rows, queries of each and their keys. Programs are as wide as they were compiled, however few the rows."""
    chip, found = measured["chip"], []
    count, query_len, kv_len = case
    of_kv = 1000 * kv_bytes(measured, count, kv_len) / chip["bytes_per_second"]
    for program in programs:
        name, time = program["name"].split()[0], program["time"]
        of_cycle = 1000 / chip["clock"]
        listed = 0
        for each in time["parts"]:
            listed += each["cycles"]
            what = f"{name}: {each['what']}"
            found.append(Part(what=what, count=each["count"], ms=each["cycles"] * of_cycle))
        found.append(Part(what=f"{name}: others", count=1, ms=(time["cycles"] - listed) * of_cycle))
        for kernel in time["kernels"]:
            if kernel["name"] == "paged_attention" or kernel["program"] is None:
                continue
            once = Region.of(kernel["program"]).bundles
            what = f"{name}: {kernel['name']}, loops once"
            found.append(
                Part(what=what, count=kernel["count"], ms=kernel["count"] * once * of_cycle)
            )
    kernels = [each for each in programs[0]["time"]["kernels"] if each["name"] == "paged_attention"]
    if chip["platform"] == "gpu":
        calls = sum(kernel["count"] for kernel in kernels)
        return [*found, _gpu_attention(measured, case, of_kv, calls)]
    kernels = [each for each in kernels if each["program"] is not None]
    total = 1000 / chip["clock"] * sum(_bundles(measured, kernel, case) for kernel in kernels)
    calls = sum(kernel["count"] for kernel in kernels) or 1
    bound = "bundles" if total > of_kv else "bytes"
    found.append(Part(what=f"attention ({bound})", count=calls, ms=max(total, of_kv)))
    return found


def _bundles(measured: dict[str, Any], kernel: dict[str, Any], case: tuple[int, int, int]) -> float:
    """The bundles of all calls of an attention kernel. Layers with a window call it for fewer keys."""
    (count, query_len, kv_len), region = case, Region.of(kernel["program"])
    tiles = measured["attention_tiles"]["decode" if query_len == 1 else "prefill"]
    num_layers = sum(layers for _, layers in measured["kv_groups"])
    total = 0.0
    for window, layers in measured["kv_groups"]:
        rows = Rows(count=count, query_len=query_len, kv_len=kv_len, window=window, **tiles)
        total += kernel["count"] * layers / num_layers * bundles(region, rows)
    return total


def _gpu_attention(
    measured: dict[str, Any], case: tuple[int, int, int], of_kv: float, calls: int
) -> Part:
    """`of_kv`: ms of all keys and values at the peak rate."""
    chip, (count, query_len, kv_len) = measured["chip"], case
    pairs = count * sum(
        layers * sum(_seen(end, window) for end in range(kv_len - query_len + 1, kv_len + 1))
        for window, layers in measured["kv_groups"]
    )
    rate = chip["flops_per_second"] * chip["product_share"]
    of_flops = 1000 * pairs * measured["attention_flops"] / rate
    of_bytes = of_kv / chip["copy_share"]
    bound = "flops" if of_flops > of_bytes else "bytes"
    ms = max(of_flops, of_bytes) + 1000 * calls * chip["seconds_per_kernel"]
    return Part(what=f"attention ({bound})", count=calls, ms=ms)


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
