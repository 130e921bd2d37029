"""`jaxpage plan`: whether a model fits a chip, how many tokens it holds, how fast it can be. No device is needed.

Knows flags and what is printed. Compiles for each target in a separate process (`worker`).
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn

from jaxpage.aot.estimate import Estimate, decode_step, estimate
from jaxpage.aot.process import Report, run
from jaxpage.aot.replicas import RULE, Division, best, show_divisions, sizes_of
from jaxpage.aot.step_time import show_times, step_times
from jaxpage.aot.targets import GIB, Target, parse_target
from jaxpage.aot.topology import missing_compiler
from jaxpage.aot.tpu_schedule import dump_variables
from jaxpage.config import EngineConfig
from jaxpage.environment import libtpu_flags
from jaxpage.flags import JsonDict

_HELP_OF_TP = (
    "devices that share the weights and the heads; auto compares all numbers that divide the target, with replicas on "
    f"the other devices, and names the best: {RULE}"
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Compile a model's largest steps for a chip; say whether it fits, and how fast it can be."""

    # a folder with config.json, or that file; no weights are read
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    # chip and topology: v5e:2x2, v5p:2x2x1, v6e:2x2, tpu7x:2x2x1, h200, h200:8
    target: str = "v6e:2x2"
    tp: Annotated[int | Literal["auto"], tyro.conf.arg(help=_HELP_OF_TP)] = 1
    compare: tuple[str, ...] = ()  # further targets, for a table
    dtype: str = "auto"
    max_model_len: str | None = None  # None: what config.json says
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    # steps with drafts: {"method": "ngram", "num_speculative_tokens": 4}, or with a "model", whose config.json is read
    speculative_config: Annotated[JsonDict, tyro.conf.arg(aliases=("-sc",))] = None
    gpu_memory_utilization: float = 0.92
    # print the ten parts of each step that would take the most time; not with --tp auto, which compiles no steps
    explain: bool = False
    json: Path | None = None  # everything that was measured goes to this file


def main(plan: Plan) -> int:
    """Print an estimate for each target. Returns 0 if the model fits one of them, else 1. Raises ValueError."""
    targets = [parse_target(text) for text in dict.fromkeys((plan.target, *plan.compare))]
    if plan.tp == "auto":
        if plan.explain:
            raise ValueError(
                "--explain needs compiled steps, and --tp auto compiles none; name a --tp"
            )
        return _divide(plan, targets)
    for target in targets:
        _check(target, plan.tp)
    found = [_measure(plan, target, [plan.tp])[0] for target in targets]
    estimates = [estimate(measured) for measured in found]
    _keep(plan, found, estimates)
    if len(targets) == 1:
        print(show(found[0], estimates[0]))
    else:
        print(show_table(found, estimates))
    for target, measured, estimated in zip(targets, found, estimates, strict=True):
        is_gpu = target.chip.platform == "gpu"
        lines = show_times(step_times(measured, estimated), explain=plan.explain, is_gpu=is_gpu)
        if lines and len(targets) > 1:
            print(f"\n{target.name}", end="")
        print("\n".join(lines))
    return 0 if any(each.fits for each in estimates) else 1


def _divide(plan: Plan, targets: list[Target]) -> int:
    """`--tp auto`: a table for each target, without compiling. Returns 0 if the model fits one, else 1."""
    for target in targets:
        _check(target, 1)
    tables = [
        [Division(each) for each in _measure(plan, target, sizes_of(target.num_devices))]
        for target in targets
    ]
    divisions = [each for table in tables for each in table]
    _keep(plan, [each.measured for each in divisions], [each.estimate for each in divisions])
    print("\n\n".join(show_divisions(table) for table in tables))
    return 0 if any(best(table) for table in tables) else 1


def _keep(plan: Plan, found: list[dict[str, Any]], estimates: list[Estimate]) -> None:
    if plan.json is not None:
        whole = [m | {"estimate": _plain(e)} for m, e in zip(found, estimates, strict=True)]
        plan.json.write_text(json.dumps(whole, indent=1) + "\n")


def _check(target: Target, num_devices: int) -> None:
    if not 1 <= num_devices <= target.num_devices:
        raise ValueError(
            f"{target.name} has {target.num_devices} devices; --tp {num_devices} is not possible there"
        )
    missing = missing_compiler(target.chip.platform)
    if missing:
        raise ValueError(f"{target.name}: {missing}")


def _measure(plan: Plan, target: Target, sizes: list[int]) -> list[dict[str, Any]]:
    """With each of these numbers of devices."""
    names = {f.name for f in dataclasses.fields(EngineConfig)}
    options = {k: v for k, v in vars(plan).items() if k in names and v is not None}
    request = {
        "target": target.name,
        "num_devices": sizes,
        "options": options,
        "compiles": plan.tp != "auto",
    }
    is_dumped = plan.tp != "auto" and target.chip.platform == "tpu"
    with (
        _progress(target.name) as on_report,
        tempfile.TemporaryDirectory(prefix="jaxpage-") as folder,
    ):
        request["dumped"] = folder if is_dumped else None
        variables = dump_variables(Path(folder), flags=libtpu_flags()) if is_dumped else {}
        return run("jaxpage.aot.worker", request, target, on_report=on_report, variables=variables)


@contextmanager
def _progress(name: str) -> Iterator[Report]:
    """Shows on stderr which programs are being compiled and which are done, and on a terminal a running clock."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (SpinnerColumn(), "{task.description}", MofNCompleteColumn(), TimeElapsedColumn())
    clock = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def show_report(report: dict[str, Any]) -> None:
        if "compiling" in report:
            programs = report["compiling"]
            console.print(f"{name}: compiling {', '.join(programs)}")
            clock.update(task, description=f"{name}: compiling", total=len(programs))
        else:
            console.print(f"{name}: {report['compiled']} compiled in {report['seconds']:.0f} s")
            clock.advance(task)

    with clock:
        task = clock.add_task(f"{name}: reading config.json", total=None)
        yield show_report


def show(measured: dict[str, Any], estimated: Estimate) -> str:
    """The estimate for one target, as text."""
    chip, config = measured["chip"], measured["config"]
    steps = estimated.decode
    devices = f"{measured['num_devices']} device{'s' * (measured['num_devices'] > 1)}"
    lines = [
        f"{measured['target']} ({chip['device_kind']}), {devices}, {chip['num_bytes'] / GIB:.1f} GiB each; "
        + ", ".join(f"{name}={value}" for name, value in config.items() if value is not None),
        *_experts(measured),
        *_recurrence(measured),
        *_encoder(measured),
        *_drafts(measured),
        "",
        f"{'on each device':<28}{'GiB':>8}",
        *(
            f"{name:<28}{num_bytes / GIB:>8.2f}"
            for name, num_bytes in (
                ("weights", estimated.weight_bytes),
                ("request state", estimated.state_bytes),
                ("temporaries of a step", estimated.temp_bytes),
                ("left for KV", estimated.pool_bytes),
            )
        ),
        f"{'KV blocks':<28}{estimated.num_blocks:>8} of {estimated.block_bytes} bytes",
        "",
        "sequences at once, by memory: "
        + ", ".join(f"{count} of {n} tokens" for n, count in estimated.batches.items()),
        "fastest decode step (bytes over bandwidth, flops over peak, exchange over links): "
        + ", ".join(f"{step.total:.2f} ms at {b} x {n}" for (b, n), step in steps.items()),
        *_exchange(measured, estimated),
        *_gain(measured, estimated),
        "",
        f"{'program':<18}{'compiled in':>12}{'temporaries':>14}  collectives",
    ]
    for program in measured["programs"]:
        collectives = ", ".join(
            f"{count} {kind} of {num_bytes / 2**20:.2f} MiB"
            for kind, count, num_bytes in program["exchanges"]
        )
        lines.append(
            f"{program['name']:<18}{program['seconds']:>10.1f} s{program['temp_bytes'] / 2**20:>10.1f} MiB"
            f"  {collectives or 'none'}"
        )
    lines += ["", f"attention: {measured['attention']}", _sentence(config, estimated)]
    return "\n".join(lines)


def _experts(measured: dict[str, Any]) -> list[str]:
    experts = measured["experts"]
    if experts is None:
        return []
    total, active = (experts[name] / 1e9 for name in ("num_parameters", "num_active"))
    return [
        f"{total:.1f} G parameters, of which a token uses {active:.1f} G: {experts['experts_per_token']} of "
        f"{experts['num_experts']} experts a layer"
    ]


def _recurrence(measured: dict[str, Any]) -> list[str]:
    recurrence = measured["recurrence"]
    if recurrence is None:
        return []
    size, num_rows = recurrence["sequence_bytes"], measured["config"]["max_num_seqs"]
    num_cached = recurrence["num_cached"]
    return [
        f"{size / 1e6:.1f} MB of recurrent state a sequence, {size * num_rows / GIB:.2f} GiB of the request state for "
        f"{num_rows} and {size * num_cached / GIB:.2f} for {num_cached} in the prefix cache; a decode step reads and "
        "writes those of its rows"
    ]


def _encoder(measured: dict[str, Any]) -> list[str]:
    encoder = measured["encoder"]
    if encoder is None:
        return []
    return [
        f"{encoder['weight_bytes'] / GIB:.2f} GiB of the weights, {encoder['num_parameters'] / 1e9:.2f} G parameters, "
        f"encode pictures; the largest picture has {encoder['largest']} patches"
    ]


def _drafts(measured: dict[str, Any]) -> list[str]:
    drafts = measured["drafts"]
    if drafts is None:
        return []
    begin, model = f"drafts: at most {drafts['num_tokens']} of a row, by", drafts["model"]
    if model is None:
        return [f"{begin} prompt lookup"]
    share = model["block_bytes"] / measured["block_bytes"]
    attention = model["attention"]  # None: a kernel, or there is none for the platform
    return [
        f"{begin} {model['kind']} of {model['num_parameters'] / 1e9:.2f} G parameters: "
        f"{model['weight_bytes'] / GIB:.2f} GiB of the weights, {share:.0%} of a KV block"
        + (f"; its attention: {attention}" if attention else "")
    ]


def _gain(measured: dict[str, Any], estimated: Estimate) -> list[str]:
    """What drafts cost: how many tokens a row must get of a step before they pay."""
    drafts = measured["drafts"]
    if drafts is None:
        return []
    steps = {(b, n): f"{b} x {n}" for b, n in estimated.decode}
    without = {case: decode_step(measured | {"drafts": None}, *case).total for case in steps}
    parts = [
        f"{estimated.decode[case].total / without[case]:.2f} at {text} ({without[case]:.2f} ms without drafts)"
        for case, text in steps.items()
    ]
    lines = [
        f"such a step gives a row 1 to {1 + drafts['num_tokens']} tokens; drafts pay if these are more than "
        + ", ".join(parts)
    ]
    if drafts["model"] is not None:
        of_drafts = ", ".join(
            f"{step.drafts:.2f} ms at {steps[case]}" for case, step in estimated.decode.items()
        )
        lines.insert(0, f"of which the draft model takes {of_drafts}")
    return lines


def _exchange(measured: dict[str, Any], estimated: Estimate) -> list[str]:
    if measured["num_devices"] == 1:
        return []
    links = measured["links"]
    parts = ", ".join(f"{s.exchange:.2f} ms at {b} x {n}" for (b, n), s in estimated.decode.items())
    return [
        f"of which exchange takes {parts}: each device sends at {links['bytes_per_second'] / 1e9:.0f} GB/s, in "
        f"{links['steps']} steps of {1e6 * links['seconds_per_step']:.1f} us latency"
    ]


def show_table(found: list[dict[str, Any]], estimates: list[Estimate]) -> str:
    """A table with a line for each target."""
    lines = [
        f"{'target':<14}{'fits':>6}{'weights':>10}{'KV GiB':>8}{'longest':>9}{'decode ms':>11}  else"
    ]
    for measured, estimated in zip(found, estimates, strict=True):
        fastest = next(iter(estimated.decode.values())).total
        lines.append(
            f"{measured['target']:<14}{'yes' if estimated.fits else 'no':>6}{estimated.weight_bytes / GIB:>10.2f}"
            f"{estimated.pool_bytes / GIB:>8.2f}{estimated.num_tokens:>9}{fastest:>11.2f}"
            f"  {' or '.join(estimated.changes)}"
        )
    return "\n".join(lines)


def _sentence(config: dict[str, Any], estimated: Estimate) -> str:
    wanted = config["max_model_len"]
    if estimated.fits:
        return f"It fits: {estimated.batches[wanted]} sequences of max_model_len={wanted} at once."
    return (
        f"It does not fit: no sequence of max_model_len={wanted}. It would with "
        f"{' or '.join(estimated.changes)}."
    )


def _plain(estimated: Estimate) -> dict[str, Any]:
    values = dataclasses.asdict(estimated)
    del values["decode"]
    values["decode_ms"] = [[*case, step.total] for case, step in estimated.decode.items()]
    values["exchange_ms"] = [[*case, step.exchange] for case, step in estimated.decode.items()]
    return values
