"""Compiles a model's largest steps for a target and says what they need: a process of its own, from JSON to JSON.

`python -m jaxpage.aot.worker`, with the variables of `topology.environment`. What it prints is data, not a verdict.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxpage.aot.hlo import collectives, copies_of_size, kernel_calls
from jaxpage.aot.targets import Target, parse_target
from jaxpage.aot.topology import mesh_of
from jaxpage.config import EngineConfig, ResolvedConfig
from jaxpage.engine_spec import EngineSpec, make_engine_spec
from jaxpage.kv_pool import KVPoolSpec
from jaxpage.models.decoder import CausalLM
from jaxpage.ops.attention import max_blocks
from jaxpage.parallel.sharding import sharding
from jaxpage.runner.buckets import Bucket, sample_name
from jaxpage.runner.lowering import Lowerings, num_bytes
from jaxpage.runner.programs import compile_program
from jaxpage.weights.spec import specs
from jaxpage.weights.transform import quantize

LENGTHS = (1024, 8192, 32768)  # tokens of the sequences of which the largest batch is asked


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A draft on a target, with a pool to compile its programs with; nothing is compiled yet."""

    draft: EngineSpec
    target: Target
    mesh: Mesh
    num_blocks: int  # of the pool
    weights: dict[str, int]  # bytes of each parameter on one device

    @property
    def free(self) -> int:
        """Bytes of a device that the weights leave."""
        return _free(self.draft.config, self.target, self.weights)

    @property
    def block_bytes(self) -> int:
        """Of a KV block on one device."""
        return _block_bytes(self.draft.pool, self.mesh.size)

    @property
    def pool_shapes(self) -> list[tuple[int, ...]]:
        """Of the pool's arrays, on one device."""
        pool = self.draft.pool_of(self.num_blocks)
        return [
            sharding(self.mesh, pool.axes_of(x)).shard_shape(x.shape)
            for x in jax.tree.leaves(pool.abstract())
        ]

    @cached_property
    def lowerings(self) -> Lowerings:
        return self.draft.lowerings(self.num_blocks)


def make_trial(options: dict[str, Any], target: Target, num_devices: int) -> Trial:
    """`options`: those of EngineConfig. Raises ValueError.

    Without `num_gpu_blocks_override` the pool has half of what the weights leave: a copy of it would be seen in the
    temporaries.
    """
    mesh = mesh_of(target, num_devices)
    draft = make_engine_spec(
        EngineConfig.from_options(**options),
        device=mesh.devices.flat[0],
        device_memory=target.chip.num_bytes,
        mesh=mesh,
    )
    draft.transform_weights()
    weights = _weights(draft.model, mesh)
    num_blocks = draft.config.num_gpu_blocks_override
    if num_blocks is None:
        half = _free(draft.config, target, weights) // 2
        num_blocks = max(
            2, min(half // _block_bytes(draft.pool, num_devices), max_blocks(draft.pool))
        )
    return Trial(draft=draft, target=target, mesh=mesh, num_blocks=num_blocks, weights=weights)


def measure(options: dict[str, Any], target: Target, num_devices: int) -> dict[str, Any]:
    """Everything that a verdict needs. Bytes and rates are those of one device. Raises ValueError."""
    trial = make_trial(options, target, num_devices)
    draft, weights = trial.draft, trial.weights
    config, footprint = draft.config, draft.footprint
    # Where the weights alone are too many there is nothing to compile.
    programs = [examine(trial, n) for n in _largest(draft.buckets)] if trial.free > 0 else []
    embedding = weights["model.embed_tokens.weight"] if draft.model.lm_head is not None else 0
    lengths = sorted({n for n in LENGTHS if n < config.max_model_len} | {config.max_model_len})
    return {
        "target": target.name,
        "num_devices": num_devices,
        "target_devices": target.num_devices,
        "config": _facts(config),
        "chip": dataclasses.asdict(target.chip),
        "weight_bytes": sum(weights.values()),
        # An embedding that is not the head too is read by the row.
        "bytes_per_step": sum(weights.values()) - embedding,
        "flops_per_token": 2 * _num_parameters(draft.model, embedding > 0) // num_devices,
        "state_bytes": trial.lowerings.state_bytes,
        "block_bytes": trial.block_bytes,
        "most_blocks": max_blocks(draft.pool),  # that block tables can name
        "pool_bytes": trial.num_blocks * trial.block_bytes,  # as compiled
        "blocks": {str(n): footprint.num_blocks(n) for n in lengths},
        "longest": [[n, footprint.num_blocks(n)] for n in _shorter(config.max_model_len)],
        "programs": programs,
        "attention": _attention(trial, programs),
        "in_int8": _in_int8(trial),
    }


def examine(trial: Trial, name: str) -> dict[str, Any]:
    """What the compiler says of a program; if it needs more than a device has, just that (and no alias)."""
    print(f"compiling {name}", file=sys.stderr, flush=True)
    found = {"name": name, "temp_bytes": trial.target.chip.num_bytes, "result_bytes": 0}
    found |= {"alias_bytes": 0, "collectives": {}, "pool_copies": [], "kernels": []}
    start = time.perf_counter()
    try:
        with trial.draft.on_target():
            program = compile_program(name, trial.lowerings.programs[name])
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
        "pool_copies": list(copies_of_size(text, trial.pool_shapes)),
        "kernels": kernel_calls(text),
    }


def _attention(trial: Trial, programs: list[dict[str, Any]]) -> str:
    """ "kernel" if the steps call it, else "plain XLA", and why."""
    if any("paged_attention" in name for each in programs for name, _ in each["kernels"]):
        return "kernel"
    return ": ".join(
        ["plain XLA", *([trial.draft.no_kernel_reason] if trial.draft.no_kernel_reason else [])]
    )


def _in_int8(trial: Trial) -> dict[str, int | None]:
    """What weights and a KV block would come to in int8; None where they are, or cannot be."""
    draft, mesh = trial.draft, trial.mesh
    weights = block = None
    if draft.config.quantization is None:
        model = nnx.clone(draft.model)
        quantize(model, draft.choose_matmul)
        weights = sum(_weights(model, mesh).values())
    if draft.pool.format is None:
        block = _block_bytes(dataclasses.replace(draft.pool, format="int8"), mesh.size)
    return {"weight_bytes": weights, "block_bytes": block}


def _weights(model: CausalLM, mesh: Mesh) -> dict[str, int]:
    return {path: _bytes_on_one_device(spec, mesh) for path, spec in specs(model).items()}


def _free(config: ResolvedConfig, target: Target, weights: dict[str, int]) -> int:
    return int(target.chip.num_bytes * config.gpu_memory_utilization) - sum(weights.values())


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
