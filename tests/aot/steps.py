"""The default step programs of three models.

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
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpage.aot.contents import copies_of_size, exchanges, kernel_calls
from jaxpage.aot.hlo import parse
from jaxpage.aot.targets import parse_target
from tests.aot import ptxas
from tests.aot.models import qwen2
from tests.aot.program import Program

if TYPE_CHECKING:
    import jax

    from jaxpage.aot.worker import CompileJob

FEW = 2  # layers


# Those of Qwen2.5, as their config.json has them.
MODELS = {
    "0.5B": qwen2(896, 4864, 14, 2, 24),
    "3B": qwen2(2048, 11008, 16, 2, 36),
    "7B": qwen2(3584, 18944, 28, 4, 28, vocab_size=152064, tie_word_embeddings=False),
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


PLACES = (
    Place("v5e:2x2", 4, "7B", every=False),
    Place("tpu7x:2x2x1", 1, "0.5B", every=False),  # v6e's, of a larger chip
    Place("v6e:2x2", 1, "0.5B"),
    Place("h200", 1, "7B"),
    Place("v6e:2x2", 4, "3B", every=False),
)


TARGETS = tuple(place.name for place in PLACES)


def environment(target: str) -> dict[str, str]:
    """That makes XLA tell what ptxas says."""
    return {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "subprocess_compilation=3"}


def place_of(target: str) -> Place:
    return PLACES[TARGETS.index(target)]


def some(place: Place, names: list[str], whole: list[str]) -> Iterator[tuple[str, bool, str]]:
    """(model, with all layers, program): what is compiled if not all is. `whole`: the programs with all layers."""
    models = list(MODELS)
    for index, name in enumerate(names, start=PLACES.index(place)):
        if name in whole:
            yield place.whole, True, name
        elif place.every or name.split()[0] in ("admit", "sample", "score", "vocabulary"):
            yield models[index % len(models)], False, name


def programs(target: str, *models: str) -> Iterator[Program]:
    """What `some` chooses; with a model's name all its programs with all layers."""
    place = place_of(target)
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
            job = jobs[model][is_whole]
            yield Program(
                name=name,
                lower=partial(lower, job, name),
                look=partial(look, job, model, name),
            )


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


def lower(job: CompileJob, name: str) -> jax.stages.Lowered:
    with job.spec.on_target():
        return job.lowerings.programs[name]()


def look(
    job: CompileJob, model: str, name: str, compiled: jax.stages.Compiled, log: str
) -> dict[str, Any]:
    spec = job.spec
    bucket = next((b for b in spec.buckets if b.name == name), None)
    num_bytes = [math.prod(s) * spec.pool.dtype.itemsize for s in job.pool_shapes]
    memory, contents = compiled.memory_analysis(), parse(compiled.as_text() or "")
    return {
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "exchanges": exchanges(contents),
        "pool_copies": list(copies_of_size(contents, job.pool_shapes)),
        "attention_calls": [
            vmem for call, vmem in kernel_calls(contents) if "paged_attention" in call
        ],
        "spilled": ptxas.spilled_by_kernel(log),
        "model": model,
        "num_layers": spec.model.config.num_layers,
        "bucket": bucket and dataclasses.asdict(bucket),
        "max_num_seqs": spec.config.max_num_seqs,
        "num_programs": len(job.lowerings.programs),
        "state_bytes": job.lowerings.state_bytes,
        "pool_bytes": sum(num_bytes),
        "array_bytes": max(num_bytes),
    }
