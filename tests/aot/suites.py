"""All suites: modules that know which programs are compiled for a target, and what is looked for in them.

Each has TARGETS, `programs(target)` and, where it needs more than `topology.environment`, `environment(target)`. What a
compiler is to dump goes to a temporary folder, with the variables of `dump_variables(folder)`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from jaxpage.aot.targets import Target, parse_target

# Largest first, for two processes at a time.
NAMES = (
    "steps",
    "meshes",
    "experts",
    "drafts",
    "heads",
    "gemma4",
    "recurrent",
    "latents",
    "quantised",
    "quant_matmul",
    "paged_attention_tpu",
    "paged_attention_gpu",
    "grouped_matmul",
    "matmul",
    "lora",
    "rope",
    "embedding",
    "delta_rule",
    "schedules",
    "vision",
    "pooling",
    "block_copy",
    "kv_write",
    "sampling",
)


def suite(name: str) -> ModuleType:
    return import_module(f"tests.aot.{name}")


def calls() -> list[tuple[str, str]]:
    """(suite, target) of everything that is compiled."""
    return [(name, target) for name in NAMES for target in suite(name).TARGETS]


def target_of(name: str) -> Target:
    """Of "v5e:2x2", and of a step's place, "v5e:2x2 TP 4". Raises ValueError."""
    return parse_target(name.split()[0])
