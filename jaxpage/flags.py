"""The command line's flags: options of the engine, of sampling and of the server, under the same names."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxpage.config import EngineConfig
from jaxpage.server.options import ServerOptions

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


_MODEL = "a folder, or a name on the Hugging Face hub; none: the tiny model of the demo"
Model = Annotated[str, tyro.conf.arg(help=_MODEL, help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class EngineFlags(EngineConfig):
    """The same as the options of `LLM`."""

    model: tyro.conf.Suppress[str] = ""  # a flag of the command itself
    hf_token: str | None = None  # for gated models
    hf_overrides: JsonDict = None  # merged into config.json
    override_generation_config: JsonDict = None  # merged into generation_config.json
    # markers of reasoning: {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}
    reasoning_config: JsonDict = None
    reasoning_parser: str | None = None  # how the model reasons: qwen3, deepseek_r1, openai_gptoss
    structured_outputs_config: JsonDict = None
    # check guesses at several tokens in one step: {"method": "ngram", "num_speculative_tokens": 4}, or with a "model"
    speculative_config: Annotated[JsonDict, tyro.conf.arg(aliases=("-sc",))] = None
    limit_mm_per_prompt: JsonDict = None  # most pictures in a prompt: {"image": 4, "video": 1}
    mm_processor_kwargs: JsonDict = None  # how pictures are prepared: {"max_pixels": 1003520}
    pooler_config: JsonDict = None  # how texts are pooled, if not as the checkpoint says
    logits_processors: tyro.conf.Suppress[tuple[Any, ...]] = ()  # functions
    options_without_effect: tyro.conf.Suppress[tuple[str, ...]] = ()
    of_vllm: tyro.conf.Suppress[Any] = None  # options by name, see `vllm_flags`
    research: tyro.conf.Suppress[Any] = None  # for Python
    mesh: tyro.conf.Suppress[Any] = None  # a Python object
    # devices that share weights and KV heads; none: one, or all local ones if the weights do not fit on one
    tensor_parallel_size: Annotated[int | None, tyro.conf.arg(aliases=("-tp", "--tp"))] = None
    # replicas of the engine, each on as many devices of its own; one of them answers a request
    data_parallel_size: Annotated[int, tyro.conf.arg(aliases=("-dp", "--dp"))] = 1


@dataclass(frozen=True, kw_only=True)
class ChatEngineFlags(EngineFlags):
    """The options of `LLM`, with defaults for one answer at a time."""

    max_num_seqs: int | None = 1
    max_num_batched_tokens: int | None = 512
    decode_steps: int = 1


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """The fields of `SamplingParams`; defaults come from the model's generation config."""

    max_tokens: int | None = None
    temperature: float | None = None  # 0: greedy
    top_p: float | None = None
    top_k: int | None = None
    n: int | None = None  # continuations per prompt
    stop: tuple[str, ...] = ()  # strings that end a continuation
    min_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    thinking_token_budget: int | None = None  # needs --reasoning-config
    allowed_token_ids: tuple[int, ...] = ()  # only these are sampled
    # what the output must match: {"json": {...}}, {"regex": "..."}, {"choice": [...]}, {"grammar": "..."}
    structured_outputs: JsonDict = None
    logit_bias: JsonDict = None  # id to number, as {"42": -1.5}; -Infinity bans an id
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class ServerFlags(ServerOptions):
    """How requests are taken."""

    default_chat_template_kwargs: JsonDict = None


def given_options(flags: Any, defaults: type | None = None) -> dict[str, Any]:
    """What differs from the defaults, those of another class of flags if one is named. As JSON can hold it."""
    given: dict[str, Any] = {
        f.name: _in_json(value)
        for f in fields(defaults or flags)
        if (value := getattr(flags, f.name)) != f.default
    }
    return given | given.pop("of_vllm", {})


def _in_json(value: Any) -> Any:
    """Tuples as lists, and configs as the dicts that they can be made of."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return list(value) if isinstance(value, tuple) else value


def check_writable(file: Path) -> None:
    """Raise ValueError if --json names a file that cannot be written: after a long measurement it would be too late."""
    try:
        if file.is_file() or file.is_dir():
            file.open("ab").close()
        elif not file.exists():
            tempfile.TemporaryFile(dir=file.resolve().parent).close()
    except OSError as error:
        raise ValueError(f"--json {file} cannot be written: {error.strerror}") from None
