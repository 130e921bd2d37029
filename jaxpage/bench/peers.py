"""The engines that a benchmark compares, each in a separate process, which may run another Python.

The modules of jaxpage that this Python imports (`engines.py`, `llama.py`) import only the standard library at the top.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxpage.bench import engines, llama
from jaxpage.bench.engines import Options, Peer, Work
from jaxpage.bench.results import error_summary
from jaxpage.bench.subprocess_rpc import RemoteObject

PEERS: dict[str, type[Peer]] = {
    "jaxpage": engines.Jaxpage,
    "jaxpage-int8": engines.JaxpageInt8,
    "jaxpage-strict": engines.JaxpageStrict,
    "jaxpage-no-prefix-cache": engines.JaxpageNoPrefixCache,
    "transformers-generate": engines.TransformersGenerate,
    "transformers-continuous": engines.TransformersContinuous,
    "vllm": engines.Vllm,
    "llama.cpp": llama.LlamaCpp,
}


def engine_of(peer: str) -> str:
    """The user's name for a peer's engine. Peers with the same engine differ after a dash."""
    return peer.split("-")[0]


class PeerProcess(RemoteObject):
    """A peer in a separate process, which is stopped between calls."""

    def __init__(self, name: str, python: str = sys.executable, **options: Any) -> None:
        """`options` are those of `RemoteObject`."""
        peer, self.name = PEERS[name], name
        target = f"{peer.__module__}:{peer.__qualname__}"
        options |= {"python": python, "environment": peer.environment, "pause": True}
        if shutil.which(python) is None:
            raise ValueError(f"{python} is not an executable Python: there is no such program")
        super().__init__(target, **options)

    def setup(
        self, folder: Path, options: Options, *, timeout: float | None = None
    ) -> dict[str, str]:
        """Raises ValueError if its Python lacks a package."""
        try:
            return self.ask("setup", str(folder), options, timeout=timeout)
        except RuntimeError as error:
            if "ModuleNotFoundError" not in str(error):
                raise
            raise ValueError(
                f"{self.name}: {error_summary(error)}; name the Python of an environment that has it: "
                f"--python {engine_of(self.name)}=ENVIRONMENT/bin/python (jaxpage/bench/README.md "
                "says how to create one)"
            ) from error

    def run(self, work: Work, *, timeout: float | None = None) -> float:
        """Seconds that the peer took. Raises RuntimeError if it gave too few tokens, failed or died."""
        seconds, count = self.ask("run", work, timeout=timeout)
        if count != work.num_output_tokens:
            raise RuntimeError(
                f"{self.name} gave {count} tokens instead of {work.num_output_tokens}"
            )
        return seconds


def starts(
    folder: Path, options: dict[str, Any], *, python: str = sys.executable, threads: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """How long jaxpage takes to start with an empty program cache ("cold"), and with a full one ("cached").

    Seconds from before the first import to each event: "imported", "built" (`LLM` exists), "first_token" (of a request
    made immediately), "warm" (all programs are ready). `options` are the engine's. Raises RuntimeError if a start
    fails.
    """
    target = "jaxpage.bench.engines:JaxpageStart"
    with tempfile.TemporaryDirectory(prefix="jaxpage-") as cache:
        options = options | {"model": str(folder), "compilation_cache_dir": cache}
        for name in ("cold", "cached"):
            with RemoteObject(target, python=python, threads=threads) as process:
                yield name, process.ask("measure", options)
