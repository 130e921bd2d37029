"""The engines that a benchmark compares, each in a child process of its own, told by a pipe to run.

Both ends of the pipe are here: `PeerProcess` in the benchmark, `serve` in the child. The child may
run in another Python, which need not have jaxpage: this file, `engines.py` and `llama.py` import
only the standard library at their tops. Knows nothing of workloads: a peer runs what it is given
and tells the seconds.

The pipe carries one JSON object a line: {"setup": {...}} or {"run": {...}} down, {"answer": ...}
or {"error": traceback} up. A peer that is not asked anything is stopped by a signal: thread pools
of some engines spin for a while, or for as long as they live, when they have nothing to do.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from jaxpage.bench import engines, llama

ROOT = Path(__file__).resolve().parents[2]  # where `import jaxpage` finds this checkout
# At the end of the path, and only while our own files are imported, so that the peer's packages
# never come from here.
CHILD = """import sys
sys.path.append({root!r})
from jaxpage.bench.peers import serve
sys.path.pop()
serve({name!r})
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every peer is set up with."""

    threads: int
    max_model_len: int
    max_num_seqs: int
    prefix_caching: bool


@dataclass(frozen=True, kw_only=True)
class Work:
    """Requests to be answered greedily, each with exactly its number of tokens: EOS is ignored."""

    prompts: list[list[int]]
    num_tokens: list[int]
    static_batch: int  # how many requests an engine without continuous batching takes at a time


class Peer(Protocol):
    """One engine, in the child process."""

    package: ClassVar[str]  # which its Python must have
    environment: ClassVar[dict[str, str]]  # variables that must stand before anything is imported

    def setup(self, folder: str, options: Options) -> dict[str, str]:
        """Load the checkpoint `folder` and return versions. Called once."""
        ...

    def run(self, work: Work) -> tuple[float, int]:
        """Answer the requests; seconds from the first token in to the last token out, and how
        many tokens came out for them."""
        ...


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


class PeerProcess:
    """A peer's child process, seen from the benchmark. It works only while it is asked."""

    def __init__(self, name: str, python: str = sys.executable) -> None:
        if name not in PEERS:
            raise ValueError(f"there is no peer {name!r}; there are {', '.join(PEERS)}")
        self.name = name
        variables = [f"{key}={value}" for key, value in PEERS[name].environment.items()]
        code = CHILD.format(root=str(ROOT), name=name)
        self._process = subprocess.Popen(
            # -P: the folder that we are in must not come before the peer's own packages
            ["env", *variables, python, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def setup(self, folder: Path, options: Options) -> dict[str, str]:
        return self._ask({"setup": {"folder": str(folder), "options": asdict(options)}})

    def run(self, work: Work) -> float:
        """Seconds that the peer needed. Raises RuntimeError if it answered too little or died."""
        seconds, num_tokens = self._ask({"run": asdict(work)})
        if num_tokens != sum(work.num_tokens):
            raise RuntimeError(
                f"{self.name} gave {num_tokens} tokens instead of {sum(work.num_tokens)}"
            )
        return seconds

    def _ask(self, message: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} died with status {self._process.wait()}")
        self._process.send_signal(signal.SIGSTOP)
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"{self.name} failed:\n{reply['error']}")
        return reply["answer"]

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()  # the child's loop ends
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


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
            "(README.md, Measuring, says how to make one)"
        )


def serve(name: str) -> None:
    """The child: answer until the pipe closes. What libraries print goes to stderr."""
    # A stopped process cannot see its pipe close: it ends with the benchmark, however that ends.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = PEERS[name]()
    for line in sys.stdin:
        try:
            answer = _answer(peer, json.loads(line))
            reply = {"answer": answer}
        except Exception:
            reply = {"error": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    # A peer's background threads must not hold the process back.
    os._exit(0)


def _answer(peer: Peer, message: dict[str, Any]) -> Any:
    if "run" in message:
        return peer.run(Work(**message["run"]))
    options = Options(**message["setup"]["options"])
    # Both XLA's and OpenMP's thread pools are as large as the set of allowed processors.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    return peer.setup(message["setup"]["folder"], options)
