"""The kernels of the gated delta rule and of Mamba-2 for the states of models, and of what is odd."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from jaxpage.aot.contents import copies_of_size, kernel_calls
from jaxpage.aot.hlo import parse
from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import mesh_of
from pallas_kernels.delta_rule.cases import Case
from pallas_kernels.delta_rule.reference import Parts, Rows, Tokens
from pallas_kernels.tile_sizes import kernel_of
from tests.aot import compiling, ptxas
from tests.aot.program import Program
from tests.aot.shapes import spec

TARGETS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1", "h200")
environment = compiling.ptxas_environment

CALLS = (
    Case(name="qwen3.5-0.8b", rows=64, most=64, num_slots=65, keys=16, values=1),
    Case(name="qwen3.5-4b", rows=128, most=128, num_slots=129, keys=16, values=2),
    Case(name="qwen3.5-4b-one-row", rows=1, most=1, num_slots=129, keys=16, values=2),
    Case(name="qwen3.5-27b-of-tp4", rows=64, most=64, num_slots=65, keys=4, values=3),
    Case(name="one-key-of-tp16", rows=64, most=64, num_slots=65, keys=1, values=2),
    Case(name="narrow-keys", rows=8, most=8, num_slots=9, keys=5, values=1, key_dim=64),
    Case(name="wide-values", rows=8, most=8, num_slots=9, keys=3, values=1, value_dim=256),
)

# (windows, slots, keys, values of each, value dim), windows of 64 tokens.
WINDOWS = {
    "windows-qwen3.5-0.8b": (32, 65, 16, 1, 128),
    "windows-qwen3.5-4b": (32, 129, 16, 2, 128),
    "windows-qwen3.5-4b-one": (1, 129, 16, 2, 128),
    "windows-qwen3.5-27b-of-tp4": (32, 65, 4, 3, 128),
    "windows-one-key-of-tp16": (32, 65, 1, 2, 128),
    "windows-wide-values": (4, 9, 3, 1, 256),
}
# Rows, key heads, heads of each, key dim, value dim of Mamba-2.
MAMBA2 = {
    "granite-4-h-micro": (64, 1, 48, 128, 64),
    "granite-4-h-small": (64, 1, 128, 128, 64),
    "nemotron-h-8b": (64, 8, 16, 128, 64),
}
NAMES = (*(case.name for case in CALLS), *WINDOWS)
NAMES += tuple(name for each in MAMBA2 for name in (each, f"windows-{each}"))
# Of a GPU, whose kernels are for rows of one token.
CALLS_OF_GPU = (
    *(case for case in CALLS if case.name != "narrow-keys"),
    Case(name="qwen3-next", rows=256, most=256, num_slots=257, keys=16, values=2),
    Case(name="qwen3.5-35b-of-tp4", rows=64, most=64, num_slots=65, keys=4, values=2),
    Case(name="narrow", rows=8, most=8, num_slots=9, keys=5, values=1, key_dim=64, value_dim=64),
    Case(name="wide-keys", rows=8, most=8, num_slots=9, keys=3, values=1, key_dim=256),
)
MAMBA2_OF_GPU = MAMBA2 | {
    "nemotron-3-nano": (256, 8, 8, 128, 64),
    "nemotron-3-nano-of-tp4": (64, 2, 8, 128, 64),
    "wide-state": (8, 2, 3, 256, 64),
}
NAMES_OF_GPU = (*(case.name for case in CALLS_OF_GPU), *MAMBA2_OF_GPU)


def programs(target: str) -> Iterator[Program]:
    if parse_target(target).chip.platform == "gpu":
        yield from _programs_of_gpu(target)
    else:
        yield from _programs_of_tpu(target)


def _programs_of_gpu(target: str) -> Iterator[Program]:
    import jax

    found = [(case.name, partial(_lower, case), _states(case)) for case in CALLS_OF_GPU]
    for name, (rows, keys, values, key_dim, value_dim) in MAMBA2_OF_GPU.items():
        states = (rows + 1, keys, key_dim, values * value_dim)
        found.append((name, partial(_lower_mamba2, values, states), states))
    with jax.set_mesh(mesh_of(parse_target(target), 1)):
        for name, lower, states in found:
            yield Program(
                name=name,
                lower=partial(lower, platform="gpu"),
                look=partial(_look_on_gpu, states),
                observers=(sys.modules[__name__],),
            )


def _programs_of_tpu(target: str) -> Iterator[Program]:
    import jax

    with jax.set_mesh(mesh_of(parse_target(target), 1)):  # Pallas asks it for which chip to lower
        for case in CALLS:
            yield Program(
                name=case.name,
                lower=partial(_lower, case),
                look=partial(_look, _states(case)),
                observers=(sys.modules[__name__],),
            )
        for name, (num_windows, num_slots, keys, values, value_dim) in WINDOWS.items():
            states = (num_slots, keys, values, 128, value_dim)
            yield Program(
                name=name,
                lower=partial(_lower_windows, num_windows, states),
                look=partial(_look, states),
                observers=(sys.modules[__name__],),
            )
        for name, (rows, keys, values, key_dim, value_dim) in MAMBA2.items():
            states = (rows + 1, keys, key_dim, values * value_dim)
            for lower, kind in ((_lower_mamba2, name), (_lower_mamba2_windows, f"windows-{name}")):
                yield Program(
                    name=kind,
                    lower=partial(lower, values, states),
                    look=partial(_look, states),
                    observers=(sys.modules[__name__],),
                )


def _states(case: Case) -> tuple[int, ...]:
    return (case.num_slots, case.keys, case.values, case.key_dim, case.value_dim)


def _lower(case: Case, platform: str = "tpu") -> Any:
    import jax

    one_token = kernel_of("delta_rule", platform).one_token
    heads = (case.most, case.keys, case.values)
    keys, gates = spec((*heads[:2], case.key_dim), "float32"), spec(heads, "float32")
    tokens = Tokens(keys, keys, spec((*heads, case.value_dim), "float32"), gates, gates)
    rows = Rows(spec((case.most,), "int32"), spec((case.most,), "bool"), tokens)
    states = spec(_states(case), "float32")
    return jax.jit(one_token, donate_argnums=0).lower(states, rows, spec((), "int32"))


def _lower_windows(num_windows: int, states: tuple[int, ...]) -> Any:
    import jax

    from pallas_kernels.delta_rule.tpu_windows import by_windows

    _, num_keys, num_values, key_dim, value_dim = states
    heads = (num_windows, 64, num_keys)
    keys, gates = spec((*heads, key_dim), "float32"), spec((*heads, num_values), "float32")
    windows = Tokens(keys, keys, spec((*heads, num_values, value_dim), "float32"), gates, gates)
    index, flag = spec((num_windows + 8,), "int32"), spec((num_windows + 8,), "bool")
    parts = Parts(*[index] * 5, flag, flag)
    arguments = (spec(states, "float32"), windows, parts, spec((), "int32"))
    return jax.jit(by_windows, donate_argnums=0).lower(*arguments)


def _lower_mamba2(num_values: int, states: tuple[int, ...], platform: str = "tpu") -> Any:
    import jax

    from pallas_kernels.mamba2.reference import Tokens

    one_token = kernel_of("mamba2", platform).one_token
    num_slots, num_keys, key_dim, num_columns = states
    heads = (num_slots - 1, num_keys)
    keys, values = spec((*heads, key_dim), "float32"), spec((*heads, num_columns), "float32")
    tokens = Tokens(keys, keys, values, spec((*heads, num_values), "float32"))
    rows = Rows(spec(heads[:1], "int32"), spec(heads[:1], "bool"), tokens)
    arguments = (spec(states, "float32"), rows, spec((), "int32"))
    return jax.jit(one_token, donate_argnums=0).lower(*arguments)


def _lower_mamba2_windows(num_values: int, states: tuple[int, ...]) -> Any:
    import jax

    from pallas_kernels.mamba2.reference import Tokens
    from pallas_kernels.mamba2.tpu_windows import by_windows

    _, num_keys, key_dim, num_columns = states
    heads, num_parts = (32, 64, num_keys), 40
    keys, values = spec((*heads, key_dim), "float32"), spec((*heads, num_columns), "float32")
    windows = Tokens(keys, keys, values, spec((*heads, num_values), "float32"))
    index, flag = spec((num_parts,), "int32"), spec((num_parts,), "bool")
    parts = Parts(*[index] * 5, flag, flag)
    arguments = (spec(states, "float32"), windows, parts, spec((), "int32"))
    return jax.jit(by_windows, donate_argnums=0).lower(*arguments)


def _look(states: tuple[int, ...], compiled: Any, log: str) -> dict[str, Any]:
    contents = parse(compiled.as_text() or "")
    return {
        "kernel_calls": len(kernel_calls(contents)),
        "copies": list(copies_of_size(contents, [states])),
    }


def _look_on_gpu(states: tuple[int, ...], compiled: Any, log: str) -> dict[str, Any]:
    memory = compiled.memory_analysis()
    return _look(states, compiled, log) | {
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "ptxas": ptxas.report(log),
    }
