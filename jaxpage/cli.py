"""The command line, `jaxpage COMMAND`; USAGE has them all.

Knows flags, exit codes and what is printed. What a command needs is imported when it runs, so that
`--help` is quick. Must not know how anything is done.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import re
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_type_hints

import tyro

from jaxpage import __version__, exit_codes, vllm_flags
from jaxpage.config import EngineConfig
from jaxpage.flags import (
    ChatEngineFlags,
    EngineFlags,
    Model,
    SamplingFlags,
    ServerFlags,
    check_writable,
    given_options,
)
from jaxpage.sampling_params import SamplingParams
from jaxpage.terminal import is_terminal, read_line_shown

if TYPE_CHECKING:
    from jaxpage.outputs import Logprob

USAGE = """usage: jaxpage COMMAND [--help]
       jaxpage --version

  demo             see what it does, with a tiny model that is packaged; --pictures: with one that sees
  serve            answer OpenAI's API over HTTP
  chat             talk to a model
  generate         continue prompts with a model
  complete         continue prompts with a running server
  run-batch        answer the requests of an OpenAI batch file
  plan             say whether a model fits another chip, and how fast it can be there
  compile          compile a model's programs ahead of time, for this machine or another chip
  convert          write a checkpoint as Orbax, or one of Orbax as safetensors
  replay           run a recording of LLM(record_calls=FILE) again and compare
  doctor           say what is installed, which devices are there, and what they can run
  bench accuracy   measure what quantised KV pools cost in accuracy
  bench embed      time embeddings of short texts, beside sentence-transformers
  bench latency    time one batch of requests
  bench lora       time a batch with adapters, beside one without
  bench offline    compare offline throughput with other engines
  bench memory     measure waste of KV memory, and what the prefix cache costs
  bench sampling   time the sampler, and masks of grammars, by what requests ask for
  bench scheduler  time the host's part of a step
  bench serve      load an OpenAI-compatible server, and report throughput and latencies
  bench startup    time cold and cached starts
  bench step       show where the time of a decode step goes
  bench suite      check and measure everything that has a bar, on an H200
  bench tunix      time rollouts of groups, beside Tunix's own sampler
"""
BENCHES = tuple(line.split()[1] for line in USAGE.splitlines() if line.startswith("  bench "))


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue prompts and print them with their continuations."""

    prompt: tyro.conf.UseAppendAction[tuple[str, ...]]  # a text; may be given several times
    model: Model = ""
    logprobs: int | None = None  # print each token with its logprob, and as many likely others
    sampling: SamplingFlags = field(default_factory=SamplingFlags)
    engine: EngineFlags = field(default_factory=EngineFlags)


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Talk to a model. /reset begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer."""

    model: Model = ""
    system: str | None = None  # what the model is told before the first question
    # of a running server, such as http://127.0.0.1:8000, instead of an engine
    url: str | None = None
    api_key: str | None = None  # that it asks for
    sampling: SamplingFlags = field(default_factory=SamplingFlags)
    engine: ChatEngineFlags = field(default_factory=ChatEngineFlags)


@dataclass(frozen=True, kw_only=True)
class Complete:
    """Continue prompts with a running server, and print them as they come."""

    prompt: tyro.conf.UseAppendAction[tuple[str, ...]]  # a text; may be given several times
    url: str = "http://127.0.0.1:8000"
    api_key: str | None = None  # that it asks for
    model: str | None = None  # none: the first one that it serves
    sampling: SamplingFlags = field(default_factory=SamplingFlags)


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Answer OpenAI's API over HTTP. SIGTERM lets running requests end, a second one does not."""

    model: tyro.conf.Positional[Model] = ""
    config: Path | None = None  # YAML with these flags by their names; the command line wins
    replicas: int = 1  # engines that share the requests; more than one needs --backend ray
    # who runs them: none, this process; ray, a Ray cluster that is there (extra `ray`)
    backend: Literal["ray"] | None = None
    server: ServerFlags = field(default_factory=ServerFlags)
    engine: EngineFlags = field(default_factory=EngineFlags)


@dataclass(frozen=True, kw_only=True)
class RunBatch:
    """Answer the requests of an OpenAI batch file. Started again, it continues what was cut off."""

    input_file: Annotated[Path, tyro.conf.arg(aliases=("-i",))]  # a request a line, as JSON
    # a result a line, as they come; those that are there are kept
    output_file: Annotated[Path, tyro.conf.arg(aliases=("-o",))]
    model: Model = ""
    max_concurrency: int = 256  # requests in flight at once
    served_model_name: tuple[str, ...] = ()  # names that requests may use; none: the model's own
    engine: EngineFlags = field(default_factory=EngineFlags)


def demo(pictures: bool = False) -> None:
    """See what the engine does, with a tiny model that is packaged: no network, no options.

    Args:
        pictures: with another one, which answers questions about pictures.
    """
    show = importlib.import_module(f"jaxpage.demo.{'pictures.' if pictures else ''}show").show
    logging.getLogger("jaxpage").setLevel(logging.WARNING)  # it shows what the log would say
    show()


def chat(flags: Chat) -> None:
    """Talk to a model. Raises ValueError."""
    from rich.console import Console

    given = _sampling_options(flags.sampling)
    if flags.url is not None:
        from jaxpage import client

        remote = client.Remote(
            url=flags.url.rstrip("/"),
            api_key=flags.api_key,
            model=flags.model or None,
            options=given,
        )
        client.converse(remote, Console(), read_line_shown, system=flags.system)
        return
    from jaxpage.chat import converse
    from jaxpage.llm import LLM

    options = _engine_options(flags.model, flags.engine)
    logging.getLogger("jaxpage").setLevel(logging.WARNING)  # no log amid the answers
    if is_terminal(sys.stderr):
        print(f"loading {options['model']}", file=sys.stderr)
    llm = LLM(**options)
    # As long as the model likes, whatever the default for continuing texts.
    params = dataclasses.replace(llm.get_default_sampling_params(), **{"max_tokens": None} | given)
    converse(llm, Console(), params, system=flags.system)


def complete(flags: Complete) -> None:
    """Continue prompts with a running server. Raises ValueError."""
    from jaxpage import client

    if not flags.prompt:
        raise ValueError("nothing to continue; give --prompt TEXT")
    remote = client.Remote(
        url=flags.url.rstrip("/"),
        api_key=flags.api_key,
        model=flags.model,
        options=_sampling_options(flags.sampling),
    )
    client.complete(remote, flags.prompt, lambda text: print(text, end="", flush=True))


def serve(flags: Serve) -> None:
    """Answer OpenAI's API over HTTP. Raises ValueError."""
    from jaxpage.async_llm import AsyncLLM
    from jaxpage.pooling.async_pooler import AsyncPooler
    from jaxpage.pooling.choose import pools
    from jaxpage.server import run
    from jaxpage.server.lora_modules import check_engine

    options = _engine_options(flags.model, flags.engine)
    if flags.engine.node_rank:
        AsyncLLM(**options)  # does not return: host 0 serves
    if flags.replicas < 1 or (flags.replicas > 1 and flags.backend is None):
        raise ValueError(
            f"--replicas {flags.replicas} needs --backend ray, and at least 1; "
            "replicas in one process are --data-parallel-size"
        )
    config = EngineConfig.from_options(**options)
    check_engine(flags.server.lora_modules, config)
    if flags.backend == "ray":
        from jaxpage import ray_serve

        ray_serve.run(config, flags.server, flags.replicas)
        return
    bound = run.bind(flags.server)
    llm = AsyncPooler(config) if pools(config) else AsyncLLM.from_engine_args(config)
    run.run(llm, flags.server, bound)


def generate(flags: Generate) -> None:
    """Continue prompts and print them with their continuations. Raises ValueError."""
    if not flags.prompt:
        raise ValueError("nothing to continue; give --prompt TEXT")
    given = _sampling_options(flags.sampling, logprobs=flags.logprobs)
    from jaxpage.llm import LLM

    llm = LLM(**_engine_options(flags.model, flags.engine))
    params = dataclasses.replace(llm.get_default_sampling_params(), **given)
    outputs = llm.generate(list(flags.prompt), params, use_tqdm=is_terminal(sys.stderr))
    for output in outputs:
        for completion in output.outputs:
            print(f"{output.prompt}{completion.text}")
            for token_id, entries in zip(
                completion.token_ids, completion.logprobs or (), strict=False
            ):
                print(_logprobs_line(token_id, entries))


def run_batch(flags: RunBatch) -> None:
    """Answer the requests of an OpenAI batch file. Raises ValueError."""
    from jaxpage.server.run_batch import main

    more = (_engine_options(flags.model, flags.engine), flags.max_concurrency)
    main(flags.input_file, flags.output_file, *more, flags.served_model_name)


def _logprobs_line(token_id: int, entries: dict[int, Logprob]) -> str:
    """A token that was sampled, then the likely ones of its position."""

    def name(i: int) -> str:
        return f"{entries[i].decoded_token!r} {entries[i].logprob:.3f}"

    likely = sorted((i for i in entries if i != token_id), key=lambda i: -entries[i].logprob)
    return "  ".join([f"  {token_id:>7} {name(token_id):<24}", *map(name, likely)]).rstrip()


@dataclass(frozen=True, kw_only=True)
class Compile:
    """Compile all programs of a model, from which `LLM` starts with these options and compilation_cache_dir=OUTPUT."""

    output: Path  # a folder, made if it is not there
    model: Model = ""
    target: str | None = None  # such as v6e:2x2 or h200, see `jaxpage plan`; none: this machine
    engine: EngineFlags = field(default_factory=EngineFlags)


def compile_programs(flags: Compile) -> None:
    """Compile all programs of a model. Raises ValueError."""
    from jaxpage.aot.compile import compile_for
    from jaxpage.aot.targets import parse_target

    target = None if flags.target is None else parse_target(flags.target)
    compile_for(_engine_options(flags.model, flags.engine), flags.output, target)


def _engine_options(model: str, flags: EngineFlags) -> dict[str, Any]:
    """What `LLM` is to be told: what differs from its own defaults, and some model."""
    if not model:
        from jaxpage.demo import checkpoint

        model = str(checkpoint())
        print("no --model: using the tiny one of the demo", file=sys.stderr)
    return {"model": model} | given_options(flags, EngineFlags)


def _sampling_options(flags: SamplingFlags, **more: Any) -> dict[str, Any]:
    """The params that were given, checked before a model is loaded. Raises ValueError."""
    given = given_options(flags) | {
        name: value for name, value in more.items() if value is not None
    }
    checked: dict[str, Any] = {"max_tokens": None} | given
    SamplingParams(**checked)
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code, see `exit_codes`."""
    args = list(sys.argv[1:] if argv is None else argv)
    return exit_codes.run(lambda: _main(args))


def _main(args: list[str]) -> int | None:
    match args:
        case ["demo" | "chat" | "generate" as name, *rest]:
            command: Callable[..., None] = {"demo": demo, "chat": chat, "generate": generate}[name]
        case ["complete", *rest]:
            command = complete
        case ["serve", *rest]:
            command = serve
        case ["run-batch", *rest]:
            command = run_batch
        case ["compile", *rest]:
            command = compile_programs
        case ["doctor", *rest]:
            command = importlib.import_module("jaxpage.doctor").main
        case ["convert", *rest]:
            command = importlib.import_module("jaxpage.weights.convert").main
        case ["replay", *rest]:
            command = importlib.import_module("jaxpage.replay").main
        case ["plan", *rest]:
            command = importlib.import_module("jaxpage.aot.plan").main
        case ["bench", name, *rest] if name in BENCHES:
            command = importlib.import_module(f"jaxpage.bench.{name}").main
        case ["-h" | "--help" | "help"]:
            print(USAGE, end="")
            return 0
        case ["--version" | "-V"]:
            print(f"jaxpage {__version__}")
            return 0
        case _:
            print(f"{_unknown(args)}{USAGE}", end="", file=sys.stderr)
            return 2
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("jaxpage").setLevel(logging.INFO)
    prog = f"jaxpage {' '.join(args[: len(args) - len(rest)])}"
    if command is serve:
        rest = importlib.import_module("jaxpage.server.config_file").with_config_file(rest)
    return _run(command, prog, rest)


def _unknown(args: list[str]) -> str:
    """What is wrong with the first words, as a line."""
    if not args:
        return ""
    if args[0] != "bench":
        return f"jaxpage: there is no command {args[0]!r}\n"
    named = repr(args[1]) if len(args) > 1 else "without a name"
    return f"jaxpage: there is no bench {named}\n"


def _run(command: Callable[..., Any], prog: str, args: Sequence[str]) -> int | None:
    """Call a command with its flags: one dataclass of them, or a few plain parameters."""
    hints: list[Any] = [t for name, t in get_type_hints(command).items() if name != "return"]
    takes_flags = len(hints) == 1 and dataclasses.is_dataclass(hints[0])
    parsed: Any = hints[0] if takes_flags else command
    args, of_vllm = vllm_flags.take(args, parsed)
    result = tyro.cli(
        parsed,
        prog=prog,
        description=_what_it_does(parsed),
        args=args,
        registry=_registry(),
        config=(tyro.conf.OmitArgPrefixes,),
    )
    if not takes_flags:
        return result
    result = vllm_flags.with_options(result, of_vllm)
    if (file := getattr(result, "json", None)) is not None:
        check_writable(file)
    return command(result)


def _what_it_does(documented: Any) -> str:
    """A docstring without what concerns programmers."""
    text = inspect.getdoc(documented) or ""
    return re.split(r"\s(?:Returns|Raises)\s", text, maxsplit=1)[0]


def _registry() -> tyro.constructors.ConstructorRegistry:
    """Flags that may be left out are shown as what they take: FLOAT instead of {None}|FLOAT."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def without_none(
        info: tyro.constructors.PrimitiveTypeInfo,
    ) -> tyro.constructors.PrimitiveConstructorSpec | None:
        members = get_args(info.type)
        if info.type_origin not in (types.UnionType, Union) or types.NoneType not in members:
            return None
        others = tuple(t for t in members if t is not types.NoneType)
        union: Any = Union[others]  # noqa: UP007
        spec = tyro.constructors.ConstructorRegistry.get_primitive_spec(
            tyro.constructors.PrimitiveTypeInfo.make(union, info.markers)
        )
        if not isinstance(spec, tyro.constructors.PrimitiveConstructorSpec):
            return None
        return dataclasses.replace(
            spec,
            is_instance=lambda value: value is None or spec.is_instance(value),
            str_from_instance=lambda value: (
                ["none"] if value is None else spec.str_from_instance(value)
            ),
        )

    return registry
