"""Moves of whole blocks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxpage.aot.contents import copies_of_size, exchanges, kernel_calls
from jaxpage.aot.hlo import parse
from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import mesh_of
from tests.aot import scatters
from tests.aot.program import Program

TARGETS = ("v5e:2x2", "tpu7x:2x2x1", "h200")
NUM_BLOCKS = 401  # a prime: nothing else is as large as an array of the pool


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Of a model's heads."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    format: str | None = None
    dtype: str = "bfloat16"
    num_devices: int = 1  # that share the heads


_LLAMA_8B = Pool(name="llama-8b", num_layers=32, num_kv_heads=8, head_dim=128)
POOLS = (
    Pool(name="qwen-0.5b", num_layers=24, num_kv_heads=2, head_dim=64),
    replace(_LLAMA_8B, name="llama-8b-int8", format="int8"),
    replace(_LLAMA_8B, name="llama-8b-fp8", num_layers=4, format="fp8_e4m3"),
    Pool(name="qwen-3b-int4", num_layers=4, num_kv_heads=2, head_dim=128, format="int4"),
    Pool(name="float32", num_layers=2, num_kv_heads=2, head_dim=64, dtype="float32"),
    # Of each device: one KV head, whose scales are four rows.
    Pool(name="tp4", num_layers=4, num_kv_heads=4, head_dim=128, format="int8", num_devices=4),
)
# Of what makes an array of the pool: these do it where it stands, as the aliases say.
_in_place = re.compile(r"scatter|conditional\(|dynamic-update-slice")
# The last two as host memory takes and gives them: separate arrays for separate blocks.
MOVES = ("copy", "gather", "scatter", "read", "write")
NUM_COPIES, NUM_MOVED = 64, 16


def programs(target: str) -> Iterator[Program]:
    is_gpu = parse_target(target).chip.platform == "gpu"
    for pool in POOLS:
        for move in MOVES:
            by_host = move in ("read", "write")
            if (pool.num_devices > 1 and is_gpu) or (by_host and pool not in (POOLS[0], POOLS[-1])):
                continue
            mesh = mesh_of(parse_target(target), pool.num_devices)
            spec = _spec(pool, target)
            arrays = _arrays(spec, mesh)
            yield Program(
                name=f"{pool.name}-{move}",
                lower=partial(_lower, spec, move, mesh, arrays),
                look=partial(_look, arrays),
            )


def _spec(pool: Pool, target: str) -> Any:
    import jax.numpy as jnp

    from jaxpage.kv_pool import KVPoolSpec

    platform = parse_target(target).chip.platform
    return KVPoolSpec(
        num_arrays=pool.num_layers,
        num_blocks=NUM_BLOCKS,
        block_size=128 if platform == "tpu" else 64,
        num_kv_heads=pool.num_kv_heads,
        head_dim=pool.head_dim,
        dtype=jnp.dtype(pool.dtype),
        format=pool.format,
        sharded=pool.num_devices > 1,
        platform=platform,
        layout="tpu" if platform == "tpu" else "heads",
    )


def _arrays(spec: Any, mesh: Any) -> Any:
    """Of the pool, as shapes on the devices of `mesh`."""
    import jax

    from jaxpage.parallel.sharding import sharding

    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(mesh, spec.axes_of(x))),
        spec.abstract(),
    )


def _lower(spec: Any, move: str, mesh: Any, arrays: Any) -> Any:
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxpage.ops import blocks
    from jaxpage.runner.host_memory import read_blocks, write_blocks

    def placed(x, *place):
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*place))
        )

    ids = placed(np.empty(NUM_COPIES if move == "copy" else NUM_MOVED, np.int32))
    axes = [x.sharding.spec for x in jax.tree.leaves(arrays[0])]
    arguments, donated = (arrays, ids), 0
    if move in ("read", "write"):
        function = partial(read_blocks if move == "read" else write_blocks, spec, mesh)
        shapes = jax.eval_shape(partial(read_blocks, spec, mesh), arrays, ids)
        contents = [
            [placed(x, *each) for x, each in zip(content, axes, strict=True)] for content in shapes
        ]
    else:
        options = dict(mesh=mesh, spec=spec)
        function = partial(getattr(blocks, f"{move}_blocks"), **options)
        contents = jax.eval_shape(partial(blocks.gather_blocks, spec=spec), arrays, ids)
        leaves = [
            placed(x, None, *each) for x, each in zip(jax.tree.leaves(contents), axes, strict=True)
        ]
        contents = jax.tree.unflatten(jax.tree.structure(contents), leaves)
    if move == "copy":
        arguments = (arrays, ids, ids)
    elif move in ("scatter", "write"):
        arguments = (arrays, ids, contents)
    else:
        donated = ()
    with jax.set_mesh(mesh):  # Pallas asks it for which chip to lower
        return jax.jit(function, donate_argnums=donated).lower(*arguments)


def _look(arrays: Any, compiled: Any, log: str) -> dict[str, Any]:
    import jax

    text = compiled.as_text() or ""
    memory, program = compiled.memory_analysis(), parse(text)
    shapes = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(arrays)]
    sizes = [
        math.prod(s) * x.dtype.itemsize
        for s, x in zip(shapes, jax.tree.leaves(arrays), strict=True)
    ]
    return {
        "pool_bytes": sum(sizes),
        "block_bytes": sum(sizes) // NUM_BLOCKS,  # of all layers
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "kernel_calls": len(kernel_calls(program)),
        "copies": [line for line in copies_of_size(program, shapes) if not _in_place.search(line)],
        "exchanges": exchanges(program),
        "atomic": scatters.atomic(text),
    }
