"""Steps with the quantised weights of a checkpoint: a decode step and a chunk of prompts, with two layers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpage.aot.contents import kernel_calls
from jaxpage.aot.hlo import parse
from jaxpage.aot.targets import parse_target
from tests.aot.models import qwen2
from tests.aot.program import Program
from tests.aot.steps import FEW, MODELS, environment, look, lower

if TYPE_CHECKING:
    import jax

    from jaxpage.aot.worker import CompileJob

__all__ = ["TARGETS", "environment", "programs"]

# As in the config.json of Qwen2.5-AWQ and of Qwen3-FP8.
METHODS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
SHAPES = {
    1: MODELS["7B"],
    4: qwen2(5120, 27648, 40, 8, 64, vocab_size=152064, tie_word_embeddings=False),  # the 32B
}
ROWS = 64


@dataclass(frozen=True)
class Place:
    """Where programs run, and how their weights are quantised."""

    target: str
    num_devices: int
    method: str

    @property
    def name(self) -> str:
        return f"{self.target} TP {self.num_devices} {self.method}"

    @property
    def model(self) -> dict[str, Any]:
        """Its config.json."""
        return SHAPES[self.num_devices] | {"quantization_config": METHODS[self.method]}


PLACES = (
    Place("v6e:2x2", 1, "awq"),
    Place("v6e:2x2", 1, "fp8"),
    Place("v6e:2x2", 4, "awq"),
    Place("v6e:2x2", 4, "fp8"),
    Place("h200", 1, "awq"),
    Place("h200", 1, "fp8"),
)
TARGETS = tuple(place.name for place in PLACES)


def programs(target: str) -> Iterator[Program]:
    """The decode step of `ROWS` rows, and the step with most tokens."""
    from jaxpage.aot.worker import make_job

    place = PLACES[TARGETS.index(target)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(place.model))
        options = {"model": str(path), "hf_overrides": {"num_hidden_layers": FEW}}
        job = make_job(options, parse_target(place.target), place.num_devices)
        for name in (f"decode R={ROWS}", job.spec.buckets[-1].name):
            yield Program(
                name=name, lower=partial(lower, job, name), look=partial(look_at, job, name)
            )


def look_at(job: CompileJob, name: str, compiled: jax.stages.Compiled, log: str) -> dict[str, Any]:
    calls = [call for call, _ in kernel_calls(parse(compiled.as_text() or ""))]
    return look(job, "", name, compiled, log) | {
        "products": sum("quant_matmul" in call for call in calls),
        "weight_bytes": sum(job.spec.weight_bytes.values()),
    }
