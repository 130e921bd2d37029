"""The table in jaxpage/aot/README.md, from what the tests saw: `python -m tests.aot.table` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxpage.aot.targets import CHIPS, parse_target
from tests.aot import evidence, meshes, steps
from tests.aot.suites import calls

README = Path(__file__).parents[2] / "jaxpage/aot/README.md"
BEGIN, END = "<!-- what compiles where: begin -->\n", "<!-- what compiles where: end -->\n"
# In the table's order; a sampler is no kernel of ours.
KERNELS = {
    "paged_attention_tpu": "paged_attention",
    "paged_attention_gpu": "paged_attention",
    "kv_write": "kv_write",
    "block_copy": "block_copy",
    "quant_matmul": "quant_matmul",
    "matmul": "matmul",
    "grouped_matmul": "grouped_matmul",
    "lora": "lora",
    "rope": "rope",
    "embedding": "embedding",
}


def kept() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """What was found of each program, by suite and target, as the evidence has it."""
    return {
        call: [{"name": n} | r.found for n, r in evidence.read(*call).records.items()]
        for call in calls()
    }


def see(found: dict[tuple[str, str], list[dict[str, Any]]]) -> dict[str, Any]:
    """What of all programs is the same on any machine: which compile, and how many there are."""
    kernels: dict[str, dict[str, int]] = {}
    for suite, kernel in KERNELS.items():
        for (name, target), programs in found.items():
            if name == suite:
                ours = [each for each in programs if not each["name"].endswith("ragged_dot")]
                number = sum("error" not in each for each in ours)
                kernels.setdefault(kernel, {})[parse_target(target).chip.name] = number
    places = []
    for place in steps.PLACES:
        programs = found["steps", place.name]
        count = {
            model: [
                sum(
                    each["model"] == model and (each["num_layers"] == steps.FEW) is few
                    for each in programs
                )
                for few in (True, False)
            ]  # with few layers, whole
            for model in steps.MODELS
        }
        has_kernel = any(each["attention_calls"] for each in programs)
        attention = "kernel" if has_kernel else "plain XLA"
        manifest = programs[0]["num_programs"]
        places.append(
            {
                "place": place.name,
                "attention": attention,
                "programs": count,
                "manifest": manifest,
            }
        )
    on_meshes: dict[meshes.Case, list[str]] = {}
    for target in meshes.TARGETS:
        for each in found["meshes", target]:
            case = meshes.case_of(target, each["name"])
            on_meshes.setdefault(case, []).append(each["name"].removeprefix(f"{case.name} "))
    cases = [(case, on_meshes[case]) for case in meshes.CASES]
    return {"kernels": kernels, "places": places, "cases": cases}


def render(seen: dict[str, Any]) -> str:
    """The lines between BEGIN and END."""
    chips = list(CHIPS)
    lines = [f"| programs of a kernel | {' | '.join(chips)} |", f"| --- |{' ---: |' * len(chips)}"]
    for name, found in seen["kernels"].items():
        lines.append(f"| `{name}` | {' | '.join(str(found.get(chip, '')) for chip in chips)} |")
    models = list(steps.MODELS)
    lines += [
        "",
        f"| steps with {steps.FEW} layers | attention | {' | '.join(models)} | all programs |",
        f"| --- | --- |{' ---: |' * (len(models) + 1)}",
    ]
    for place in seen["places"]:
        counts = [place["programs"][model] for model in models]
        cells = [f"{few} + {whole} whole" if whole else str(few) for few, whole in counts]
        total = f"{sum(map(sum, counts))} of {place['manifest']}"
        cells = [place["place"], place["attention"], *cells, total]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"| steps with {meshes.FEW} layers | model | programs |", "| --- | --- | --- |"]
    for case, programs in seen["cases"]:
        int8 = ", weights and KV in int8" if case.is_int8 else ""
        where = f"{case.target} TP {case.num_devices}"
        lines.append(f"| {where} | {case.model}{int8} | {', '.join(sorted(programs))} |")
    return "\n".join(lines) + "\n"


def in_readme() -> str:
    """What stands between BEGIN and END. Raises ValueError if they do not stand there once."""
    return _parts()[1]


def _parts() -> tuple[str, str, str]:
    """What stands before, within and after."""
    text = README.read_text(encoding="utf-8")
    if (text.count(BEGIN), text.count(END)) != (1, 1):
        raise ValueError(f"{README} must have these lines once: {BEGIN}{END}")
    before, rest = text.split(BEGIN)
    table, after = rest.split(END)
    return before, table, after


def main() -> None:
    before, _, after = _parts()
    text = before + BEGIN + render(see(kept())) + END + after
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
