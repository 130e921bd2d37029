"""Checks whether a compiler for TPUs or GPUs works by compiling a step of a small model in a separate process.

A mismatched compiler may fail for some programs only: with jax 0.10.2, libtpu 0.0.52 compiles `forward` but fails on
`sample`. So a whole step is compiled, as in `plan`, and nothing is concluded from versions alone.
"""

from __future__ import annotations

import json
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxpage.aot.process import Report, run, serve
from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import COMPILERS, missing_compiler

_TARGETS = {"tpu": "v6e:2x2", "gpu": "h200"}
_MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "dtype": "bfloat16",
}
_OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 32}
_TIMEOUT = 180  # seconds; it usually takes about 20


def check_compiler(platform: str) -> tuple[str, bool]:
    """(text, whether it is fine) for `jaxpage doctor`, for "tpu" or "gpu". A compiler that is not installed is fine."""
    missing = missing_compiler(platform)
    if missing:
        return missing, True
    package = COMPILERS[platform]
    target = parse_target(_TARGETS[platform])
    try:
        seconds = run("jaxpage.aot.check", {"target": target.name}, target, timeout=_TIMEOUT)
    except ValueError as error:
        return str(error), False
    version = metadata.version(package)
    return f"{package} {version} compiled a step in {seconds:.1f} s: `jaxpage plan` works", True


def _work(request: dict[str, Any], report: Report) -> float:
    from jaxpage.aot.worker import compile_and_inspect, make_job

    del report
    with tempfile.TemporaryDirectory(prefix="jaxpage-") as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL))
        job = make_job(_OPTIONS | {"model": folder}, parse_target(request["target"]), 1)
    bucket = job.spec.buckets[-1]
    programs = bucket.programs(bucket.num_rows)
    return sum(compile_and_inspect(job, name)["seconds"] for name in programs)


if __name__ == "__main__":
    serve(_work)
