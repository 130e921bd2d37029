"""How long jaxpage takes to start: with an empty cache of compiled programs, and with a full one.

Both ends are here: `measure`, and the code of the fresh process that it times. Knows only the
public names of the engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def measure(
    folder: Path, python: str, threads: int, options: dict[str, Any]
) -> dict[str, dict[str, float]]:
    """All of `starts`: the seconds by cache and event."""
    return dict(starts(folder, python, threads, options))


def starts(
    folder: Path, python: str, threads: int, options: dict[str, Any]
) -> Iterator[tuple[str, dict[str, float]]]:
    """For each state of the cache ("cold", then "cached") the seconds from before the first import, by event.

    "imported": jaxpage and what it needs. "built": `LLM` is there. "first_token": a request made at once has its first
    token. "warm": all programs are there. `options` are the engine's. Raises RuntimeError if a start fails.
    """
    with tempfile.TemporaryDirectory(prefix="jaxpage-") as cache:
        options = options | {"model": str(folder), "compilation_cache_dir": cache}
        for name in ("cold", "cached"):
            yield name, _start(python, options, threads)


def _start(python: str, options: dict[str, Any], threads: int) -> dict[str, float]:
    root = str(Path(__file__).resolve().parents[2])  # a checkout need not be installed
    code = (
        f"import sys; sys.path.insert(0, {root!r}); "
        f"from jaxpage.bench.warm_up import child; child({options!r}, {threads})"
    )
    done = subprocess.run([python, "-P", "-c", code], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"a start of jaxpage ended with status {done.returncode}, see above")
    return json.loads(done.stdout.splitlines()[-1])


def child(options: dict[str, Any], threads: int) -> None:
    """Start an engine in this process, answer one request, print the times as JSON."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    start = time.perf_counter()
    seconds = {}

    def note(event: str) -> None:
        seconds[event] = time.perf_counter() - start

    from jaxpage import LLM, SamplingParams

    note("imported")
    llm = LLM(**options, skip_tokenizer_init=True)
    note("built")
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [3, 4, 5]}], params, use_tqdm=False)
    note("first_token")
    llm.wait_until_warm()
    note("warm")
    print(json.dumps(seconds))
