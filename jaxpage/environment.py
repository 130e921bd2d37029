"""What the environment says. Nothing else reads it."""

from __future__ import annotations

import os
from pathlib import Path


def resolve_cache_dir(value: str | None) -> str:
    """The absolute path of the folder for cached executables, or "" for no cache."""
    if value is None:
        default = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "jaxpage", "xla")
        value = os.environ.get("JAXPAGE_COMPILATION_CACHE_DIR", default)
    return "" if value in ("", "off") else str(Path(value).expanduser().absolute())


def compiler_flags() -> str:
    """Compiler flags from the environment."""
    return f"{os.environ.get('XLA_FLAGS', '')} {libtpu_flags()}".strip()


def libtpu_flags() -> str:
    """The user's flags of libtpu, from the environment."""
    return os.environ.get("LIBTPU_INIT_ARGS", "")


def vllm_variables() -> list[str]:
    """The names of vLLM's variables that are set. They have no effect here."""
    return sorted(name for name in os.environ if name.startswith("VLLM_"))


def has_vllm_key() -> bool:
    """Whether vLLM's variable for an API key is set. To vLLM an empty one is none."""
    return bool(os.environ.get("VLLM_API_KEY"))


def hosts_secret() -> bytes:
    """The secret that the hosts of an engine must share; b"" if the user has not set one."""
    return os.environ.get("JAXPAGE_HOSTS_SECRET", "").encode()
