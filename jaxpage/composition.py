"""From shapes to programs: the steps that a start, `jaxpage compile` and `jaxpage plan` share.

1. `engine_spec.make_engine_spec`: shapes, from config.json.
2. `size`: how many KV blocks, and how many tokens a step and a sequence may have.
3. `ExecutableCache.store`, `EngineSpec.lowerings`: programs, and where their executables are kept.

Whether for local devices or a compile-only topology, with weights or only shapes, cached on disk or not: all of that is
given by arguments. Must not know where weights come from, or how memory is measured or estimated.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxpage.config import EngineConfig, ResolvedConfig
from jaxpage.engine_spec import EngineSpec, make_engine_spec
from jaxpage.ops.attention import max_blocks
from jaxpage.parallel.mesh import check_hosts, flat, local_mesh, local_meshes, mesh_of_hosts
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.fingerprint import machine_fingerprint
from jaxpage.runner.memory import check_fits, size_pool
from jaxpage.runner.program_store import NUM_BLOCKS, MeasuredSizes, ProgramStore
from jaxpage.runner.programs import compile_program, step_bytes

logger = logging.getLogger("jaxpage")

# Of what the engine may use of a device: with more weights than this there is hardly room for KV.
_MOST_WEIGHTS = 0.9


@dataclass(frozen=True, kw_only=True)
class ExecutableCache:
    """The folder of cached executables, and the part of their key that describes the machine."""

    root: Path | None  # None: nothing is kept
    machine: dict[str, str]
    devices: tuple[jax.Device, ...]  # that load executables; (): they are written only

    def sizes(self, spec: EngineSpec) -> MeasuredSizes:
        """The cached measurements for `spec`."""
        return MeasuredSizes(self.root, self.machine | spec.fingerprint())

    def store(self, sized: EngineSpec) -> ProgramStore | None:
        """The cached executables of a sized engine."""
        if self.root is None:
            return None
        return ProgramStore(self.root, self.machine | sized.fingerprint(), self.devices)


def specs_of_this_machine(options: EngineConfig) -> list[EngineSpec]:
    """`spec_of_this_machine` for each of `options.data_parallel_size` engines, on devices of its own.

    Raises ValueError too if there are too few devices.
    """
    num_replicas, num_devices = options.data_parallel_size, options.tensor_parallel_size
    if num_replicas == 1:
        return [spec_of_this_machine(options)]
    if num_devices is None:
        num_devices, most = 1, len(jax.local_devices()) // num_replicas
        if most > 1 and not _holds_weights(_spec_on(options, None)):
            logger.info("the weights are too many for one device: %d share them", most)
            num_devices = most
    return [_spec_on(options, mesh) for mesh in local_meshes(num_replicas, num_devices)]


def spec_of_this_machine(options: EngineConfig) -> EngineSpec:
    """The shapes of an engine on devices of this process. Raises ValueError for what is not supported.

    It uses the devices of `options.mesh`, the first `options.tensor_parallel_size`, or else one, or all if the weights
    do not fit on one. With several hosts: as many on each, in all `options.tensor_parallel_size`, or all devices.
    """
    mesh, wanted = options.mesh, options.tensor_parallel_size
    if mesh is not None:
        if not isinstance(mesh, Mesh):
            raise ValueError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}")
        if wanted not in (None, mesh.size):
            raise ValueError(f"tensor_parallel_size={wanted}, but mesh has {mesh.size} devices")
        check_hosts(mesh, options.nnodes)
        return _spec_on(options, flat(mesh))
    if options.nnodes > 1:
        if jax.process_count() != options.nnodes:
            raise ValueError(
                f"nnodes={options.nnodes}, but this process sees {jax.process_count()}; only LLM, AsyncLLM "
                "and the commands that make one work with several hosts"
            )
        return _spec_on(options, mesh_of_hosts(wanted))
    if wanted is not None and wanted > 1:
        return _spec_on(options, local_mesh(wanted))
    spec = _spec_on(options, None)
    devices = jax.local_devices()
    if wanted is None and len(devices) > 1 and not _holds_weights(spec):
        logger.info(
            "the weights are too many for one device: %d share them, as with tensor_parallel_size=%d",
            len(devices),
            len(devices),
        )
        return _spec_on(options, local_mesh(len(devices)))
    return spec


def _spec_on(options: EngineConfig, mesh: Mesh | None) -> EngineSpec:
    if mesh is None:
        device = jax.local_devices()[0]
    else:
        device = mesh.local_devices[0] if options.nnodes > 1 else mesh.devices.flat[0]
    return make_engine_spec(options, device=device, mesh=mesh)


def _holds_weights(spec: EngineSpec) -> bool:
    """Whether the weights fit on the device; True if it does not report its memory."""
    memory = spec.hardware.memory_bytes
    if memory is None:
        return True
    usable = memory * spec.config.gpu_memory_utilization
    return sum(spec.weight_bytes.values()) < _MOST_WEIGHTS * usable


def executable_cache(
    spec: EngineSpec, *, flags: str, devices: Sequence[jax.Device] = ()
) -> ExecutableCache:
    """The cache that `spec.config` asks for. `flags`: those of the compiler."""
    return ExecutableCache(
        root=_executables_folder(spec.config),
        machine=machine_fingerprint(spec.device, flags),
        devices=tuple(devices),
    )


def _executables_folder(config: ResolvedConfig) -> Path | None:
    if config.enforce_eager or not config.compilation_cache_dir:
        return None
    if config.logits_processors:  # a function may have changed since the last run
        return None
    return Path(config.compilation_cache_dir) / "programs"


def size(
    spec: EngineSpec,
    *,
    available: Callable[[int], int],
    step_memory: Callable[[Bucket], int],
    settle: Callable[[int], int] = lambda num_blocks: num_blocks,
    must_fit: bool = True,
) -> EngineSpec:
    """`spec` with the blocks of its pool, and the token limits that they allow. Raises ValueError.

    `available(n)`: bytes for the pool of each device beside a step that needs n bytes. `step_memory(bucket)`: the bytes
    that the step of a bucket needs besides weights and pool (`measured_step_memory` compiles it to find out).
    `settle`: takes the measured number of blocks, and may return a smaller one for which executables are cached.
    Unless it `must_fit`, a pool too small for one sequence of `max_model_len` is returned instead of refused.
    """
    config, bytes_per_block = spec.config, spec.block_bytes
    footprint = spec.footprint
    num_blocks = spec.num_blocks_given
    if num_blocks is None:
        num_blocks, footprint = size_pool(
            available=available,
            temp_bytes=step_memory,
            bytes_per_block=bytes_per_block,
            footprint=footprint,
            max_model_len=config.max_model_len,
            must_fit=not config.fit_max_model_len,
            max_num_seqs=config.max_num_seqs,
        )
        num_blocks = settle(num_blocks)
    num_blocks = min(num_blocks, *map(max_blocks, spec.pools))
    max_model_len = config.max_model_len
    if config.fit_max_model_len:
        max_model_len = max(2, footprint.longest(max_model_len, num_blocks))
    # With num_gpu_blocks_override, the scheduler refuses the single request that is too long.
    if must_fit and config.num_gpu_blocks_override is None:
        check_fits(
            footprint,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            available=num_blocks * bytes_per_block,
        )
    return with_sizes(
        spec,
        num_blocks=num_blocks,
        max_num_batched_tokens=footprint.max_num_batched_tokens,
        max_model_len=max_model_len,
    )


def with_sizes(
    spec: EngineSpec, *, num_blocks: int, max_num_batched_tokens: int, max_model_len: int
) -> EngineSpec:
    """`spec` with the blocks of its pool, and token limits."""
    config = dataclasses.replace(
        spec.config,
        num_gpu_blocks_override=max(2, num_blocks),  # estimates may ask for fewer
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    return dataclasses.replace(spec, config=config).with_blocks(num_blocks)


def size_from_cache(
    spec: EngineSpec, cache: ExecutableCache, available: Callable[[int], int]
) -> EngineSpec:
    """`size` with cached measurements, so that a later, equal start compiles nothing for sizing.

    Executables are for a fixed number of blocks, so the last run's number is used again if it fits and is not much
    smaller than necessary.
    """
    sizes = cache.sizes(spec)

    def step_memory(bucket: Bucket) -> int:
        return sizes.remember(bucket.name, lambda: measured_step_memory(spec, bucket))

    return size(
        spec,
        available=available,
        step_memory=step_memory,
        settle=lambda num_blocks: sizes.settle(NUM_BLOCKS, num_blocks),
    )


def measured_step_memory(spec: EngineSpec, bucket: Bucket) -> int:
    """Bytes that a device must hold besides weights and pool: request state, temporaries and results of one step.

    Compiles the step with the smallest pool: temporaries do not depend on the pool's size.
    """
    lowerings = spec.with_blocks(2).lowerings((bucket,))
    with spec.on_target():
        programs = [
            compile_program(name, lowerings.programs[name])
            for name in (
                *bucket.programs(bucket.num_rows),
                *(name for names in lowerings.of_features for name in names[-1:]),
            )
        ]
    return lowerings.state_bytes + step_bytes(programs)
