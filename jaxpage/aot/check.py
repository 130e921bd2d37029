"""Whether a compiler for TPUs or GPUs works: it compiles a step of a small model, in a process of its own.

A mismatched compiler may fail for some programs only: with jax 0.10.2, libtpu 0.0.52 passes `forward` and fails with
`sample`. So a whole step is compiled, as `plan` does it, and nothing is concluded from versions alone.
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
_TIMEOUT = 180  # seconds; it takes about twenty


def check_compiler(platform: str) -> tuple[str, bool]:
    """(text, is_well) for `jaxpage doctor`: the compiler of "tpu" or "gpu". One that is not installed is well."""
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
