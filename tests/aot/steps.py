"""Compiles the default step programs of three models for devices that are not there, in a process of its own:
`python -m tests.aot.steps v6e:2x2 1`, or `python -m tests.aot.steps v6e:2x2 1 7B` for all programs of a model, whole.

Knows the models and which of their programs are compiled; judges nothing. For each program one line of JSON goes to
the standard output, and its name to the other one before the compiler's words.

Layers of a decoder are alike, and most of a program's compilation is the sampler's: with 2 layers it takes nearly as
long as with 24. So without a model named `some` chooses:
  - each program of a place once, of one of the three models in turn, with 2 layers. The pool's arrays have the size
    that they have at full depth, so a layer's write, attention and exchange are what they are there;
  - of one model the smallest and the largest decode step and the largest forward with all layers, instead;
  - of a place that is not `every` only these and what has no layers.
Places begin with different models.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import environment, missing_compiler

if TYPE_CHECKING:
    from jaxpage.aot.worker import CompileJob

ROOT = Path(__file__).parents[2]
FEW = 2  # layers


def _qwen2(size: int, mlp: int, heads: int, kv_heads: int, layers: int, **more) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": size,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
    } | more


# Those of Qwen2.5, as their config.json has them.
MODELS = {
    "0.5B": _qwen2(896, 4864, 14, 2, 24),
    "3B": _qwen2(2048, 11008, 16, 2, 36),
    "7B": _qwen2(3584, 18944, 28, 4, 28, vocab_size=152064, tie_word_embeddings=False),
}


@dataclass(frozen=True)
class Place:
    """Where programs run: some devices of a target."""

    target: str
    num_devices: int
    whole: str  # the model of which programs are compiled with all layers
    every: bool = True  # program of the manifest; see `some`

    @property
    def name(self) -> str:
        return f"{self.target} TP {self.num_devices}"


# Two processes at a time finish together in this order.
PLACES = (
    Place("v5e:2x2", 4, "7B"),
    Place("tpu7x:2x2x1", 1, "0.5B", every=False),  # v6e's, of a larger chip
    Place("v6e:2x2", 1, "0.5B"),
    Place("h200", 1, "7B"),
    Place("v6e:2x2", 4, "3B", every=False),  # the others are v5e's with more memory
)


@cache
def compile_all(place: Place, model: str | None = None) -> list[dict]:
    """What the compiler says of each program. Raises RuntimeError if it ends badly."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMPILATION_", "XLA_"))}
    told = dict(each.split("=", 1) for each in environment(parse_target(place.target)))
    told |= {
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_VMODULE": "subprocess_compilation=3",
    }  # ptxas' report
    chosen = [place.target, str(place.num_devices), *([model] if model else [])]
    command = [sys.executable, "-m", "tests.aot.steps", *chosen]
    done = subprocess.run(command, cwd=ROOT, env=kept | told, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling for {place.name} failed:\n{done.stderr[-4000:]}")
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    spilled = _spilled(done.stderr)
    return [each | {"spilled": spilled[each["name"]]} for each in found]


def _spilled(log: str) -> dict[str, dict[str, int]]:
    """By program and kernel on a GPU the bytes of registers that it puts into memory."""
    parts = re.split(r"^compiling (.*)$", log, flags=re.MULTILINE)
    kernel = re.compile(r"Function properties for (\S+)\s.*?(\d+) bytes spill stores", re.DOTALL)
    return {
        name: {found: int(num_bytes) for found, num_bytes in kernel.findall(text)}
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


@cache
def compile_everywhere() -> dict[Place, list[dict]]:
    """What `some` chooses, by place, as far as there are compilers; two processes at a time."""
    places = [place for place in PLACES if missing(place) is None]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(places, pool.map(compile_all, places), strict=True))


def attention_calls(each: dict) -> list[int | None]:
    """Of each call of an attention kernel in a program the VMEM that it may have."""
    return [limit for name, limit in each["kernels"] if "paged_attention" in name]


def missing(place: Place) -> str | None:
    return missing_compiler(parse_target(place.target).chip.platform)


def some(place: Place, names: list[str], whole: list[str]) -> Iterator[tuple[str, bool, str]]:
    """(model, with all layers, program): what is compiled if not all is. `whole`: the programs with all layers."""
    models = list(MODELS)
    for index, name in enumerate(names, start=PLACES.index(place)):
        if name in whole:
            yield place.whole, True, name
        elif place.every or name.split()[0] in ("admit", "sample"):
            yield models[index % len(models)], False, name


def main(target: str, num_devices: str, *models: str) -> None:
    (place,) = (p for p in PLACES if (p.target, p.num_devices) == (target, int(num_devices)))
    with tempfile.TemporaryDirectory() as folder:
        jobs = {model: _jobs(place, model, Path(folder)) for model in models or MODELS}
        if models:
            (model,) = models
            chosen = [(model, True, name) for name in jobs[model][True].lowerings.programs]
        else:
            job = jobs[place.whole][True]
            buckets = job.spec.buckets
            decode = [b.name for b in buckets if b.decode]
            whole = [decode[0], decode[-1], buckets[-1].name]
            chosen = some(place, list(job.lowerings.programs), whole)
        for model, is_whole, name in chosen:
            print(json.dumps(_compile(jobs[model][is_whole], model, name)), flush=True)


def _jobs(place: Place, model: str, folder: Path) -> dict[bool, CompileJob]:
    """By whether it has all layers. With few the pool has as many blocks."""
    from jaxpage.aot.worker import make_job

    path = folder / f"{model}.json"
    path.write_text(json.dumps(MODELS[model]))
    # Blocks move to and from host memory on one device only, as yet.
    options = {"model": str(path), "swap_space": 1.0 if place.num_devices == 1 else 0.0}
    where = parse_target(place.target), place.num_devices
    whole = make_job(options, *where)
    few = {
        "hf_overrides": {"num_hidden_layers": FEW},
        "num_gpu_blocks_override": whole.spec.pool.num_blocks,
    }
    return {True: whole, False: make_job(options | few, *where)}


def _compile(job: CompileJob, model: str, name: str) -> dict[str, Any]:
    from jaxpage.aot.worker import compile_and_inspect

    print(f"compiling {name}", file=sys.stderr, flush=True)
    spec = job.spec
    bucket = next((b for b in spec.buckets if b.name == name), None)
    num_bytes = [math.prod(s) * spec.pool.dtype.itemsize for s in job.pool_shapes]
    return compile_and_inspect(job, name) | {
        "model": model,
        "num_layers": spec.model.config.num_layers,
        "bucket": bucket and dataclasses.asdict(bucket),
        "max_num_seqs": spec.config.max_num_seqs,
        "num_programs": len(job.lowerings.programs),
        "state_bytes": job.lowerings.state_bytes,
        "pool_bytes": sum(num_bytes),
        "array_bytes": max(num_bytes),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
