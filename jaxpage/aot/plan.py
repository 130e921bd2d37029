"""`jaxpage plan`: does a model fit chips that are not here, how many tokens does it hold, how fast can it be.

Knows flags and what is printed. Each target is compiled for in a process of its own (`worker`).
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxpage.aot.targets import GIB, Target, parse_target
from jaxpage.aot.topology import environment, missing_compiler
from jaxpage.aot.verdict import Verdict, judge
from jaxpage.config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Compile a model's largest steps for chips that are not here; say whether it fits, and how fast it can be."""

    model: Annotated[
        str, tyro.conf.Positional
    ]  # a folder with config.json, or that file; no weights are read
    target: str = "v6e:2x2"  # chip and topology: v5e:2x2, v5p:2x2x1, v6e:2x2, tpu7x:2x2x1, h200
    tp: int = 1  # devices that share the weights and the heads
    compare: tuple[str, ...] = ()  # further targets, for a table
    dtype: str = "auto"
    max_model_len: str | None = None  # None: what config.json says
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    gpu_memory_utilization: float = 0.92
    json: Path | None = None  # everything that was measured goes to this file


def main(plan: Plan) -> int:
    """Print the verdict. Returns 0 if the model fits (one of the targets), else 1. Raises ValueError."""
    targets = [parse_target(text) for text in dict.fromkeys((plan.target, *plan.compare))]
    for target in targets:
        _check(target, plan.tp)
    found = [_measure(plan, target) for target in targets]
    verdicts = [judge(measured) for measured in found]
    if plan.json is not None:
        whole = [m | {"verdict": _plain(v)} for m, v in zip(found, verdicts, strict=True)]
        plan.json.write_text(json.dumps(whole, indent=1) + "\n")
    if len(targets) == 1:
        print(show(found[0], verdicts[0]))
    else:
        print(show_table(found, verdicts))
    return 0 if any(verdict.fits for verdict in verdicts) else 1


def _check(target: Target, num_devices: int) -> None:
    if not 1 <= num_devices <= target.num_devices:
        raise ValueError(
            f"{target.name} has {target.num_devices} devices; --tp {num_devices} is not possible there"
        )
    missing = missing_compiler(target.chip.platform)
    if missing:
        raise ValueError(f"{target.name}: {missing}")


def _measure(plan: Plan, target: Target) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(EngineConfig)}
    options = {k: v for k, v in vars(plan).items() if k in names and v is not None}
    request = {"target": target.name, "num_devices": plan.tp, "options": options}
    print(
        f"{target.name}: compiling the largest steps; this takes a minute or more", file=sys.stderr
    )
    done = subprocess.run(
        ["env", *environment(target), sys.executable, "-m", "jaxpage.aot.worker"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise ValueError(f"compiling for {target.name} failed: {done.stderr.strip()[-2000:]}")
    measured = json.loads(lines[-1])
    if "error" in measured:
        raise ValueError(measured["error"])
    return measured


def show(measured: dict[str, Any], verdict: Verdict) -> str:
    """The verdict on one target."""
    chip, config = measured["chip"], measured["config"]
    devices = f"{measured['num_devices']} device{'s' * (measured['num_devices'] > 1)}"
    lines = [
        f"{measured['target']} ({chip['device_kind']}), {devices}, {chip['num_bytes'] / GIB:.1f} GiB each; "
        + ", ".join(f"{name}={value}" for name, value in config.items() if value is not None),
        "",
        f"{'on each device':<28}{'GiB':>8}",
        *(
            f"{name:<28}{num_bytes / GIB:>8.2f}"
            for name, num_bytes in (
                ("weights", verdict.weight_bytes),
                ("request state", verdict.state_bytes),
                ("temporaries of a step", verdict.temp_bytes),
                ("left for KV", verdict.pool_bytes),
            )
        ),
        f"{'KV blocks':<28}{verdict.num_blocks:>8} of {verdict.block_bytes} bytes",
        "",
        "sequences at once, by memory: "
        + ", ".join(f"{count} of {n} tokens" for n, count in verdict.batches.items()),
        "fastest decode step (bytes over bandwidth, flops over peak): "
        + ", ".join(f"{ms:.2f} ms at {b} x {n}" for (b, n), ms in verdict.decode_ms.items()),
        "",
        f"{'program':<18}{'compiled in':>12}{'temporaries':>14}  collectives",
    ]
    for program in measured["programs"]:
        collectives = ", ".join(
            f"{found['count']} {name}" for name, found in program["collectives"].items()
        )
        lines.append(
            f"{program['name']:<18}{program['seconds']:>10.1f} s{program['temp_bytes'] / 2**20:>10.1f} MiB"
            f"  {collectives or 'none'}"
        )
    lines += ["", f"attention: {measured['attention']}", _sentence(config, verdict)]
    return "\n".join(lines)


def show_table(found: list[dict[str, Any]], verdicts: list[Verdict]) -> str:
    """A line for each target."""
    lines = [
        f"{'target':<14}{'fits':>6}{'weights':>10}{'KV GiB':>8}{'longest':>9}{'decode ms':>11}  else"
    ]
    for measured, verdict in zip(found, verdicts, strict=True):
        fastest = next(iter(verdict.decode_ms.values()))
        lines.append(
            f"{measured['target']:<14}{'yes' if verdict.fits else 'no':>6}{verdict.weight_bytes / GIB:>10.2f}"
            f"{verdict.pool_bytes / GIB:>8.2f}{verdict.num_tokens:>9}{fastest:>11.2f}"
            f"  {' or '.join(verdict.changes)}"
        )
    return "\n".join(lines)


def _sentence(config: dict[str, Any], verdict: Verdict) -> str:
    wanted = config["max_model_len"]
    if verdict.fits:
        return f"It fits: {verdict.batches[wanted]} sequences of max_model_len={wanted} at once."
    return (
        f"It does not fit: no sequence of max_model_len={wanted}. It would with "
        f"{' or '.join(verdict.changes)}."
    )


def _plain(verdict: Verdict) -> dict[str, Any]:
    values = dataclasses.asdict(verdict)
    values["decode_ms"] = [[*case, ms] for case, ms in verdict.decode_ms.items()]
    return values
