"""`jaxpage demo`: the engine's configuration, its programs, three scenarios, and what to type next."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jaxpage.demo import checkpoint

if TYPE_CHECKING:
    from jaxpage.build import Built
    from jaxpage.demo.scenarios import Answer
    from jaxpage.engine.stats import EngineStats
    from jaxpage.llm import LLM
    from jaxpage.runner.programs import ProgramRecord

# Ten programs instead of 24, for a fast start; questions wait for a row.
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": "6M",
}
GREETING = "Who are you?"
NEXT = """\
jaxpage chat                                   talk to this model
jaxpage chat --model FOLDER                    or to any checkpoint in a folder
jaxpage generate --model FOLDER --prompt TEXT  continue a text
notebooks/1_quickstart.ipynb                   the same from Python, step by step

Or in Python:

from jaxpage import LLM
llm = LLM("FOLDER")
print(llm.generate("Once upon a time")[0].outputs[0].text)"""


@dataclass(frozen=True)
class Shown:
    """The results of the scenarios."""

    table: list[Answer]
    batch: list[Answer]
    batch_stats: list[EngineStats]
    stories: list[str]
    story_stats: EngineStats


def show(console: Console | None = None, options: Mapping[str, Any] | None = None) -> Shown:
    """Run the demo. `options`: as for `LLM`, in addition to `OPTIONS`."""
    start = time.perf_counter()
    console = console or Console(highlight=False)
    options = {"model": str(checkpoint())} | OPTIONS | dict(options or {})
    console.rule("jaxpage demo")
    console.print(
        f"A language model of {num_parameters(options['model']) / 1e6:.1f} million parameters, on "
        "this machine, without a network.",
    )
    with console.status("loading it, and compiling the programs that a first answer needs"):
        # Imported late: these imports alone take seconds.
        from jaxpage.build import build
        from jaxpage.config import EngineConfig
        from jaxpage.demo import scenarios
        from jaxpage.llm import LLM

        built = build(EngineConfig.from_options(**options), use_tqdm=False)
    llm, rng = LLM.from_built(built), random.Random(0)
    _chapter(console, "What runs")
    console.print(configuration(built))
    _chapter(console, "What was compiled")
    _greet_and_wait(console, llm, start)
    scenarios.rehearse(llm)
    _chapter(console, "1. Questions about one table, one after the other")
    table = scenarios.ask_one_by_one(llm, console, rng, num_rows=24, num_questions=6)
    _chapter(console, "2. 32 questions in one continuous batch")
    batch = scenarios.ask_at_once(llm, console, rng, num_questions=32)
    _chapter(console, "3. Eight stories from one prompt")
    stories = scenarios.tell_stories(llm, console, rng, num_stories=8)
    _chapter(console, "What to type next")
    console.print(NEXT)
    return Shown(table, *batch, *stories)


def _greet_and_wait(console: Console, llm: LLM, start: float) -> None:
    """A first answer with the few programs there are, then the manifest until it is complete."""
    from jaxpage.demo.scenarios import GREEDY, end_live

    programs = llm.programs()
    num_ready = sum(program.origin is not None for program in programs)
    console.print(
        f"{num_ready} of {len(programs)} programs are ready; the others are compiled behind a "
        f"first answer:\n\n[bold]> {GREETING}[/]",
    )
    (output,) = llm.chat([{"role": "user", "content": GREETING}], GREEDY, use_tqdm=False)
    seconds = time.perf_counter() - start
    console.print(Text(output.outputs[0].text))
    console.print(f"answered {seconds:.1f} s after the start", style="dim")
    console.print("\nWaiting for them, so that the figures below are of the engine alone:\n")
    with Live(
        get_renderable=lambda: manifest(llm.programs()), console=console, refresh_per_second=4
    ):
        llm.wait_until_warm()
    end_live(console)


def num_parameters(model: str) -> int:
    """The number of parameters in a checkpoint folder. Raises ValueError for other folders."""
    from jaxpage.weights.safetensors import open_checkpoint

    return sum(math.prod(tensor.shape) for tensor in open_checkpoint(model).values())


def configuration(built: Built) -> Table:
    """The resolved options on this machine, in a few lines."""
    import jax

    engine: Any = built.engine  # one: the demo has no replicas
    config, runner = built.config, engine.runner
    spec = runner.pool_spec
    decode = [bucket.num_rows for bucket in runner.buckets if bucket.decode]
    mixed = [bucket.num_tokens for bucket in runner.buckets if not bucket.decode]
    pool = f"{spec.num_blocks} blocks of {spec.block_size} tokens, {spec.num_bytes / 2**20:.1f} MiB"
    rows = {
        "model": config.model,
        "parameters": f"{num_parameters(config.model):,} in {config.dtype}",
        "device": f"{jax.local_devices()[0].device_kind}, jax {jax.__version__}",
        "KV pool": f"{pool}, in {config.dtype}",
        "longest sequence": f"{config.max_model_len} tokens",
        "in one step": f"{config.max_num_seqs} sequences, {config.max_num_batched_tokens} tokens; "
        f"or {config.decode_steps} decode steps in one launch",
        "buckets": f"decode steps of {decode[0]} to {decode[-1]} rows, "
        f"others of {mixed[0]} to {mixed[-1]} tokens",
        "prefix cache": "on" if config.enable_prefix_caching else "off",
        "executables cached in": config.compilation_cache_dir or "memory only",
    }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(name, Text(value, style="cyan", overflow="fold"))
    return table


def manifest(programs: Sequence[ProgramRecord]) -> Table:
    """All programs: whether they are ready, their compile time and where they came from."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("program")
    for name in ("seconds", "temporaries"):
        table.add_column(name, justify="right")
    table.add_column("")
    for program in programs:
        if program.origin is None:
            table.add_row(program.name, "", "", "compiling or waiting", style="dim")
        else:
            megabytes = f"{program.temp_bytes / 1e6:.1f} MB"
            table.add_row(program.name, f"{program.seconds:.2f}", megabytes, program.origin)
    origins = [program.origin for program in programs if program.origin is not None]
    ready = f"{len(origins)} of {len(programs)} ready"
    table.add_row(ready, "", "", f"{origins.count('stored')} were cached on disk")
    return table


def _chapter(console: Console, title: str) -> None:
    console.print()
    console.rule(f"[bold]{title}[/]", align="left")
