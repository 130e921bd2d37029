"""Options of the server, besides those of the engine. vLLM's names where it has them."""

from __future__ import annotations

import functools
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpage.environment import has_vllm_key
from jaxpage.server.lora_modules import check_folders, parse_modules
from jaxpage.server.tls import tls_context

# (lowest, highest) of options that are numbers; None: no limit. `max_queued_requests` may be anything.
_RANGES: dict[str, tuple[float, float | None]] = {
    "port": (0, 65535),  # 0: a free one
    "shutdown_timeout": (0, None),
    "max_body_size": (1, None),
    "max_n": (1, None),
    "max_stop_strings": (0, None),
    "max_stored_responses": (0, None),
}


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How the server takes requests. Raises ValueError for values that are out of range."""

    host: str = "127.0.0.1"  # 0.0.0.0: all interfaces
    port: int = 8000
    served_model_name: tuple[str, ...] = ()  # model names in requests; none: the model's
    # initial adapters, each NAME=PATH or {"name": NAME, "path": PATH}; with --enable-lora
    lora_modules: tuple[str, ...] = ()
    # keys of clients, who send one with every request: "Authorization: Bearer KEY" or "x-api-key: KEY"
    api_key: tuple[str, ...] = ()
    api_key_file: Path | None = None  # more keys, one per line
    # key for pause, profile, reset, abort, adapters and enable_rl; without one only local clients may use them
    admin_api_key: str | None = None
    api_key_for_all: bool = False  # require a key also for /health and /metrics
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    allowed_origins: tuple[str, ...] = ()  # origins of browser scripts (CORS); "*": any
    root_path: str = ""  # prefix of paths behind a proxy, which may remove it
    shutdown_timeout: float = 30.0  # seconds for running requests to end after SIGTERM
    write_timeout: float = 60.0  # seconds that a client may not read before its request is aborted
    max_body_size: int = 32 * 2**20  # bytes
    max_queued_requests: int = 4096  # most waiting requests; more get a 503
    max_n: int = 128  # most continuations of one request, prompts times n
    max_stop_strings: int = 256  # per request
    # most responses stored in memory on request, 256 MiB at most; the least recently used is evicted first. 0: none
    max_stored_responses: int = 1000
    trust_request_chat_template: bool = False  # allow templates in requests, which run in a sandbox
    default_chat_template_kwargs: Mapping[str, Any] | None = None
    exclude_tools_when_tool_choice_none: bool = False  # then the chat template does not get them
    enable_prompt_tokens_details: bool = False  # include cached prompt tokens in usage
    enable_force_include_usage: bool = False  # usage in all streams and their chunks
    disable_log_stats: bool = False  # no throughput line every 10 s
    # no line per request with method, path, status and milliseconds, and without prompts
    disable_access_log: bool = False
    otlp_traces_endpoint: str | None = None  # collector for spans of requests (extra `otlp`)
    # sleep, weight updates and TRL's calls, for a trainer in another process; all are administrative
    enable_rl: bool = False
    profiler_dir: Path | None = None  # folder for traces of /start_profile

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not (low <= value and (high is None or value <= high)):  # NaN is refused too
                allowed = f"at least {low}" if high is None else f"in {low}..{high}"
                raise ValueError(f"{name} must be {allowed}, got {value!r}")
        if not self.write_timeout > 0:  # 0 would cut every stream at once
            raise ValueError(f"write_timeout must be above 0, got {self.write_timeout!r}")
        if self.root_path and (self.root_path[0] != "/" or self.root_path[-1] == "/"):
            raise ValueError(
                f"root_path={self.root_path!r} is no prefix of paths such as /api: it must begin with a slash and not "
                "end with one"
            )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError(
                f"ssl_keyfile={str(self.ssl_keyfile)!r} needs ssl_certfile, the certificate of the key"
            )
        parse_modules(self.lora_modules, self.served_model_name)

    def check_files(self) -> None:
        """Read the files that the options name, and make `profiler_dir`. Raises ValueError if that fails, or if there
        is no key although vLLM's variable for one is set.

        They are those of this machine, so it is not called where replicas run on others.
        """
        if not self.keys() and has_vllm_key():
            raise ValueError(
                "VLLM_API_KEY is set but not read here, so requests would need no key: pass --api-key or "
                "--api-key-file, or unset it"
            )
        _ = self.ssl_context
        check_folders(self.lora_modules)
        if self.profiler_dir is not None:
            try:
                self.profiler_dir.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=self.profiler_dir).close()
            except OSError as error:
                raise ValueError(
                    f"profiler_dir={str(self.profiler_dir)!r} cannot be written to: {error.strerror}"
                ) from None

    @functools.cached_property
    def ssl_context(self) -> ssl.SSLContext | None:
        """For HTTPS; None for HTTP. The files are read once, as a key may ask for its pass phrase."""
        if self.ssl_certfile is None:
            return None
        return tls_context(self.ssl_certfile, self.ssl_keyfile)

    def keys(self) -> tuple[str, ...]:
        """The keys of clients. Raises ValueError for a file that cannot be read, or has no keys."""
        if self.api_key_file is None:
            return self.api_key
        try:
            lines = self.api_key_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(
                f"api_key_file={str(self.api_key_file)!r} cannot be read: {reason}"
            ) from None
        keys = tuple(line.strip() for line in lines if line.strip())
        if not keys:
            raise ValueError(f"api_key_file={str(self.api_key_file)!r} has no key")
        return (*self.api_key, *keys)
