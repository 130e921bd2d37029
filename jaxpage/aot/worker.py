"""Compiles a model's largest steps for a target and says what they need: a process of its own, from JSON to JSON.

`python -m jaxpage.aot.worker`, with the variables of `topology.environment`. What it prints is data, not a verdict.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxpage.aot.hlo import collectives, copies_of_size, kernel_calls
from jaxpage.aot.targets import Chip, Target, parse_target
from jaxpage.aot.topology import mesh_of
from jaxpage.build import buckets_of, make_pool_spec, make_step_spec
from jaxpage.config import EngineConfig, ResolvedConfig, load_hf_config
from jaxpage.kv_groups import group_layers
from jaxpage.kv_pool import KVPoolSpec
from jaxpage.models import registry
from jaxpage.models.config import ModelConfig
from jaxpage.models.decoder import CausalLM
from jaxpage.ops.attention import choose, heads_of_pool
from jaxpage.parallel.sharding import sharding
from jaxpage.runner.buckets import Bucket, sample_name
from jaxpage.runner.lowering import Lowerings, num_bytes
from jaxpage.runner.memory import Room
from jaxpage.runner.programs import compile_program
from jaxpage.weights.spec import specs
from jaxpage.weights.transform import join_projections, quantize
from pallas_kernels.paged_attention.tpu_layout import MOST_BLOCKS

LENGTHS = (1024, 8192, 32768)  # tokens of the sequences of which the largest batch is asked


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What a configuration runs on a target, from shapes alone; nothing is compiled yet."""

    config: ResolvedConfig
    model: CausalLM
    target: Target
    mesh: Mesh
    weights: dict[str, int]  # bytes of each parameter on one device
    pool: KVPoolSpec
    why_not_kernel: str | None  # why attention is XLA's, where a kernel could have served
    buckets: tuple[Bucket, ...]
    lowerings: Lowerings

    @property
    def free(self) -> int:
        """Bytes of a device that the weights leave."""
        return _free(self.config, self.target, self.weights)

    @property
    def block_bytes(self) -> int:
        """Of a KV block on one device."""
        return _block_bytes(self.pool, self.mesh.size)

    @property
    def pool_shapes(self) -> list[tuple[int, ...]]:
        """Of the pool's arrays, on one device."""
        arrays = jax.tree.leaves(self.pool.abstract())
        return [sharding(self.mesh, self.pool.axes_of(x)).shard_shape(x.shape) for x in arrays]


def draft(options: dict[str, Any], target: Target, num_devices: int) -> Draft:
    """`options`: those of EngineConfig. Raises ValueError.

    Without `num_gpu_blocks_override` the pool has half of what the weights leave: a copy of it would be seen in the
    temporaries.
    """
    chip = target.chip
    hf_config = load_hf_config(options["model"], options.get("hf_overrides"))
    config = EngineConfig.from_options(**options).resolve(
        hf_config,
        platform=chip.platform,
        device_kind=chip.device_kind,
        device_memory=chip.num_bytes,
    )
    model = registry.build(hf_config, dtype=config.dtype, max_model_len=config.max_model_len)
    mesh = mesh_of(target, num_devices)
    if num_devices == 1:  # a joined weight has no even split
        join_projections(model)
    if config.quantization == "int8":
        quantize(model, platform=chip.platform, num_devices=num_devices)
    weights = _weights(model, mesh)
    free = _free(config, target, weights)
    pool, reason = _make_pool(config, model.config, chip, mesh, free)
    buckets = buckets_of(config)
    groups = group_layers(model.config.windows, config.max_model_len)
    lowerings = Lowerings(
        model,
        buckets=buckets,
        pool_spec=pool,
        step_spec=make_step_spec(config, model.config, groups),
        moves_blocks=config.swap_space > 0,
        mesh=mesh,
    )
    return Draft(
        config=config,
        model=model,
        target=target,
        mesh=mesh,
        weights=weights,
        pool=pool,
        why_not_kernel=reason,
        buckets=buckets,
        lowerings=lowerings,
    )


def measure(options: dict[str, Any], target: Target, num_devices: int) -> dict[str, Any]:
    """Everything that a verdict needs. Bytes and rates are those of one device. Raises ValueError."""
    plan = draft(options, target, num_devices)
    config, weights = plan.config, plan.weights
    # Where the weights alone are too many there is nothing to compile.
    programs = [examine(plan, n) for n in _largest(plan.buckets)] if plan.free > 0 else []
    room = Room(
        windows=group_layers(plan.model.config.windows, config.max_model_len).windows,
        block_size=config.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    embedding = weights["model.embed_tokens.weight"] if plan.model.lm_head is not None else 0
    lengths = sorted({n for n in LENGTHS if n < config.max_model_len} | {config.max_model_len})
    return {
        "target": target.name,
        "num_devices": num_devices,
        "config": _facts(config),
        "chip": dataclasses.asdict(target.chip),
        "weight_bytes": sum(weights.values()),
        # An embedding that is not the head too is read by the row.
        "bytes_per_step": sum(weights.values()) - embedding,
        "flops_per_token": 2 * _num_parameters(plan.model, embedding > 0) // num_devices,
        "state_bytes": plan.lowerings.state_bytes,
        "block_bytes": plan.block_bytes,
        "most_blocks": MOST_BLOCKS if plan.pool.lanes else None,  # that block tables can name
        "pool_bytes": plan.pool.num_blocks * plan.block_bytes,  # as compiled
        "blocks": {str(n): room.num_blocks(n) for n in lengths},
        "longest": [[n, room.num_blocks(n)] for n in _shorter(config.max_model_len)],
        "programs": programs,
        "attention": _attention(plan, programs),
        "in_int8": _in_int8(plan),
    }


def examine(plan: Draft, name: str) -> dict[str, Any]:
    """What the compiler says of a program; if it needs more than a device has, just that (and no alias)."""
    print(f"compiling {name}", file=sys.stderr, flush=True)
    found = {"name": name, "temp_bytes": plan.target.chip.num_bytes, "result_bytes": 0}
    found |= {"alias_bytes": 0, "collectives": {}, "pool_copies": [], "kernels": []}
    start = time.perf_counter()
    try:
        # Pallas asks the mesh for which chip to lower; else it sees this machine.
        with jax.set_mesh(plan.mesh):
            program = compile_program(name, plan.lowerings.programs[name])
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return found | {"seconds": time.perf_counter() - start}
    text = program.compiled.as_text() or ""
    return found | {
        "seconds": program.seconds,
        "temp_bytes": program.temp_bytes,
        "result_bytes": program.result_bytes,
        "alias_bytes": program.alias_bytes,
        "collectives": collectives(text),
        "pool_copies": list(copies_of_size(text, plan.pool_shapes)),
        "kernels": kernel_calls(text),
    }


def _attention(plan: Draft, programs: list[dict[str, Any]]) -> str:
    """ "kernel" if the steps call it, else "plain XLA", and why."""
    if any("paged_attention" in name for each in programs for name, _ in each["kernels"]):
        return "kernel"
    return ": ".join(["plain XLA", *([plan.why_not_kernel] if plan.why_not_kernel else [])])


def _in_int8(plan: Draft) -> dict[str, int | None]:
    """What weights and a KV block would come to in int8; None where they are, or cannot be."""
    config = plan.config
    weights = block = None
    if config.quantization is None:
        model = nnx.clone(plan.model)
        quantize(model, platform=plan.target.chip.platform, num_devices=plan.mesh.size)
        weights = sum(_weights(model, plan.mesh).values())
    if plan.pool.format is None:
        block = _block_bytes(dataclasses.replace(plan.pool, format="int8"), plan.mesh.size)
    return {"weight_bytes": weights, "block_bytes": block}


def _weights(model: CausalLM, mesh: Mesh) -> dict[str, int]:
    return {path: _bytes_on_one_device(spec, mesh) for path, spec in specs(model).items()}


def _free(config: ResolvedConfig, target: Target, weights: dict[str, int]) -> int:
    return int(target.chip.num_bytes * config.gpu_memory_utilization) - sum(weights.values())


def _make_pool(
    config: ResolvedConfig, model: ModelConfig, chip: Chip, mesh: Mesh, free: int
) -> tuple[KVPoolSpec, str | None]:
    """The pool to compile with, and why XLA has to serve its attention, if so."""
    num_devices = mesh.size
    of_pool = heads_of_pool(model.num_heads, model.num_kv_heads, num_devices)
    groups = group_layers(model.windows, config.max_model_len)
    pool = dataclasses.replace(
        make_pool_spec(config, model, groups, chip.platform),
        num_kv_heads=of_pool or model.num_kv_heads,
        sharded=of_pool > 0,
    )
    pool, reason = choose(
        pool,
        platform=chip.platform,
        num_devices=num_devices,
        table=(config.max_num_seqs, -(-config.max_model_len // config.block_size)),
        num_heads=model.num_heads,
        device_kind=chip.device_kind,
        compute_capability=getattr(mesh.devices.flat[0], "compute_capability", None),
    )
    num_blocks = config.num_gpu_blocks_override
    if num_blocks is None:
        num_blocks = max(2, min(free // 2 // _block_bytes(pool, num_devices), MOST_BLOCKS))
    return dataclasses.replace(pool, num_blocks=num_blocks), reason


def _block_bytes(pool: KVPoolSpec, num_devices: int) -> int:
    return pool.bytes_per_block // (num_devices if pool.sharded else 1)


def _facts(config: ResolvedConfig) -> dict[str, Any]:
    names = ("dtype", "kv_cache_dtype", "quantization", "max_model_len", "block_size")
    names += ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
    return {name: getattr(config, name) for name in names}


def _largest(buckets: tuple[Bucket, ...]) -> list[str]:
    """The programs that need most memory of each kind, and the smallest decode step."""
    decode = [bucket for bucket in buckets if bucket.decode]
    return [decode[0].name, decode[-1].name, buckets[-1].name, sample_name(buckets[-1].num_rows)]


def _bytes_on_one_device(spec: Any, mesh: Any) -> int:
    shape = spec.sharding(mesh).shard_shape(spec.shape)
    return num_bytes(jax.ShapeDtypeStruct(shape, spec.dtype))


def _num_parameters(model: Any, has_own_head: bool) -> int:
    """Those that every token is multiplied with."""
    total = sum(num_bytes(s) // s.dtype.itemsize for s in specs(model).values())
    embedding = specs(model)["model.embed_tokens.weight"]
    return total - (embedding.shape[0] * embedding.shape[1] if has_own_head else 0)


def _shorter(max_model_len: int) -> list[int]:
    """Lengths that may fit where `max_model_len` does not, longest first."""
    lengths = []
    while max_model_len > 256:
        max_model_len //= 2
        lengths.append(max_model_len)
    return lengths


def main() -> None:
    request = json.load(sys.stdin)
    try:
        target = parse_target(request["target"])
        print(json.dumps(measure(request["options"], target, request["num_devices"])))
    except ValueError as error:  # the user's
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main()
