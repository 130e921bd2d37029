"""`jaxpage compile`: executables of all programs of an engine, in a folder from which `LLM` starts without compiling.

Reads only config.json, no weights. Compiles for this machine's device, or for a target; then in a separate process
(`process.run("jaxpage.aot.compile", ...)`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jaxpage.aot.process import Report, run, serve
from jaxpage.aot.targets import Target, parse_target
from jaxpage.aot.topology import mesh_of, missing_compiler
from jaxpage.composition import executable_cache, size_from_cache, specs_of_this_machine
from jaxpage.config import EngineConfig
from jaxpage.engine_spec import EngineSpec, make_engine_spec
from jaxpage.environment import compiler_flags
from jaxpage.runner.memory import pool_bytes, pool_bytes_of
from jaxpage.runner.programs import compile_program
from jaxpage.runner.strict import GPU_FLAG

# Share of the pool that the data sheet would allow: a real device has slightly less memory, and an engine can use these
# executables only if their pool fits.
SAFE_SHARE = 0.97


def compile_for(options: dict[str, Any], output: Path, target: Target | None) -> int:
    """Write executables for `LLM(**options)` to the folder `output`, for `target` or this machine's device.

    Prints a line for each. Raises ValueError for options that cannot be served, for a target whose compiler is not
    installed or fails, and if the folder cannot be written.
    """
    _check_writable(output)
    if target is None:
        _compile(options, output, None, _print)
        return 0
    missing = missing_compiler(target.chip.platform)
    if missing:
        raise ValueError(f"{target.name}: {missing}")
    request = {"options": options, "output": str(output.absolute()), "target": target.name}
    run("jaxpage.aot.compile", request, target, on_report=lambda report: _print(report["line"]))
    return 0


def _check_writable(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise ValueError(f"{output} cannot be written: {error.strerror}") from None


def _print(line: str) -> None:
    print(line, flush=True)


def _compile(
    options: dict[str, Any], output: Path, target: Target | None, emit: Callable[[str], None]
) -> None:
    options = options | {"compilation_cache_dir": str(output)}
    for spec in _engine_specs(options, target):
        _compile_one(spec, target, emit)


def _compile_one(spec: EngineSpec, target: Target | None, emit: Callable[[str], None]) -> None:
    if spec.no_kernel_reason:
        emit(f"attention: {spec.attention}")
    for line in sorted(spec.transform_weights()):
        emit(line)
    flags = compiler_flags()
    if spec.device.platform == "gpu" and target is not None:
        # The engine that will load them has none of the flags that `topology.environment` sets, or only this one.
        flags = GPU_FLAG if spec.config.numerics == "strict" else ""
    cache = executable_cache(spec, flags=flags, devices=spec.devices if target is None else ())
    if cache.root is None:
        raise ValueError("with enforce_eager programs are compiled when they are first used")
    sized = size_from_cache(spec, cache, partial(_available, spec, target))
    store = cache.store(sized)
    assert store is not None
    lowerings = sized.lowerings()
    emit(f"{len(lowerings.programs)} programs for {sized.pool.num_blocks} KV blocks")
    for name, lowering in lowerings.programs.items():
        with sized.on_target():
            program = compile_program(name, lowering, store)
        emit(f"{name:<20} {program.seconds:>8.2f} s  {program.origin}")
    if lost := [name for name in lowerings.programs if not store.has(name)]:
        raise ValueError(
            f"{len(lost)} of {len(lowerings.programs)} programs could not be written to {store.folder}; the warnings "
            "say why"
        )
    emit(f"in {store.folder}")


def _engine_specs(options: dict[str, Any], target: Target | None) -> list[EngineSpec]:
    """The spec of each replica, because executables are for specific devices."""
    config = EngineConfig.from_options(**options)
    if target is None:
        return specs_of_this_machine(config)
    if config.data_parallel_size > 1:
        raise ValueError(
            f"data_parallel_size={config.data_parallel_size} is for devices of this machine; without it, the "
            f"executables for {target.name} are those of the first replica"
        )
    mesh, memory = mesh_of(target, config.tensor_parallel_size or 1), target.chip.num_bytes
    device = mesh.devices.flat[0]
    spec = make_engine_spec(config, device=device, device_memory=memory, mesh=mesh)
    return [spec]


def _available(spec: EngineSpec, target: Target | None, temp_bytes: int) -> int:
    """Bytes for the pool, as `LLM` will count them once the weights are loaded."""
    used = temp_bytes + sum(spec.weight_bytes.values())
    utilization, share = spec.config.gpu_memory_utilization, spec.config.cache_max_entry_count
    if target is None:
        return pool_bytes(
            spec.devices, utilization=utilization, temp_bytes=used, share_of_free=share
        )
    capacity = target.chip.num_bytes
    of_data_sheet = pool_bytes_of(capacity, used, utilization=utilization, share_of_free=share)
    return int(SAFE_SHARE * of_data_sheet)


def _work(request: dict[str, Any], report: Report) -> None:
    target = parse_target(request["target"])
    _compile(
        request["options"], Path(request["output"]), target, lambda line: report({"line": line})
    )


if __name__ == "__main__":
    serve(_work)
