"""Compiles writes of new keys and values for an H200 that is not there: `python -m tests.aot.kv_write`.

Judges nothing: a JSON object a line to the standard output for each program. A process of its own, with the variables
of `jaxpage.aot.topology.environment`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from jaxpage.aot.hlo import copies_of_size
from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import environment, mesh_of

ROOT = Path(__file__).parents[2]
TARGET = "h200"
FORMATS = (None, "int8", "int4", "fp8_e4m3", "fp8_e5m2")
NUM_TOKENS = (64, 2048)
NUM_BLOCKS = 401  # a prime: nothing else is as large as an array of the pool


@cache
def compile_all() -> list[dict]:
    """What the compiler says of each program. Raises RuntimeError if it ends badly."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMPILATION_", "XLA_"))}
    told = dict(each.split("=", 1) for each in environment(parse_target(TARGET)))
    command = [sys.executable, "-m", "tests.aot.kv_write"]
    done = subprocess.run(command, cwd=ROOT, env=kept | told, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling for {TARGET} failed:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _compile(format: str | None, num_tokens: int) -> dict:
    """8 KV heads of 128 in bfloat16."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxpage.kv_pool import KVPoolSpec
    from pallas_kernels.kv_write.gpu import write_kv

    place = NamedSharding(mesh_of(parse_target(TARGET), 1), PartitionSpec())
    spec = KVPoolSpec(
        num_arrays=1,
        num_blocks=NUM_BLOCKS,
        block_size=64,
        num_kv_heads=8,
        head_dim=128,
        dtype=jnp.dtype(jnp.bfloat16),
        format=format,
        platform="gpu",
    )
    new = jax.ShapeDtypeStruct((num_tokens, 8, 128), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        (spec.abstract()[0], new, new, slots),
    )
    compiled = jax.jit(write_kv, donate_argnums=0).lower(*arguments).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text() or ""
    entry = text[text.index("\nENTRY ") :]
    shapes = [x.shape for x in jax.tree.leaves(arguments[0])]
    in_place = re.compile("scatter")
    return {
        "format": format,
        "num_tokens": num_tokens,
        "pool_bytes": spec.num_bytes,
        "new_bytes": 2 * num_tokens * 8 * 128 * 2,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "kernels": re.findall(r" %(\S+) = [^=]* fusion\(", entry),
        "copies": [line for line in copies_of_size(text, shapes) if not in_place.search(line)],
        "loops": len(re.findall(r" while\(", text)),
    }


if __name__ == "__main__":
    for each in FORMATS:
        for count in NUM_TOKENS:
            print(json.dumps(_compile(each, count)), flush=True)
