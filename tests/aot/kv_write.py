"""Writes of new keys and values, as XLA has them on a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from jaxpage.aot.contents import copies_of_size
from jaxpage.aot.hlo import parse
from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import mesh_of
from tests.aot import scatters
from tests.aot.program import Program

TARGETS = ("h200",)
FORMATS = (None, "int8", "int4", "fp8_e4m3", "fp8_e5m2")
NUM_TOKENS = (64, 2048)
NUM_BLOCKS = 401  # a prime: nothing else is as large as an array of the pool


def programs(target: str) -> Iterator[Program]:
    """8 KV heads of 128 in bfloat16."""
    for format in FORMATS:
        for num_tokens in NUM_TOKENS:
            yield Program(
                name=f"{format}-{num_tokens}",
                lower=partial(_lower, format, num_tokens, target),
                look=partial(_look, format, num_tokens),
            )


def _spec(format: str | None) -> Any:
    import jax.numpy as jnp

    from jaxpage.kv_pool import KVPoolSpec

    return KVPoolSpec(
        num_arrays=1,
        num_blocks=NUM_BLOCKS,
        block_size=64,
        num_kv_heads=8,
        head_dim=128,
        dtype=jnp.dtype(jnp.bfloat16),
        format=format,
        platform="gpu",
    )


def _lower(format: str | None, num_tokens: int, target: str) -> Any:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from pallas_kernels.kv_write.gpu import write_kv

    place = NamedSharding(mesh_of(parse_target(target), 1), PartitionSpec())
    new = jax.ShapeDtypeStruct((num_tokens, 8, 128), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        (_spec(format).abstract()[0], new, new, slots),
    )
    return jax.jit(write_kv, donate_argnums=0).lower(*arguments)


def _look(format: str | None, num_tokens: int, compiled: Any, log: str) -> dict[str, Any]:
    import jax

    text = compiled.as_text() or ""
    memory, program = compiled.memory_analysis(), parse(text)
    shapes = [x.shape for x in jax.tree.leaves(_spec(format).abstract()[0])]
    in_place = re.compile("scatter")
    return {
        "format": format,
        "num_tokens": num_tokens,
        "pool_bytes": _spec(format).num_bytes,
        "new_bytes": 2 * num_tokens * 8 * 128 * 2,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "kernels": [
            each.name for each in program.computations[program.entry] if each.opcode == "fusion"
        ],
        "copies": [line for line in copies_of_size(program, shapes) if not in_place.search(line)],
        "loops": sum(each.opcode == "while" for each in program),
        "atomic": scatters.atomic(text),
    }
