"""`jaxpage compile`: all programs of an engine, kept in a folder from which `LLM` starts without compiling.

From config.json alone: no weights are read. For the device that is here, or for a target that is not; then in a process
of its own (`python -m jaxpage.aot.compile`, with the variables of `topology.environment`, from JSON).
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxpage.aot.targets import Target, parse_target
from jaxpage.aot.topology import environment, mesh_of, missing_compiler
from jaxpage.build import programs_folder, size_kv
from jaxpage.config import EngineConfig, compiler_flags
from jaxpage.engine_spec import EngineSpec, make_engine_spec
from jaxpage.runner.facts import machine_facts
from jaxpage.runner.lowering import num_bytes
from jaxpage.runner.memory import pool_bytes
from jaxpage.runner.program_store import MeasuredSizes, ProgramStore
from jaxpage.runner.programs import compile_program
from jaxpage.weights.spec import specs

# Of what a pool could have on a target: a device that is there has a little less for it than its data sheet, and a
# start takes these programs only if their pool fits.
SAFE_SHARE = 0.97


def compile_for(options: dict[str, Any], output: Path, target: Target | None) -> int:
    """Fill the folder `output` with the programs of `LLM(**options)`, for `target` or the device that is here.

    Prints a line for each. Raises ValueError for options that cannot be served, and for a target whose compiler is
    not installed.
    """
    if target is None:
        _compile(options, output, None)
        return 0
    missing = missing_compiler(target.chip.platform)
    if missing:
        raise ValueError(f"{target.name}: {missing}")
    request = {"options": options, "output": str(output.absolute()), "target": target.name}
    done = subprocess.run(
        ["env", *environment(target), sys.executable, "-m", "jaxpage.aot.compile"],
        input=json.dumps(request),
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode == 2:
        raise ValueError(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise ValueError(f"compiling for {target.name} failed: {done.stderr.strip()[-2000:]}")
    return 0


def _compile(options: dict[str, Any], output: Path, target: Target | None) -> None:
    draft = _draft(options | {"compilation_cache_dir": str(output)}, target)
    root = programs_folder(draft.config)
    if root is None:
        raise ValueError("with enforce_eager programs are compiled when they are first used")
    # Those that `topology.environment` sets for a GPU are no reason to compile anew on that GPU.
    flags = "" if draft.device.platform == "gpu" and target is not None else compiler_flags()
    machine = machine_facts(draft.device, flags)
    sizes = MeasuredSizes(root, machine | draft.facts(0))
    draft, num_blocks = size_kv(draft, partial(_available, draft, target), sizes)
    facts = machine | draft.facts(num_blocks)
    store = ProgramStore(root, facts, [draft.device] if target is None else [])
    lowerings = draft.lowerings(num_blocks)
    print(f"{len(lowerings.programs)} programs for {num_blocks} KV blocks", flush=True)
    for name, lowering in lowerings.programs.items():
        with draft.on_target():
            program = compile_program(name, lowering, store)
        print(f"{name:<20} {program.seconds:>8.2f} s  {program.origin}", flush=True)
    print(f"in {store.folder}", flush=True)


def _draft(options: dict[str, Any], target: Target | None) -> EngineSpec:
    mesh = None if target is None else mesh_of(target, 1)
    if target is None or mesh is None:
        device, memory = jax.local_devices()[0], None
    else:
        device, memory = mesh.devices.flat[0], target.chip.num_bytes
    engine = EngineConfig.from_options(**options)
    draft = make_engine_spec(engine, device=device, device_memory=memory, mesh=mesh)
    if draft.no_kernel_reason:
        print(f"attention runs in plain XLA: {draft.no_kernel_reason}")
    for reason in draft.transform_weights():
        print(f"products of int8 run in plain XLA: {reason}")
    return draft


def _available(draft: EngineSpec, target: Target | None, temp_bytes: int) -> int:
    """Bytes for the pool, as `LLM` will count them once the weights are there."""
    config = draft.config
    used = temp_bytes + sum(
        num_bytes(jax.ShapeDtypeStruct(s.shape, s.dtype)) for s in specs(draft.model).values()
    )
    if target is None:
        return pool_bytes(
            (draft.device,),
            utilization=config.gpu_memory_utilization,
            temp_bytes=used,
            share_of_free=config.cache_max_entry_count,
        )
    limit = target.chip.num_bytes
    if config.cache_max_entry_count is not None:
        return int(SAFE_SHARE * config.cache_max_entry_count * (limit - used))
    return int(SAFE_SHARE * (limit * config.gpu_memory_utilization - used))


def _main() -> int:
    request = json.load(sys.stdin)
    try:
        _compile(request["options"], Path(request["output"]), parse_target(request["target"]))
    except ValueError as error:  # the user's
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(_main())
