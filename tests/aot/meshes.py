"""A decode step and a prefill step of real shapes, of few layers, on many topologies.

Layers of a decoder are alike: what they exchange is known from two. The pool's arrays have the size that they have at
full depth. Of each case the largest steps are compiled.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpage.aot.contents import copies_of_size, exchanges, kernel_calls
from jaxpage.aot.hlo import parse
from jaxpage.aot.targets import parse_target
from tests.aot.models import MODELS
from tests.aot.program import Program, largest_steps

if TYPE_CHECKING:
    import jax

    from jaxpage.aot.worker import CompileJob

FEW = 2  # layers
INT8 = {"quantization": "int8", "kv_cache_dtype": "int8"}


@dataclass(frozen=True)
class Case:
    """A model on the first devices of a target."""

    target: str
    num_devices: int
    model: str  # of MODELS
    is_int8: bool = False  # weights and KV

    @property
    def name(self) -> str:
        return f"TP {self.num_devices} {self.model}{' int8' * self.is_int8}"


CASES = (
    Case("v5e:2x4", 8, "Llama-3.1-8B"),
    Case("v5e:2x4", 8, "Llama-3.1-8B", is_int8=True),
    Case("v5e:2x4", 4, "Qwen2.5-0.5B"),  # 14 query heads and 2 KV heads
    Case("v5e:2x4", 8, "Qwen2.5-0.5B"),
    Case("v5e:4x4", 16, "Llama-3.3-70B"),  # four hosts
    Case("v6e:2x4", 8, "Qwen2.5-32B"),
    Case("v6e:2x4", 4, "Phi-4"),  # 10 KV heads, with 4 query heads each
    Case("v5p:2x2x2", 8, "Llama-3.3-70B"),  # both cores of a chip are one device
    Case("tpu7x:2x2x1", 4, "Llama-3.1-8B"),  # each core of a chip is one
    Case("tpu7x:2x2x1", 8, "Qwen2.5-32B"),
    Case("h200:8", 4, "Llama-3.1-8B"),
    Case("h200:8", 4, "Llama-3.1-8B", is_int8=True),
    Case("h200:8", 8, "Llama-3.3-70B"),
    Case("h200:8", 8, "Llama-3.1-8B", is_int8=True),
)
TARGETS = tuple(dict.fromkeys(case.target for case in CASES))


def case_of(target: str, name: str) -> Case:
    """Of the name of a program."""
    found = [c for c in CASES if c.target == target and name.startswith(f"{c.name} ")]
    return max(found, key=lambda case: len(case.name))


def programs(target: str) -> Iterator[Program]:
    from jaxpage.aot import steps

    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if case.target == target:
                job = _job(case, Path(folder))
                yield from largest_steps(job, case.name, _look, steps)


def _job(case: Case, folder: Path) -> CompileJob:
    from jaxpage.aot.worker import make_job

    path = folder / f"{case.model}.json"
    path.write_text(json.dumps(MODELS[case.model]))
    options = {"model": str(path), "swap_space": 0.0, "max_model_len": 8192}
    options |= INT8 if case.is_int8 else {}
    where = parse_target(case.target), case.num_devices
    few = {
        "hf_overrides": {"num_hidden_layers": FEW},
        "num_gpu_blocks_override": make_job(options, *where).spec.pool.num_blocks,
    }
    return make_job(options | few, *where)


def _look(
    job: CompileJob, num_tokens: int, compiled: jax.stages.Compiled, log: str
) -> dict[str, Any]:
    from jaxpage.aot.steps import exchange_of, most_temp_bytes

    memory, contents = compiled.memory_analysis(), parse(compiled.as_text() or "")
    return {
        "num_tokens": num_tokens,
        "num_layers": job.spec.model.config.num_layers,
        "exchanges": exchanges(contents),
        "reckoned": exchange_of(job.spec),
        "attention_calls": sum("paged_attention" in call for call, _ in kernel_calls(contents)),
        "product_calls": sum("quant_matmul" in call for call, _ in kernel_calls(contents)),
        "pool_copies": list(copies_of_size(contents, job.pool_shapes)),
        "most_temp_bytes": most_temp_bytes(job.spec),
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "state_bytes": job.lowerings.state_bytes,
        "pool_bytes": job.spec.pool.num_blocks * job.spec.block_bytes,
    }
