"""How long jaxpage takes to start: with an empty cache of compiled programs, and with a full one."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxpage.bench.subprocess_rpc import RemoteObject


def starts(
    folder: Path, options: dict[str, Any], *, python: str = sys.executable, threads: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """For each state of the cache ("cold", then "cached") the seconds from before the first import, by event.

    "imported": jaxpage and what it needs. "built": `LLM` is there. "first_token": a request made at once has its first
    token. "warm": all programs are there. `options` are the engine's. Raises RuntimeError if a start fails.
    """
    with tempfile.TemporaryDirectory(prefix="jaxpage-") as cache:
        options = options | {"model": str(folder), "compilation_cache_dir": cache}
        for name in ("cold", "cached"):
            with RemoteObject("jaxpage.bench.warm_up:Start", python=python) as process:
                yield name, process.ask("measure", options, threads)


class Start:
    """In the fresh process."""

    def measure(self, options: dict[str, Any], threads: int) -> dict[str, float]:
        """Start an engine and answer one request. See `starts`."""
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
        return seconds
