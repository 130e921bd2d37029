"""Compiles a model's largest steps for a target and reports what they need: `process.run("jaxpage.aot.worker", ...)`.

It returns measurements; `estimate` draws conclusions from them.

Compiling a decode program mostly means compiling its sampler, which `sample` programs contain too. So `measure`
compiles the layers of the largest decode step and the sampler separately. The step runs one after the other, so it
needs at most the sum of their temporaries.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxpage.aot.contents import copies_of_size, exchanges, kernel_calls
from jaxpage.aot.hlo import Program, parse
from jaxpage.aot.model_numbers import (
    forward_of_drafts,
    numbers_of_drafts,
    numbers_of_model,
    temp_bytes_at_most,
)
from jaxpage.aot.pictures import numbers_of_encoder, temp_bytes_of_encoder
from jaxpage.aot.process import Report, serve
from jaxpage.aot.program_time import time_of
from jaxpage.aot.targets import Target, parse_target
from jaxpage.aot.topology import mesh_of
from jaxpage.composition import executable_cache, size
from jaxpage.config import EngineConfig, ResolvedConfig
from jaxpage.engine_spec import EngineSpec, make_engine_spec
from jaxpage.environment import compiler_flags
from jaxpage.ops.attention import max_blocks
from jaxpage.parallel.sharding import sharding
from jaxpage.runner.lowering import Lowerings
from jaxpage.runner.memory import SMALLEST_BUDGET, pool_bytes_of
from jaxpage.runner.programs import Lowering, compile_program, num_cores, step_bytes

LENGTHS = (1024, 8192, 32768)  # sequence lengths for which the largest batch is computed


@dataclass(frozen=True, kw_only=True)
class CompileJob:
    """A sized engine on a target; nothing is compiled yet. dumped: where the compiler writes schedules, or None."""

    spec: EngineSpec
    target: Target
    dumped: Path | None = None

    @property
    def pool_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the pools' arrays on one device."""
        return [
            sharding(self.spec.mesh, pool.axes_of(x)).shard_shape(x.shape)
            for pool in self.spec.pools
            for x in jax.tree.leaves(pool.abstract())
        ]

    @cached_property
    def lowerings(self) -> Lowerings:
        return self.spec.lowerings()


def make_job(
    options: dict[str, Any], target: Target, num_devices: int, dumped: Path | None = None
) -> CompileJob:
    """`options`: those of EngineConfig. Raises ValueError.

    Without `num_gpu_blocks_override` the pool gets half of the memory that the weights leave, so that a copy of it
    would show in the temporaries.
    """
    spec = _transformed_spec(options, target, num_devices)
    num_blocks = spec.config.num_gpu_blocks_override
    if num_blocks is None:
        half = _pool_bytes(spec, target, 0) // 2
        num_blocks = max(2, min(half // spec.block_bytes, *map(max_blocks, spec.pools)))
    return CompileJob(spec=spec.with_blocks(num_blocks), target=target, dumped=dumped)


def _transformed_spec(options: dict[str, Any], target: Target, num_devices: int) -> EngineSpec:
    mesh = mesh_of(target, num_devices)
    spec = make_engine_spec(
        EngineConfig.from_options(**options),
        device=mesh.devices.flat[0],
        device_memory=target.chip.num_bytes,
        mesh=mesh,
    )
    spec.transform_weights()
    return spec


def measure(
    options: dict[str, Any],
    target: Target,
    num_devices: int,
    report: Report = lambda _: None,
    *,
    compiles: bool = True,
    dumped: Path | None = None,
) -> dict[str, Any]:
    """Everything that an estimate needs. Bytes and rates are those of one device. Raises ValueError.

    `report` gets {"compiling": names}, and {"compiled": name, "seconds": s} after each. Results are cached on disk.
    Without `compiles` the temporaries are an empirical upper bound, and there are no programs.
    """
    job = make_job(options, target, num_devices, dumped)
    spec = job.spec
    config = spec.config
    # If the weights alone do not fit, there is nothing to compile.
    fits = _pool_bytes(spec, target, 0) > 0
    state_bytes = job.lowerings.state_bytes
    encoder = numbers_of_encoder(spec)
    programs: list[dict[str, Any]] = []
    temp_bytes = 0
    if fits and compiles:
        programs = _cached_or_measured(job, partial(_compile_largest, job, report))
        # A smaller `forward` needs no more than the largest.
        others = [each for each in programs[3:] if not each["name"].startswith("forward")]
        temp_bytes = largest_step_bytes(programs[:3] + others, config.decode_steps)
    elif fits:
        temp_bytes = _temp_bytes_at_most(spec, encoder)
    sized = size(
        spec,
        available=partial(_pool_bytes, spec, target),
        step_memory=lambda _: state_bytes + temp_bytes,
        must_fit=False,
    )
    lengths = sorted({n for n in LENGTHS if n < config.max_model_len} | {config.max_model_len})
    return {
        "target": target.name,
        "num_devices": num_devices,
        "target_devices": target.num_devices,
        "config": _options_shown(config),
        "chip": dataclasses.asdict(target.chip),
        "num_chips": target.num_chips,
        "links": dataclasses.asdict(target.links(num_devices)),
        **numbers_of_model(spec),
        "drafts": numbers_of_drafts(spec),
        "weight_bytes": sum(spec.weight_bytes.values()),
        "encoder": encoder,
        "state_bytes": state_bytes,
        "temp_bytes": temp_bytes,
        "block_bytes": spec.block_bytes,
        "num_blocks": sized.pool.num_blocks,  # the null block included
        "pool_bytes": spec.pool.num_blocks * spec.block_bytes,  # as compiled
        # Of a sequence of so many tokens: at most, and while it decodes.
        "blocks": {str(n): _blocks(spec, n) for n in lengths},
        "smaller_steps": smaller_steps(spec, temp_bytes, encoder),
        "longest": [[n, spec.footprint.num_blocks(n)] for n in _shorter(config.max_model_len)],
        "programs": programs,
        "attention": _attention(job, programs),
        "in_int8": _in_int8(job, options),
    }


def compile_and_inspect(
    job: CompileJob, name: str, lowering: Lowering | None = None
) -> dict[str, Any]:
    """The compiler's report on a program; if it exceeds a device's memory, all of that memory as its temporaries.

    `lowering`: for a program that is not one of the engine's own.
    """
    found = {"name": name, "temp_bytes": job.target.chip.num_bytes, "result_bytes": 0}
    found |= {"alias_bytes": 0, "exchanges": [], "pool_copies": [], "kernels": []}
    start = time.perf_counter()
    try:
        with job.spec.on_target():
            program = compile_program(name, lowering or job.lowerings.programs[name])
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return found | {"seconds": time.perf_counter() - start}
    contents = parse(program.compiled.as_text() or "")
    return found | {
        "seconds": program.seconds,
        "temp_bytes": program.temp_bytes,
        "result_bytes": program.result_bytes,
        "alias_bytes": program.alias_bytes,
        "exchanges": exchanges(contents),
        "pool_copies": list(copies_of_size(contents, job.pool_shapes)),
        "kernels": kernel_calls(contents),
        **_time(job, name, contents),
    }


def _time(job: CompileJob, name: str, program: Program) -> dict[str, Any]:
    """Empty for a TPU whose schedules are not dumped. All drafts are made, and all are right."""
    if job.target.chip.platform == "tpu" and job.dumped is None:
        return {}
    num_drafts = job.spec.config.num_drafts
    turns = {"draft": num_drafts, "verify": 1 + num_drafts}.get(name.split()[0], 1)
    return {"time": time_of(program, job.target.chip, job.dumped, turns=turns)}


def _compile_largest(job: CompileJob, report: Report) -> list[dict[str, Any]]:
    """The layers of the largest decode step, and the largest `forward` and `sample` programs. If there are any, the
    largest `draft` and `verify` programs and the largest encoder, and the `forward` of the largest step with drafts.
    """
    buckets = job.spec.buckets
    decode = [bucket for bucket in buckets if bucket.decode][-1]
    layers = f"layers R={decode.num_rows}"
    forward, sample = buckets[-1].programs(buckets[-1].num_rows)
    lowerings = job.lowerings.programs | {layers: partial(job.lowerings.layers_of, decode)}
    others = tuple(name for names in job.lowerings.of_features for name in names[-1:])
    if job.spec.config.num_drafts and (checked := forward_of_drafts(job.spec)) != forward:
        others += (checked,)
    # The longest compilation first: there may be fewer threads than programs.
    order = (forward, sample, layers, *others)
    report({"compiling": order})

    def compile_one(name: str) -> dict[str, Any]:
        found = compile_and_inspect(job, name, lowerings[name])
        report({"compiled": name, "seconds": found["seconds"]})
        return found

    with ThreadPoolExecutor(min(num_cores(), len(order))) as pool:
        found = dict(zip(order, pool.map(compile_one, order), strict=True))
    return [found[name] for name in (layers, forward, sample, *others)]


class Memory(NamedTuple):
    """What a program needs on a device."""

    temp_bytes: int
    result_bytes: int


def largest_step_bytes(programs: list[dict[str, Any]], decode_steps: int) -> int:
    """Upper bound of what a step, or a launch of `decode_steps` decode steps, needs besides weights, state and pool.

    `programs`: the layers of a decode step, forward, sample, and those that only some engines have; or none: 0 bytes.
    """
    if not programs:
        return 0
    layers, forward, sample, *others = (
        Memory(p["temp_bytes"], p["result_bytes"]) for p in programs
    )
    decode = Memory(layers.temp_bytes + sample.temp_bytes, decode_steps * sample.result_bytes)
    return max(step_bytes([decode]), step_bytes([forward, sample, *others]))


def _cached_or_measured(
    job: CompileJob, compile_all: Callable[[], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """What was measured before for an equal engine, target, compiler and source; otherwise measured now and cached."""
    spec = job.spec
    folder = spec.config.compilation_cache_dir
    if not folder:
        return compile_all()
    # The folder differs each time, but does not affect the results.
    flags = compiler_flags().replace(str(job.dumped), "") if job.dumped else compiler_flags()
    machine = executable_cache(spec, flags=flags).machine
    question = {
        "target": job.target.name,
        "devices": str(spec.num_devices),
        "steps planned": repr(spec.buckets),
    }
    key = machine | spec.fingerprint() | question
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    path = Path(folder, "plans", f"{name}.json")
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        programs = compile_all()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(programs, file)
        os.replace(file.name, path)
    except OSError:
        pass  # the next call measures again
    return programs


def _attention(job: CompileJob, programs: list[dict[str, Any]]) -> str:
    """ "kernel" if the steps call it, else what is plain XLA, and the reason."""
    if job.spec.no_kernel_reason:
        return job.spec.attention
    names = (name for each in programs for name, _ in each["kernels"])
    return "kernel" if any("paged_attention" in name for name in names) else "plain XLA"


def _in_int8(job: CompileJob, options: dict[str, Any]) -> dict[str, int | None]:
    """Bytes of weights and of a KV block in int8, those of a draft model too; None where the model's are quantised
    already, or cannot be.
    """
    spec, weights, block = job.spec, None, None
    if spec.config.quantization in (None, "dequantize"):
        rounded = _transformed_spec(
            options | {"quantization": "int8"}, job.target, spec.num_devices
        )
        weights = sum(rounded.weight_bytes.values())
    if spec.pool.format is None and spec.pool.value_dim is None:
        rounded = _transformed_spec(
            options | {"kv_cache_dtype": "int8"}, job.target, spec.num_devices
        )
        block = rounded.block_bytes
    return {"weight_bytes": weights, "block_bytes": block}


def _pool_bytes(spec: EngineSpec, target: Target, temp_bytes: int) -> int:
    """Bytes left for a device's pool after the weights and a step that needs `temp_bytes`."""
    return pool_bytes_of(
        target.chip.num_bytes,
        sum(spec.weight_bytes.values()) + temp_bytes,
        utilization=spec.config.gpu_memory_utilization,
    )


def _options_shown(config: ResolvedConfig) -> dict[str, Any]:
    names = ("dtype", "kv_cache_dtype", "quantization", "max_model_len", "block_size")
    names += ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
    return {name: getattr(config, name) for name in names}


def _blocks(spec: EngineSpec, num_tokens: int) -> tuple[int, int]:
    footprint = spec.footprint
    decoding = footprint.num_decoding_blocks(num_tokens, spec.config.decode_steps)
    return footprint.num_blocks(num_tokens), decoding


def _temp_bytes_at_most(spec: EngineSpec, encoder: dict[str, int] | None) -> int:
    """An empirical upper bound for a step and for the encoder of pictures."""
    largest = temp_bytes_of_encoder(encoder["largest"]) if encoder else 0
    return max(temp_bytes_at_most(spec), largest)


def smaller_steps(
    spec: EngineSpec, temp_bytes: int, encoder: dict[str, int] | None
) -> list[tuple[int, int, int]]:
    """Smaller numbers of tokens in a step, largest first, as `size_pool` would try them: with each the temporaries at
    most, and the blocks that a sequence of `max_model_len` needs. None if those of the largest step, `temp_bytes`, are
    more than was expected: then something else than its tokens takes memory.
    """
    steps, num_tokens = [], spec.config.max_num_batched_tokens
    if temp_bytes > _temp_bytes_at_most(spec, encoder) and spec.no_kernel_reason:
        return []
    while num_tokens > SMALLEST_BUDGET:
        num_tokens //= 2
        config = dataclasses.replace(spec.config, max_num_batched_tokens=num_tokens)
        smaller = dataclasses.replace(spec, config=config)
        most = min(temp_bytes, _temp_bytes_at_most(smaller, encoder))
        steps.append((num_tokens, most, smaller.footprint.num_blocks(config.max_model_len)))
    return steps


def _shorter(max_model_len: int) -> list[int]:
    """Lengths that may fit where `max_model_len` does not, longest first."""
    lengths = []
    while max_model_len > 256:
        max_model_len //= 2
        lengths.append(max_model_len)
    return lengths


def _work(request: dict[str, Any], report: Report) -> list[dict[str, Any]]:
    target = parse_target(request["target"])
    sizes, options, compiles = request["num_devices"], request["options"], request["compiles"]
    dumped = Path(request["dumped"]) if request["dumped"] else None
    return [measure(options, target, n, report, compiles=compiles, dumped=dumped) for n in sizes]


if __name__ == "__main__":
    serve(_work)
