"""`jaxpage compile`: all programs of an engine, kept in a folder from which `LLM` starts without compiling.

From config.json alone: no weights are read. For the device that is here, or for a target that is not; then in a process
of its own (`python -m jaxpage.aot.compile`, with the variables of `topology.environment`, from JSON).
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpage.aot.targets import Target, parse_target
from jaxpage.aot.topology import environment, mesh_of, missing_compiler
from jaxpage.build import (
    buckets_of,
    make_pool_spec,
    make_step_spec,
    program_facts,
    programs_folder,
    size_kv,
)
from jaxpage.config import EngineConfig, ResolvedConfig, compiler_flags, load_hf_config
from jaxpage.kv_groups import group_layers
from jaxpage.kv_pool import KVPoolSpec
from jaxpage.models import registry
from jaxpage.models.decoder import CausalLM
from jaxpage.ops.attention import choose
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.facts import machine_facts
from jaxpage.runner.lowering import Lowerings, num_bytes
from jaxpage.runner.memory import pool_bytes
from jaxpage.runner.program_store import ProgramStore, Sizes
from jaxpage.runner.programs import compile_program, step_bytes
from jaxpage.weights.spec import specs
from jaxpage.weights.transform import join_projections, quantize

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


@dataclass(frozen=True)
class _Engine:
    """What the programs of an engine are lowered from."""

    config: ResolvedConfig
    model: CausalLM  # of shapes
    pool: KVPoolSpec
    mesh: Mesh | None  # of the target; None: the device that is here

    def on_target(self) -> AbstractContextManager[Any]:
        """Where Pallas, which asks the mesh, lowers for the target; else it sees this machine."""
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def lowerings(self, num_blocks: int) -> Lowerings:
        config = self.config
        groups = group_layers(self.model.config.windows, config.max_model_len)
        return Lowerings(
            self.model,
            buckets=buckets_of(config),
            pool_spec=replace(self.pool, num_blocks=num_blocks),
            step_spec=make_step_spec(config, self.model.config, groups),
            moves_blocks=config.swap_space > 0,
            mesh=self.mesh,
        )


def _compile(options: dict[str, Any], output: Path, target: Target | None) -> None:
    mesh = None if target is None else mesh_of(target, 1)
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    engine = _prepare(options | {"compilation_cache_dir": str(output)}, device, target, mesh)
    config, model = engine.config, engine.model
    root = programs_folder(config)
    if root is None:
        raise ValueError("with enforce_eager programs are compiled when they are first used")
    # Those that `topology.environment` sets for a GPU are no reason to compile anew on that GPU.
    flags = "" if device.platform == "gpu" and target is not None else compiler_flags()
    machine = machine_facts(device, flags)
    sizes = Sizes(root, machine | program_facts(config, model, engine.pool))
    config = _sized(engine, device, target, sizes)
    engine = replace(engine, config=config)
    assert config.num_gpu_blocks_override is not None
    pool = replace(engine.pool, num_blocks=config.num_gpu_blocks_override)
    facts = machine | program_facts(config, model, pool)
    store = ProgramStore(root, facts, [device] if target is None else [])
    lowerings = engine.lowerings(pool.num_blocks)
    print(f"{len(lowerings.programs)} programs for {pool.num_blocks} KV blocks", flush=True)
    for name, lowering in lowerings.programs.items():
        with engine.on_target():
            program = compile_program(name, lowering, store)
        print(f"{name:<20} {program.seconds:>8.2f} s  {program.origin}", flush=True)
    print(f"in {store.folder}", flush=True)


def _prepare(
    options: dict[str, Any], device: jax.Device, target: Target | None, mesh: Mesh | None
) -> _Engine:
    if target is None:
        memory = (device.memory_stats() or {}).get("bytes_limit")
    else:
        memory = target.chip.num_bytes
    hf_config = load_hf_config(options["model"], options.get("hf_overrides"))
    config = EngineConfig.from_options(**options).resolve(
        hf_config,
        platform=device.platform,
        device_kind=device.device_kind,
        device_memory=memory,
    )
    model = registry.build(hf_config, dtype=config.dtype, max_model_len=config.max_model_len)
    join_projections(model)
    if config.quantization == "int8":
        quantize(model, platform=device.platform)
    groups = group_layers(model.config.windows, config.max_model_len)
    pool, _ = choose(
        make_pool_spec(config, model.config, groups, device.platform),
        platform=device.platform,
        num_devices=1,
        table=(config.max_num_seqs, -(-config.max_model_len // config.block_size)),
        num_heads=model.config.num_heads,
        device_kind=device.device_kind,
        compute_capability=getattr(device, "compute_capability", None),  # of GPUs
    )
    return _Engine(config, model, pool, mesh)


def _sized(
    engine: _Engine, device: jax.Device, target: Target | None, sizes: Sizes
) -> ResolvedConfig:
    """The config with its KV blocks counted, as `LLM` will count them once the weights are there."""
    config = engine.config
    weights = sum(
        num_bytes(jax.ShapeDtypeStruct(s.shape, s.dtype)) for s in specs(engine.model).values()
    )

    def available(temp_bytes: int) -> int:
        if target is None:
            return pool_bytes(
                (device,),
                utilization=config.gpu_memory_utilization,
                temp_bytes=temp_bytes + weights,
                share_of_free=config.cache_max_entry_count,
            )
        limit = target.chip.num_bytes
        if config.cache_max_entry_count is not None:
            free = config.cache_max_entry_count * (limit - weights - temp_bytes)
        else:
            free = limit * config.gpu_memory_utilization - weights - temp_bytes
        return int(SAFE_SHARE * free)

    def temp_bytes(bucket: Bucket) -> int:
        lowerings = engine.lowerings(2)  # the pool's size does not matter to the temporaries
        with engine.on_target():
            programs = [
                compile_program(name, lowerings.programs[name])
                for name in bucket.programs(bucket.num_rows)
            ]
        return lowerings.state_bytes + step_bytes(programs)

    windows = group_layers(engine.model.config.windows, config.max_model_len).windows
    return size_kv(config, engine.pool, windows, available, temp_bytes, sizes)


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
