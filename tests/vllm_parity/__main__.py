"""The script; see the package."""

from __future__ import annotations

import collections
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxpage.bench.subprocess_rpc import RemoteObject
from tests.vllm_parity import compare, known, requests
from tests.vllm_parity.compare import Difference
from tests.vllm_parity.engines import Answer, Jaxpage, Request, Vllm
from tests.vllm_parity.models import MODELS

TARGET = "tests.vllm_parity.engines:{}"
ROUNDING, UNEXPLAINED = "rounding", "unexplained"  # causes besides the known ones
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "n")


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Compare jaxpage with vLLM, request by request. Exits with 1 if a difference has no explanation."""

    vllm: str  # the Python of vLLM's environment
    count: int = 300  # requests, half of them to each of two models
    seed: int = 0
    json: Path | None = None  # all requests, and how they were answered differently


@dataclass
class Compared:
    """A request, what was different, and why. `examples`: by cause the request with the fewest fields that shows it,
    of every one without an explanation and of the first of each other cause.
    """

    model: str
    request: Request
    both_refused: bool
    differences: list[Difference]
    causes: list[str]  # in order of appearance, each once
    examples: dict[str, Request] = field(default_factory=dict)


class Engines:
    """jaxpage and vLLM with one model; vLLM is started anew after a crash."""

    def __init__(self, python: str, folder: str, options: dict[str, Any]):
        self.python, self.folder, self.options = python, folder, options
        self.jaxpage, self.vllm = self._start(Jaxpage, sys.executable), self._start(Vllm, python)

    def _start(self, kind: type, python: str) -> RemoteObject:
        target = TARGET.format(kind.__name__)
        started = RemoteObject(target, python=python, environment=kind.environment)
        print(started.ask("setup", self.folder, self.options), flush=True)
        return started

    def answers(self, request: Request) -> tuple[Answer, Answer]:
        ours, theirs = self.jaxpage.ask("answer", request), self.vllm.ask("answer", request)
        if "crashed" in theirs:
            self.vllm.kill()
            self.vllm = self._start(Vllm, self.python)
        return ours, theirs

    def compare(self, model: str, request: Request) -> Compared:
        ours, theirs = self.answers(request)
        found = compare.differences(ours, theirs)
        causes = [self._cause(known.Case(x, request, ours, theirs)) for x in found]
        both_refused = "refused" in ours and "refused" in theirs
        return Compared(model, request, both_refused, found, list(dict.fromkeys(causes)))

    def _cause(self, case: known.Case) -> str:
        found = known.cause(case)
        if found is not None:
            return found.name
        rounding = compare.is_rounding(case.difference, case.request, self._logits)
        return ROUNDING if rounding else UNEXPLAINED

    def _logits(self, request: Request, mode: str) -> Answer:
        return self.jaxpage.ask("logits", request, mode)

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self.jaxpage.kill()
        self.vllm.kill()


def compare_all(engines: Engines, model: str, seed: str, count: int) -> list[Compared]:
    """Of one model. What has no explanation is printed as it comes."""
    said = []
    for prompt in requests.FIRST_WORDS:
        greedy = {"temperature": 0.0, "max_tokens": 24, "skip_special_tokens": False}
        said.append((prompt, engines.jaxpage.ask("answer", {"prompt": prompt, "fields": greedy})))
    said += [(answer["prompt_token_ids"], answer) for _, answer in said[:4]]
    results, seen = [], set()
    for number, request in enumerate(requests.draw(seed, count, said)):
        result = engines.compare(model, request)
        for cause in result.causes:
            if cause == UNEXPLAINED or cause not in seen:
                seen.add(cause)
                result.examples[cause] = shrink(
                    request, lambda r, cause=cause: cause in engines.compare(model, r).causes
                )
        if UNEXPLAINED in result.examples:
            example = result.examples[UNEXPLAINED]
            print(f"{model} {number}: {example}", flush=True)
            for difference in engines.compare(model, example).differences:
                print(f"  {difference}"[:1000], flush=True)
        results.append(result)
    return results


def shrink(request: Request, fails: Callable[[Request], bool]) -> Request:
    """Without the fields that it fails without, too. What makes it deterministic stays, as simple as possible."""
    fields = dict(request["fields"])
    greedy = {k: v for k, v in fields.items() if k not in SAMPLING} | {"temperature": 0.0}
    if fails(request | {"fields": greedy}):
        fields = greedy
    for name in [name for name in fields if name not in ("temperature", "top_k")]:
        fewer = {k: v for k, v in fields.items() if k != name}
        if fails(request | {"fields": fewer}):
            fields = fewer
    return request | {"fields": fields}


def main(parity: Parity) -> int:
    results: list[Compared] = []
    for model, (write, reasoning_end) in MODELS.items():
        count = parity.count - len(results) if results else parity.count // len(MODELS)
        with tempfile.TemporaryDirectory() as parent:
            write(folder := Path(parent, "model"))
            reasoning = {"reasoning_start_str": requests.START, "reasoning_end_str": reasoning_end}
            options = {
                "reasoning_config": reasoning,
                "structured_outputs_config": {"enable_in_reasoning": True},
            }
            with Engines(parity.vllm, str(folder), options) as engines:
                results += compare_all(engines, model, f"{parity.seed} {model}", count)
    if parity.json is not None:
        parity.json.write_text(json.dumps([vars(r) for r in results], default=vars, indent=1))
    show(results)
    return int(any(UNEXPLAINED in result.causes for result in results))


def show(results: list[Compared]) -> None:
    """How many were answered alike, and a table of the causes of what was not."""

    def outcome(result: Compared) -> str:
        if UNEXPLAINED in result.causes:
            return UNEXPLAINED
        if not result.causes:
            return "refused by both" if result.both_refused else "equal"
        return ROUNDING if result.causes == [ROUNDING] else "explained"

    counts = collections.Counter(map(outcome, results))
    figures = ", ".join(f"{number} {name}" for name, number in counts.most_common())
    causes = collections.Counter(cause for result in results for cause in result.causes)
    why = {k.name: k.why for k in known.KNOWN} | {ROUNDING: compare.WHY}
    table = Table("requests", "cause", "why, and the fewest fields that show it", show_lines=True)
    for cause, number in causes.most_common():
        example = next(r.examples[cause] for r in results if cause in r.examples)
        shown = escape(f"{example['fields']}"[:200])
        table.add_row(str(number), cause, f"{why.get(cause, '')}\n{shown}")
    console = Console(width=120)
    console.print(table)
    console.print(f"{len(results)} requests: {figures}")


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Parity)))
