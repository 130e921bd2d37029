"""Decode and prefill steps of models with experts at their real sizes, of few layers.

The pool's arrays have the size that they have at full depth. Of each case the largest steps are compiled.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpage.aot import experts as aot_experts
from jaxpage.aot.contents import copies_of_size, exchanges, kernel_calls
from jaxpage.aot.hlo import parse
from jaxpage.aot.targets import parse_target
from tests.aot.models import EXPERTS
from tests.aot.program import Program, largest_steps
from tests.aot.quantised import METHODS

if TYPE_CHECKING:
    import jax

    from jaxpage.aot.worker import CompileJob

FEW = 2  # layers


@dataclass(frozen=True)
class Case:
    """A model on the first devices of a target."""

    target: str
    num_devices: int
    model: str  # of EXPERTS
    quantization: str | None = None  # "int8", or of the checkpoint: one of METHODS

    @property
    def name(self) -> str:
        name = f"TP {self.num_devices} {self.model}"
        return f"{self.quantization} {name}" if self.quantization else name


CASES = (
    Case("v5e:2x4", 8, "Qwen3-30B-A3B"),
    Case("v6e:2x2", 4, "Qwen3-30B-A3B"),
    Case("v6e:2x2", 4, "gpt-oss-20b"),
    Case("v6e:2x2", 4, "Qwen3-30B-A3B", "fp8"),
    Case("tpu7x:2x2x1", 1, "Qwen3-30B-A3B"),
    Case("h200", 1, "Qwen3-30B-A3B"),
    Case("h200", 1, "gpt-oss-20b"),
    Case("h200", 1, "Qwen3-30B-A3B", "int8"),
    Case("h200", 1, "Qwen3-30B-A3B", "awq"),
)
TARGETS = tuple(dict.fromkeys(case.target for case in CASES))


def case_of(target: str, name: str) -> Case:
    """Of the name of a program."""
    (found,) = (c for c in CASES if c.target == target and name.startswith(f"{c.name} "))
    return found


def programs(target: str) -> Iterator[Program]:
    from jaxpage.aot import steps

    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if case.target == target:
                job = _job(case, Path(folder))
                yield from largest_steps(job, case.name, _look, steps, aot_experts)


def _job(case: Case, folder: Path) -> CompileJob:
    from jaxpage.aot.worker import make_job

    path = folder / f"{case.name}.json"
    model = dict(EXPERTS[case.model])
    if case.quantization in METHODS:
        model["quantization_config"] = METHODS[case.quantization]
    path.write_text(json.dumps(model))
    options = {"model": str(path), "swap_space": 0.0, "max_model_len": 8192}
    options["quantization"] = case.quantization
    where = parse_target(case.target), case.num_devices
    few = {
        "hf_overrides": {"num_hidden_layers": FEW, "layer_types": None},
        "num_gpu_blocks_override": make_job(options, *where).spec.pool.num_blocks,
    }
    return make_job(options | few, *where)


def _look(
    job: CompileJob, num_tokens: int, compiled: jax.stages.Compiled, log: str
) -> dict[str, Any]:
    from jaxpage.aot.steps import exchange_of, most_temp_bytes
    from jaxpage.weights.spec import specs

    memory, spec = compiled.memory_analysis(), job.spec
    contents = parse(compiled.as_text() or "")
    shares = {
        each.sharding(spec.mesh).shard_shape(each.shape)
        for path, each in specs(spec.model).items()
        if path.endswith(("experts.gate_up_proj", "experts.down_proj"))
    }
    scales = {
        each.sharding(spec.mesh).shard_shape(each.shape)
        for path, each in specs(spec.model).items()
        if ".experts." in path and path.endswith(("_scale", "_zero")) and len(each.shape) == 3
    }
    calls = [name for name, _ in kernel_calls(contents)]
    return {
        "num_tokens": num_tokens,
        "num_layers": spec.model.config.num_layers,
        "experts_of_a_device": min(shape[0] for shape in shares),
        "weight_copies": list(copies_of_size(contents, shares)),
        # In which the groups are rearranged, or taken from among others.
        "scale_copies": [
            each.line.strip()[:200]
            for each in contents
            if each.opcode in ("copy", "transpose", "slice")
            for array in each.arrays
            if any(array.shape[::2] == scale[::2] for scale in scales)
        ],
        "exchanges": exchanges(contents),
        "reckoned": [*exchange_of(spec), *aot_experts.exchange_of_experts(spec)],
        "kernel_calls": len(calls),
        "attention_calls": sum("paged_attention" in name for name in calls),
        "pool_copies": list(copies_of_size(contents, job.pool_shapes)),
        "most_temp_bytes": most_temp_bytes(spec) + aot_experts.temp_bytes_of_experts(spec),
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "bytes_of_experts": sum(
            size for path, size in spec.weight_bytes.items() if ".experts." in path
        ),
        "state_bytes": job.lowerings.state_bytes,
        "pool_bytes": spec.pool.num_blocks * spec.block_bytes,
    }
