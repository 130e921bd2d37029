"""Compiles a model's largest steps for a target and says what they need: a process of its own, from JSON to JSON.

`python -m jaxpage.aot.worker`, with the variables of `topology.environment`. What it prints is data, not a verdict.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import time
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpage.aot.targets import Target, parse_target
from jaxpage.aot.topology import mesh_of
from jaxpage.build import make_pool_spec, make_step_spec
from jaxpage.config import EngineConfig, ResolvedConfig, load_hf_config
from jaxpage.kv_groups import group_layers
from jaxpage.kv_pool import KVPoolSpec
from jaxpage.models import registry
from jaxpage.models.config import ModelConfig
from jaxpage.ops.attention import choose, heads_of_pool
from jaxpage.runner.buckets import Bucket, make_buckets, sample_name
from jaxpage.runner.lowering import Lowerings, num_bytes
from jaxpage.runner.memory import Room
from jaxpage.runner.programs import Program, compile_program
from jaxpage.weights.spec import specs
from jaxpage.weights.transform import join_projections, quantize
from pallas_kernels.paged_attention.tpu_layout import MOST_BLOCKS

LENGTHS = (1024, 8192, 32768)  # tokens of the sequences of which the largest batch is asked
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COLLECTIVE = re.compile(
    rf"= \(?(?P<made>.*?) (?P<name>{'|'.join(COLLECTIVES)})(?:-start)?\(.*channel_id=(?P<channel>\d+)"
)
_SHAPE = re.compile(r"(?P<dtype>\w+)\[(?P<sizes>[\d,]*)\]")


def measure(options: dict[str, Any], target: Target, num_devices: int) -> dict[str, Any]:
    """Everything that a verdict needs. Bytes and rates are those of one device. Raises ValueError."""
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
        quantize(model)
    groups = group_layers(model.config.windows, config.max_model_len)
    weights = {path: _bytes_on_one_device(spec, mesh) for path, spec in specs(model).items()}
    free = int(chip.num_bytes * config.gpu_memory_utilization) - sum(weights.values())
    pool, reason = _make_pool(config, model.config, target, num_devices, free)
    buckets = make_buckets(
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
    )
    lowerings = Lowerings(
        model,
        buckets=buckets,
        pool_spec=pool,
        step_spec=make_step_spec(config, model.config, groups),
        mesh=mesh,
    )
    # Where the weights alone are too many there is nothing to compile.
    names = _largest(buckets) if free > 0 else []
    programs = [_compile(lowerings, name, mesh, chip.num_bytes) for name in names]
    room = Room(
        windows=groups.windows,
        block_size=config.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    embedding = weights["model.embed_tokens.weight"] if model.lm_head is not None else 0
    lengths = sorted({n for n in LENGTHS if n < config.max_model_len} | {config.max_model_len})
    return {
        "target": target.name,
        "num_devices": num_devices,
        "config": _facts(config),
        "chip": dataclasses.asdict(chip),
        "weight_bytes": sum(weights.values()),
        # An embedding that is not the head too is read by the row.
        "bytes_per_step": sum(weights.values()) - embedding,
        "flops_per_token": 2 * _num_parameters(model, embedding > 0) // num_devices,
        "state_bytes": lowerings.state_bytes,
        "block_bytes": _block_bytes(pool, num_devices),
        "most_blocks": MOST_BLOCKS if pool.lanes else None,  # that block tables can name
        "pool_bytes": pool.num_blocks * _block_bytes(pool, num_devices),  # as compiled
        "blocks": {str(n): room.num_blocks(n) for n in lengths},
        "longest": [[n, room.num_blocks(n)] for n in _shorter(config.max_model_len)],
        "programs": programs,
        "attention": "kernel"
        if pool.lanes
        else ": ".join(["plain XLA", *([reason] if reason else [])]),
    }


def _make_pool(
    config: ResolvedConfig, model: ModelConfig, target: Target, num_devices: int, free: int
) -> tuple[KVPoolSpec, str | None]:
    """A pool of half the free bytes: a copy of it would be seen in the temporaries. And why XLA has to serve, if so."""
    platform = target.chip.platform
    of_pool = heads_of_pool(model.num_heads, model.num_kv_heads, num_devices)
    pool = dataclasses.replace(
        make_pool_spec(config, model, group_layers(model.windows, config.max_model_len)),
        num_kv_heads=of_pool or model.num_kv_heads,
        sharded=of_pool > 0,
        platform=platform,
    )
    table = (config.max_num_seqs, -(-config.max_model_len // config.block_size))
    pool, reason = choose(pool, platform=platform, num_devices=num_devices, table=table)
    num_blocks = min(free // 2 // _block_bytes(pool, num_devices), MOST_BLOCKS)
    return dataclasses.replace(pool, num_blocks=max(2, num_blocks)), reason


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


def _compile(lowerings: Lowerings, name: str, mesh: Mesh, num_bytes: int) -> dict[str, Any]:
    """What the compiler says of a program; if it needs more than the `num_bytes` of a device, just that."""
    print(f"compiling {name}", file=sys.stderr, flush=True)
    found = {"name": name, "temp_bytes": num_bytes, "result_bytes": 0, "collectives": {}}
    start = time.perf_counter()
    try:
        with jax.set_mesh(
            mesh
        ):  # Pallas asks it for which chip to lower; else it sees this machine
            program: Program = compile_program(name, lowerings.programs[name])
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return found | {"seconds": time.perf_counter() - start, "alias_bytes": 0}
    return found | {
        "seconds": program.seconds,
        "temp_bytes": program.temp_bytes,
        "result_bytes": program.result_bytes,
        "alias_bytes": program.alias_bytes,
        "collectives": collectives(program.compiled.as_text() or ""),
    }


def collectives(text: str) -> dict[str, dict[str, int]]:
    """By name the number of collectives in a program's HLO, and the elements that the largest of them makes.

    The compiler may write one down several times, in the computations that it overlaps with; they share a channel.
    """
    largest: dict[str, dict[str, int]] = {}
    for match in _COLLECTIVE.finditer(text):
        shapes = [m["sizes"] for m in _SHAPE.finditer(match["made"])]
        sizes = [math.prod(int(n) for n in shape.split(",") if n) for shape in shapes]
        largest.setdefault(match["name"], {})[match["channel"]] = max(sizes, default=0)
    return {
        name: {"count": len(channels), "largest": max(channels.values())}
        for name, channels in largest.items()
    }


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
