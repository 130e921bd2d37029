"""The command line, `jaxpage COMMAND`; USAGE has them all.

Knows flags, exit codes and what is printed. What a command needs is imported when it runs, so that
`--help` is quick. Must not know how anything is done.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxpage.config import EngineConfig

USAGE = """usage: jaxpage COMMAND [--help]

  demo             see what it does, with a tiny model that is packaged
  chat             talk to a model
  generate         continue prompts with a model
  plan             say whether a model fits chips that are not here, and how fast it can be
  compile          prepare the programs of a model, for this machine or for chips that are not here
  doctor           say what is installed, which devices are there, and what they can run
  bench accuracy   measure what quantised KV pools cost in accuracy
  bench offline    compare offline throughput with other engines
  bench memory     measure waste of KV memory, and what the prefix cache costs
  bench scheduler  time the host's part of a step
  bench step       show where the time of a decode step goes
  bench suite      check and measure everything that has a bar, on an H200
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

    model: str = ""  # a checkpoint folder; none: the tiny one of the demo
    hf_overrides: JsonDict = None  # merged into config.json
    override_generation_config: JsonDict = None  # merged into generation_config.json
    options_without_effect: tyro.conf.Suppress[tuple[str, ...]] = ()


@dataclass(frozen=True, kw_only=True)
class ChatEngineFlags(EngineFlags):
    """The same with defaults for one answer at a time: tokens shown as they come, few programs."""

    max_num_seqs: int | None = 1
    max_num_batched_tokens: int | None = 512
    decode_steps: int = 1


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


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Talk to a model. /reset begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer."""

    system: str | None = None  # what the model is told before the first question
    engine: ChatEngineFlags = field(default_factory=ChatEngineFlags)
    sampling: SamplingFlags = field(default_factory=SamplingFlags)


def demo() -> None:
    """See what the engine does, with a tiny model that is packaged: no network, no options."""
    from jaxpage.demo.show import show

    logging.getLogger("jaxpage").setLevel(logging.WARNING)  # it shows what the log would say
    show()


def chat(flags: Chat) -> None:
    """Talk to a model. /reset begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer."""
    from rich.console import Console

    from jaxpage.chat import converse
    from jaxpage.llm import LLM

    options = _engine_options(flags.engine)
    logging.getLogger("jaxpage").setLevel(logging.WARNING)  # no log amid the answers
    if sys.stderr.isatty():
        print(f"loading {options['model']}", file=sys.stderr)
    llm = LLM(**options)
    # As long as the model likes, whatever the default for continuing texts.
    params = dataclasses.replace(
        llm.get_default_sampling_params(), **({"max_tokens": None} | _options(flags.sampling))
    )
    converse(llm, Console(), params, system=flags.system)


def generate(flags: Generate) -> None:
    """Continue prompts and print them with their continuations. Raises ValueError."""
    if not flags.prompt:
        raise ValueError("nothing to continue; give --prompt TEXT")
    from jaxpage.llm import LLM

    llm = LLM(**_engine_options(flags.engine))
    params = dataclasses.replace(llm.get_default_sampling_params(), **_options(flags.sampling))
    outputs = llm.generate(list(flags.prompt), params, use_tqdm=sys.stderr.isatty())
    for output in outputs:
        for completion in output.outputs:
            print(f"{output.prompt}{completion.text}")


@dataclass(frozen=True, kw_only=True)
class Compile:
    """Compile all programs of a model, from which `LLM` starts with these options and compilation_cache_dir=OUTPUT."""

    output: Path  # a folder, made if it is not there
    target: str | None = None  # such as v6e:2x2 or h200, see `jaxpage plan`; none: this machine
    engine: EngineFlags = field(default_factory=EngineFlags)


def compile_programs(flags: Compile) -> None:
    """Compile all programs of a model. Raises ValueError."""
    from jaxpage.aot.compile import compile_for
    from jaxpage.aot.targets import parse_target

    target = None if flags.target is None else parse_target(flags.target)
    compile_for(_engine_options(flags.engine), flags.output, target)


def _engine_options(flags: EngineFlags) -> dict[str, Any]:
    """What `LLM` is to be told: what differs from its own defaults, and some model."""
    options = _options(flags, EngineFlags)
    if "model" not in options:
        from jaxpage.demo import checkpoint

        options["model"] = str(checkpoint())
        print("no --model: using the tiny one of the demo", file=sys.stderr)
    return options


def _options(flags: Any, defaults: type | None = None) -> dict[str, Any]:
    """What differs from the defaults, those of another class of flags if one is named."""
    return {
        f.name: list(value) if isinstance(value, tuple) else value
        for f in dataclasses.fields(defaults or flags)
        if (value := getattr(flags, f.name)) != f.default
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code: 0, 2 for the user's errors, 130 for Ctrl-C."""
    args = list(sys.argv[1:] if argv is None else argv)
    match args:
        case ["demo" | "chat" | "generate" as name, *rest]:
            command: Callable[..., None] = {"demo": demo, "chat": chat, "generate": generate}[name]
        case ["compile", *rest]:
            command = compile_programs
        case ["doctor", *rest]:
            command = importlib.import_module("jaxpage.doctor").main
        case ["plan", *rest]:
            command = importlib.import_module("jaxpage.aot.plan").main
        case [
            "bench",
            "accuracy" | "memory" | "offline" | "scheduler" | "step" | "suite" as name,
            *rest,
        ]:
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
        code = tyro.cli(
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
    return code or 0
