"""Flags of `vllm serve` that no command of jaxpage has: which values are harmless. And flags as vLLM may write them,
with dots: `--speculative-config.method ngram`.

Knows how vLLM writes flags, and the names of its server's options; those of its engine are in `vllm_options`. Must not
know what an option does. A flag that a command learns needs no change here, as its own flags are never taken.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

from jaxpage import vllm_options

# What to do instead -> option of vLLM's server -> the values that ask for nothing. Others are refused.
_BOTH = (False, True)
_REFUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    "calls are parsed whenever their format is known": {"enable_auto_tool_choice": _BOTH},
    "give return_tokens_as_token_ids with each request": {"return_tokens_as_token_ids": (False,)},
    "answers have OpenAI's role": {"response_role": ("assistant",)},
    "the chat template says which form of content it needs": {
        "chat_template_content_format": ("auto",)
    },
    "every answer has an X-Request-Id": {"enable_request_id_headers": _BOTH},
    "the log has a line with method, path, status and time for each request, never its contents": {
        "enable_log_outputs": (False,),
        "enable_log_deltas": _BOTH,
        "log_error_stack": _BOTH,
        "disable_access_log_for_endpoints": (),
    },
    "the server listens on host and port": {
        **dict.fromkeys(("uds", "grpc_port"), ()),
        **dict.fromkeys(("grpc", "headless"), (False,)),
    },
    "a logits processor is a function: pass it to LLM or AsyncLLM": {"logits_processors": ()},
    "`thinking` of a request decides": {"anthropic_disabled_thinking_effort": ("auto",)},
    "Cohere's chats are not served": {
        "cohere_is_reasoning_model": _BOTH,
        "cohere_format": ("cmd3", "cmd4"),
    },
    "put a proxy in front of the server": {
        "middleware": (),
        **dict.fromkeys(("ssl_ca_certs", "ssl_ciphers"), ()),
        "ssl_cert_reqs": (0,),
        "enable_ssl_refresh": (False,),
        "allow_credentials": (False,),
        **dict.fromkeys(("allowed_methods", "allowed_headers"), (["*"], "*")),
    },
    "there are no plugins": {"tool_parser_plugin": ()},
    "functions are those of the request, and the client calls them": {"tool_server": ()},
    "grammars hold for tool_choice only": {"tool_strict_level": ("auto",)},
    "/metrics has the times of requests": {"enable_per_request_metrics": (False,)},
    "streams have no comments": {"sse_keep_alive_interval": (0,)},
    "clients can read the tokenizer from the checkpoint": {
        "enable_tokenizer_info_endpoint": (False,)
    },
    "mm_processor_kwargs are options of the engine": {"trust_request_mm_kwargs": (False,)},
    "/load and /inference/v1/generate always exist": {
        **dict.fromkeys(("enable_server_load_tracking", "enable_scale_out"), _BOTH),
    },
    "there are no pages of documentation": {
        "disable_fastapi_docs": _BOTH,
        "enable_offline_docs": (False,),
    },
}
_ADVICE = {name: advice for advice, options in _REFUSED.items() for name in options}
_NEUTRAL = {name: neutral for options in _REFUSED.values() for name, neutral in options.items()}

# Any value is accepted, and told at start-up.
_WITHOUT_EFFECT = (
    "disable_uvicorn_access_log",  # of commands without an access log
    *("uvicorn_log_level", "max_log_len", "h11_max_incomplete_event_size", "h11_max_header_count"),
    *("fingerprint_mode", "fingerprint_value", "enable_flash_late_interaction"),
    *("api_server_count", "data_parallel_supervisor_port", "dp_supervisor_probe_interval_s"),
    *("dp_supervisor_probe_timeout_s", "dp_supervisor_probe_failure_threshold"),
)

# Flags of vLLM -> flags of jaxpage that say the same.
_RENAMED = {"disable_uvicorn_access_log": "disable_access_log"}

# vLLM's `-n`, `-r` and `-q` are left out: `jaxpage generate -n 3` shall not mean three hosts.
SHORT = {
    "-pp": "pipeline_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-dpn": "data_parallel_rank",
    "-dpr": "data_parallel_start_rank",
    "-dpl": "data_parallel_size_local",
    "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port",
    "-dpb": "data_parallel_backend",
    "-ep": "enable_expert_parallel",
    "-sc": "speculative_config",
    "-cc": "compilation_config",
    "-ac": "attention_config",
    "-O": "optimization_level",
}

# Options with any number of values; all others have one, or none if they are true or false.
SEVERAL = {
    *("allowed_methods", "allowed_headers", "collect_detailed_traces", "cudagraph_capture_sizes"),
    *("custom_histogram_buckets", "device_ids", "ignore_patterns", "kv_cache_dtype_skip_layers"),
    *("lora_target_modules", "numa_bind_cpus", "numa_bind_nodes", "served_model_name"),
    *("sleep_preserve_parameter_names", "logits_processors"),
}
# Fields of the engine's flags that are no flags here, but are in vLLM.
_FOR_PYTHON = {"logits_processors"}
_NAMES = _NEUTRAL.keys() | set(_WITHOUT_EFFECT) | vllm_options.NAMES


def take(args: Sequence[str], flags: Any) -> tuple[list[str], dict[str, Any]]:
    """Take the flags of vLLM that a command does not have itself out of its arguments.

    flags: the dataclass of the command's own flags. Returns the other arguments, and the taken flags that are options
    of the engine. Commands without an engine have no flags of vLLM. Of flags that take JSON, those that name keys with
    dots become one with an object. Raises ValueError for flags of vLLM's server that ask for what jaxpage lacks, and
    for flags without a value.
    """
    own, in_json = _own_flags(flags), _flags_in_json(flags)
    known = _NAMES if "engine" in get_type_hints(flags) else set()
    left: list[str] = []
    options: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    places: dict[str, int] = {}  # of their values in `left`
    words = list(args)
    while words:
        word = re.sub(r"^-O(\d)$", r"-O=\1", words.pop(0))
        flag, equals, value = word.partition("=")
        name, keys, is_no = _read_flag(flag)
        of_keys = keys or _is_object(value if equals else "".join(words[:1]))
        if name in in_json and of_keys and not is_no:
            value = value if equals else _next_word(flag, words)
            if name not in objects:
                left += [f"--{name.replace('_', '-')}", ""]
                places[name] = len(left) - 1
            _put(objects, [name, *keys], flag, to_value(value))
        elif name in own:
            left.append(word)
            if not (own[name] or equals):
                left += words[:1]  # its value, whatever that looks like
                del words[:1]
        elif known and (renamed := _RENAMED.get(name)) in own:
            is_no ^= bool(equals) and not to_value(value)
            left.append(f"--{'no-' if is_no else ''}{renamed}".replace("_", "-"))
        elif name not in known:
            left.append(word)
        else:
            given = to_value(value) if equals else _read_value(flag, name, words)
            _put(options, [name, *keys], flag, not given if is_no else given)
    for name, value in objects.items():
        left[places[name]] = json.dumps(value)
    return left, _for_the_engine(options)


def _read_flag(flag: str) -> tuple[str, list[str], bool]:
    """The option of a flag, "" if it is none; the keys that dots name in it; and whether the flag begins with "no-"."""
    first, *keys = flag.split(".")
    name = SHORT.get(first, first.removeprefix("--").replace("-", "_"))
    if not flag.startswith("-") or " " in flag:
        return "", [], False
    positive = name if name in _NAMES else name.removeprefix("no_")
    return positive, keys, positive != name


def _put(options: dict[str, Any], keys: list[str], flag: str, value: Any) -> None:
    """options[key][key] ... = value. Raises ValueError that names the flag if that would overwrite another value."""
    if "" in keys:
        raise ValueError(f"{flag} names no key of {keys[0]}: write it as --{keys[0]}.KEY VALUE")
    for key in keys[:-1]:
        options = options.setdefault(key, {})
        if not isinstance(options, dict):
            raise ValueError(f"{flag}: {key} is already {options!r}, which has no keys")
    options[keys[-1]] = value


def with_options(flags: Any, options: dict[str, Any]) -> Any:
    """The parsed flags, with the options that `take` found."""
    if not options:
        return flags
    return dataclasses.replace(flags, engine=dataclasses.replace(flags.engine, of_vllm=options))


def _own_flags(flags: type) -> dict[str, bool]:
    """The flags of a dataclass, and those of its parts, as Python's names; True for those that have no value."""
    found: dict[str, bool] = {}
    for name, hint in get_type_hints(flags).items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            found |= _own_flags(hint)
        elif name not in _FOR_PYTHON:
            found[name] = bool in (hint, *get_args(hint))
    return found


def _flags_in_json(flags: type) -> set[str]:
    """The flags of a dataclass, and those of its parts, that take an object as JSON, as Python's names."""
    found: set[str] = set()
    for name, hint in get_type_hints(flags, include_extras=True).items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            found |= _flags_in_json(hint)
        elif any(getattr(each, "metavar", None) == "JSON" for each in get_args(hint)[1:]):
            found.add(name)
    return found


def _is_object(text: str) -> bool:
    return isinstance(to_value(text), dict)


def _next_word(flag: str, words: list[str]) -> str:
    """Take a value from the words that follow a flag. Raises ValueError if there is none."""
    if not words or words[0].startswith("--"):
        raise ValueError(f"{flag} needs a value")
    return words.pop(0)


def _read_value(flag: str, name: str, words: list[str]) -> Any:
    """The value of a flag without `=`, taken from the words that follow it. Raises ValueError if there is none."""
    if is_switch(name):
        return True
    count = 1
    if name in SEVERAL:
        count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    values = [to_value(word) for word in words[:count]]
    if not values or words[0].startswith("--"):
        raise ValueError(f"{flag} needs a value")
    del words[:count]
    return values if name in SEVERAL and not isinstance(values[0], list) else values[0]


def is_switch(name: str) -> bool:
    """Whether an option is true or false, and has no value on a command line."""
    neutral = _NEUTRAL[name] if name in _NEUTRAL else vllm_options.neutral_values(name)
    only_bools = bool(neutral) and all(isinstance(value, bool) for value in neutral)
    return only_bools or name.startswith(("enable_", "disable_", "use_"))


def to_value(text: str) -> Any:
    """Numbers, true, null, lists and objects as JSON; everything else is a string."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text


def _for_the_engine(options: dict[str, Any]) -> dict[str, Any]:
    """Without those of the server, which are checked here. Raises ValueError."""
    for name in _NEUTRAL.keys() & options.keys():
        vllm_options.check_neutral(name, options.pop(name), _NEUTRAL[name], _ADVICE[name])
    ignored = [name for name in _WITHOUT_EFFECT if options.pop(name, None) is not None]
    return options | ({"options_without_effect": ignored} if ignored else {})
