"""The command line: `jaxpage generate` and `jaxpage bench`.

Knows flags, exit codes and what is printed. What a command needs is imported when it runs, so that
`--help` is quick. Must not know how anything is done.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxpage.config import EngineConfig

USAGE = """usage: jaxpage COMMAND [--help]

  generate         continue prompts with a model
  bench offline    compare offline throughput with other engines
  bench scheduler  time the host's part of a step
"""

JsonDict = Annotated[
    dict[str, Any] | None,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda args: json.loads(args[0]),
        is_instance=lambda value: value is None or isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    ),
]


@dataclass(frozen=True, kw_only=True)
class EngineFlags(EngineConfig):
    """Options of the engine, the same as those of `LLM`."""

    model: str = ""  # a checkpoint folder; none: a tiny one with random weights is made
    hf_overrides: JsonDict = None  # merged into config.json
    override_generation_config: JsonDict = None  # merged into generation_config.json


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Options of `SamplingParams`; what is not given comes from the model's generation config."""

    n: int | None = None  # continuations per prompt
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None  # 0: greedy
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue prompts and print them with their continuations."""

    prompt: tyro.conf.UseAppendAction[tuple[str, ...]]  # may be given several times
    engine: EngineFlags = field(default_factory=EngineFlags)
    sampling: SamplingFlags = field(default_factory=SamplingFlags)


def generate(flags: Generate) -> None:
    """Continue prompts and print them with their continuations. Raises ValueError."""
    if not flags.prompt:
        raise ValueError("nothing to continue; give --prompt TEXT")
    with tempfile.TemporaryDirectory(prefix="jaxpage-") as folder:
        options = _options(flags.engine)
        if not flags.engine.model:
            from jaxpage import tiny

            options["model"] = str(tiny.build(Path(folder) / "tiny"))
            print("no --model: a tiny one with random weights talks nonsense", file=sys.stderr)

        from jaxpage.llm import LLM

        llm = LLM(**options)
        params = dataclasses.replace(llm.get_default_sampling_params(), **_options(flags.sampling))
        outputs = llm.generate(list(flags.prompt), params, use_tqdm=sys.stderr.isatty())
    for output in outputs:
        for completion in output.outputs:
            print(f"{output.prompt}{completion.text}")


def _options(flags: Any) -> dict[str, Any]:
    """What was given."""
    return {
        f.name: list(value) if isinstance(value, tuple) else value
        for f in dataclasses.fields(flags)
        if (value := getattr(flags, f.name)) != f.default
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code: 0, 2 for the user's errors, 130 for Ctrl-C."""
    args = list(sys.argv[1:] if argv is None else argv)
    match args:
        case ["generate", *rest]:
            command: Callable[..., None] = generate
        case ["bench", "offline" | "scheduler" as name, *rest]:
            command = importlib.import_module(f"jaxpage.bench.{name}").main
        case ["-h" | "--help"]:
            print(USAGE, end="")
            return 0
        case _:
            print(USAGE, end="", file=sys.stderr)
            return 2
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("jaxpage").setLevel(logging.INFO)
    try:
        tyro.cli(
            command,
            prog=f"jaxpage {' '.join(args[: len(args) - len(rest)])}",
            args=rest,
            config=(tyro.conf.OmitArgPrefixes,),
        )
    except (ValueError, TypeError) as e:
        print(f"jaxpage: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
