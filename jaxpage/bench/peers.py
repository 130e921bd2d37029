"""The engines that a benchmark compares, each in a process of its own, perhaps of another Python.

What that Python imports of jaxpage (this file, `engines.py`, `llama.py`) imports only the standard library at its top.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxpage.bench import engines, llama
from jaxpage.bench.engines import Options, Peer, Work
from jaxpage.bench.subprocess_rpc import RemoteObject

PEERS: dict[str, type[Peer]] = {
    "jaxpage": engines.Jaxpage,
    "jaxpage-int8": engines.JaxpageInt8,
    "jaxpage-no-prefix-cache": engines.JaxpageNoPrefixCache,
    "transformers-generate": engines.TransformersGenerate,
    "transformers-continuous": engines.TransformersContinuous,
    "vllm": engines.Vllm,
    "llama.cpp": llama.LlamaCpp,
}


def engine_of(peer: str) -> str:
    """What a user calls the engine of a peer: those of one engine differ after a dash."""
    return peer.split("-")[0]


class PeerProcess(RemoteObject):
    """A peer in a process of its own, which is stopped while it is not asked anything."""

    def __init__(self, name: str, python: str = sys.executable) -> None:
        if name not in PEERS:
            raise ValueError(f"there is no peer {name!r}; there are {', '.join(PEERS)}")
        environment, target = PEERS[name].environment, "jaxpage.bench.peers:Served"
        super().__init__(target, python=python, environment=environment, pause=True)
        self.name = name

    def setup(
        self, folder: Path, options: Options, *, timeout: float | None = None
    ) -> dict[str, str]:
        return self.ask("setup", self.name, str(folder), asdict(options), timeout=timeout)

    def run(self, work: Work, *, timeout: float | None = None) -> float:
        """Seconds that the peer needed. Raises RuntimeError if it answered too little, failed or died."""
        seconds, count = self.ask("run", asdict(work), timeout=timeout)
        if count != work.num_output_tokens:
            raise RuntimeError(
                f"{self.name} gave {count} tokens instead of {work.num_output_tokens}"
            )
        return seconds


class Served:
    """A peer, in its process."""

    def setup(self, name: str, folder: str, options: dict[str, Any]) -> dict[str, str]:
        given = Options(**options)
        # Both XLA's and OpenMP's thread pools are as large as the set of allowed processors.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.threads])
        self.peer = PEERS[name]()
        return self.peer.setup(folder, given)

    def run(self, work: dict[str, Any]) -> tuple[float, int]:
        return self.peer.run(Work(**work))


def check_python(name: str, python: str) -> None:
    """Raises ValueError unless `python` runs and has the package of the peer `name`."""
    package = PEERS[name].package
    # find_spec, not import: that would take seconds for some of them
    code = f"import importlib.util as u; print(u.find_spec({package!r}) is not None)"
    command = [python, "-P", "-c", code]
    try:
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as e:
        raise ValueError(f"{python} is no Python that runs: {e}") from None
    if found.strip() != "True":
        raise ValueError(
            f"{python} has no package {package}, which {name} needs; name the Python of an "
            f"environment that has it: --python {engine_of(name)}=ENVIRONMENT/bin/python "
            "(jaxpage/bench/README.md says how to make one)"
        )


def starts(
    folder: Path, options: dict[str, Any], *, python: str = sys.executable, threads: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """How long jaxpage takes to start with an empty cache of programs ("cold"), and with a full one ("cached").

    Seconds from before the first import by event: "imported", "built" (`LLM` is there), "first_token" (of a request
    made at once), "warm" (all programs are there). `options` are the engine's. Raises RuntimeError if a start fails.
    """
    with tempfile.TemporaryDirectory(prefix="jaxpage-") as cache:
        options = options | {"model": str(folder), "compilation_cache_dir": cache}
        for name in ("cold", "cached"):
            with RemoteObject("jaxpage.bench.engines:JaxpageStart", python=python) as process:
                yield name, process.ask("measure", options, threads)
