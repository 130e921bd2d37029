"""Options of the server, beside those of the engine. Names are vLLM's where vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How requests are taken."""

    host: str = "127.0.0.1"  # 0.0.0.0: every interface
    port: int = 8000
    served_model_name: tuple[str, ...] = ()  # names that requests may give; none: the model's
    # adapters to begin with, NAME=PATH or {"name": NAME, "path": PATH} each; with --enable-lora
    lora_modules: tuple[str, ...] = ()
    # one of them comes with every request: "Authorization: Bearer KEY"
    api_key: tuple[str, ...] = ()
    api_key_file: Path | None = None  # the same, a key in each line
    # of pause, profile, reset, abort, adapters and enable_rl; without one they are for clients of this machine only
    admin_api_key: str | None = None
    api_key_for_all: bool = False  # also for /health and /metrics, which are open otherwise
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    allowed_origins: tuple[str, ...] = ()  # of browsers' scripts (CORS); "*": any
    root_path: str = ""  # that a proxy in front takes away
    shutdown_timeout: float = 30.0  # seconds for running requests to end after SIGTERM
    write_timeout: float = 60.0  # seconds that a client may not read; then its request is aborted
    max_body_size: int = 32 * 2**20  # bytes
    max_queued_requests: int = 4096  # that wait for a place in a step; more get a 503
    max_n: int = 128  # continuations of one request, prompts times n
    max_stop_strings: int = 256  # of one request
    # kept in memory for clients that ask for it; the least recently used goes first. 0: none
    max_stored_responses: int = 1000
    trust_request_chat_template: bool = False  # requests may bring their own, which runs sandboxed
    default_chat_template_kwargs: Mapping[str, Any] | None = None
    enable_prompt_tokens_details: bool = False  # usage says how many prompt tokens were cached
    enable_force_include_usage: bool = False  # in streams, whether asked for or not
    disable_log_stats: bool = False  # no line of throughput every 10 s
    # no line for each request, which has method, path, status and milliseconds, and no prompts
    disable_access_log: bool = False
    otlp_traces_endpoint: str | None = None  # where spans of requests go (extra `otlp`)
    # sleep, other weights and TRL's calls, for a trainer in another process; administrative all of them
    enable_rl: bool = False
    profiler_dir: Path | None = None  # where /start_profile writes

    def keys(self) -> tuple[str, ...]:
        """The keys of clients. Raises ValueError for a file without any."""
        if self.api_key_file is None:
            return self.api_key
        lines = self.api_key_file.read_text(encoding="utf-8").splitlines()
        keys = tuple(line.strip() for line in lines if line.strip())
        if not keys:
            raise ValueError(f"api_key_file={str(self.api_key_file)!r} has no key")
        return (*self.api_key, *keys)
