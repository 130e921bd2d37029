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
from pathlib import Path
from typing import Any


def measure(
    folder: Path, python: str, threads: int, options: dict[str, Any]
) -> dict[str, dict[str, float]]:
    """Seconds from before the first import, by cache ("cold" or "cached") and event.

    "first_token": a request made at once has its first token. "warm": all programs are there.
    `options` are the engine's. Raises RuntimeError if a start fails.
    """
    with tempfile.TemporaryDirectory(prefix="jaxpage-") as cache:
        options = options | {"model": str(folder), "compilation_cache_dir": cache}
        return {name: _start(python, options, threads) for name in ("cold", "cached")}


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
    from jaxpage import LLM, SamplingParams

    llm = LLM(**options, skip_tokenizer_init=True)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [3, 4, 5]}], params, use_tqdm=False)
    first_token = time.perf_counter() - start
    llm.wait_until_warm()
    print(json.dumps({"first_token": first_token, "warm": time.perf_counter() - start}))
