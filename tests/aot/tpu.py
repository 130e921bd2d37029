"""Compiles the TPU kernel for chips that are not there, in a process of its own: `python -m tests.aot.tpu v6e:2x2`.

The libtpu wheel holds the compiler of TPUs. What it says of each program in `PROGRAMS` goes to the standard output, a
JSON object a line. jax must not have been imported with another platform, hence the process.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from jaxpage.aot.hlo import collectives, copies_of_size, kernel_calls
from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import environment

ROOT = Path(__file__).parents[2]
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


@dataclass(frozen=True, kw_only=True)
class Program:
    """One call of the kernel, of a model's heads."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_tokens: int = 2048
    num_rows: int = 64
    max_model_len: int = 32768
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    dtype: str = "bfloat16"
    format: str | None = None
    sizes: tuple[tuple[str, int], ...] = ()  # other than the defaults
    block_size: int = 128
    num_blocks: int = 4001  # a prime: nothing else is as large as the pool
    num_devices: int = 1  # that share the heads
    num_layers: int = 1
    num_steps: int = 1  # in a loop on the device

    @property
    def one_query_per_row(self) -> bool:
        return self.num_tokens == self.num_rows


# Of what `tune.CANDIDATES` has, all at once; a test holds it to that.
_LARGEST = (("tile_rows", 512), ("head_rows", 4096), ("tile_kv", 2048), ("tile_bytes", 4 << 20))
_WIDE = Program(name="", num_heads=32, num_kv_heads=32, head_dim=256, num_blocks=1009)
_PHI_4 = Program(name="", num_heads=40, num_kv_heads=10, head_dim=128)
_LLAMA_8B = Program(name="llama-8b", num_heads=32, num_kv_heads=8, head_dim=128)
_F32 = replace(_LLAMA_8B, name="llama-8b-float32", dtype="float32", num_blocks=1009)
PROGRAMS = (
    Program(name="qwen-0.5b", num_heads=14, num_kv_heads=2, head_dim=64),
    Program(name="qwen-0.5b-decode", num_heads=14, num_kv_heads=2, head_dim=64, num_tokens=64),
    Program(name="qwen-3b", num_heads=16, num_kv_heads=2, head_dim=128),
    _LLAMA_8B,
    replace(_LLAMA_8B, name="llama-8b-decode", num_tokens=64),
    replace(_LLAMA_8B, name="llama-8b-int8", format="int8"),
    replace(_LLAMA_8B, name="llama-8b-int8-decode", format="int8", num_tokens=64),
    replace(_LLAMA_8B, name="llama-8b-int4", format="int4"),
    replace(_LLAMA_8B, name="llama-8b-fp8-e4m3", format="fp8_e4m3"),
    replace(_LLAMA_8B, name="llama-8b-fp8-e5m2-decode", format="fp8_e5m2", num_tokens=64),
    _F32,
    replace(_LLAMA_8B, name="full-scalar-memory", num_rows=384, max_model_len=131072),
    replace(_LLAMA_8B, name="llama-8b-tp4", num_devices=4),
    replace(_LLAMA_8B, name="two-layers-in-a-loop", num_tokens=64, num_layers=2, num_steps=8),
    Program(name="phi-3-mini", num_heads=32, num_kv_heads=32, head_dim=96, num_blocks=1009),
    Program(name="head-dim-192", num_heads=16, num_kv_heads=4, head_dim=192),
    Program(name="gemma-2b", num_heads=8, num_kv_heads=1, head_dim=256),
    Program(
        name="gemma-2-9b", num_heads=16, num_kv_heads=8, head_dim=256, window=4096, soft_cap=50.0
    ),
    Program(name="gpt-oss", num_heads=64, num_kv_heads=8, head_dim=64, window=128, sinks=True),
    # Of each chip an odd number of heads, whose scales would not fill registers.
    replace(_PHI_4, name="phi-4-int8-tp2", num_devices=2, format="int8"),
    # More than VMEM holds, but for the smaller tiles that are taken.
    replace(_WIDE, name="32-heads-of-256-int8", format="int8"),
    replace(_LLAMA_8B, name="blocks-of-16", block_size=16, num_blocks=8009),
    replace(_WIDE, name="largest-tiles", sizes=_LARGEST),
    replace(_LLAMA_8B, name="largest-tiles-int4", sizes=_LARGEST, format="int4"),
    replace(_F32, name="largest-tiles-float32", sizes=_LARGEST),
)


@cache
def compile_all(topology: str) -> list[dict]:
    """What the compiler says of each program, compiled in another process. Raises RuntimeError if it ends badly."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMPILATION_", "XLA_"))}
    told = dict(each.split("=", 1) for each in environment(parse_target(topology)))
    command = [sys.executable, "-m", "tests.aot.tpu", topology]
    done = subprocess.run(command, cwd=ROOT, env=kept | told, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling for {topology} failed:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _compile(program: Program, topology: str) -> dict:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from pallas_kernels.kv_write.quantized import LEVELS, QuantizedPool
    from pallas_kernels.paged_attention import tpu, tpu_layout

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[: program.num_devices]), ("tp",))

    def array(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

    heads, kv_heads, head_dim = program.num_heads, program.num_kv_heads, program.head_dim
    tokens, dtype = program.num_tokens, jnp.dtype(program.dtype)
    width = 2 * kv_heads * head_dim // (2 if program.format == "int4" else 1)
    by_head, by_lane = (None, "tp"), (None, None, "tp")
    pool = array(
        (program.num_blocks, program.block_size, width),
        jnp.uint8 if program.format else dtype,
        *by_lane,
    )
    pool_spec = P(*by_lane)
    if program.format:
        rows = tpu_layout.scale_rows(kv_heads // program.num_devices) * kv_heads
        scales = array((program.num_blocks, rows, program.block_size), dtype, *by_head)
        has_scales = program.format in LEVELS
        pool = QuantizedPool(
            data=pool, scale_zero=scales if has_scales else None, format=program.format
        )
        pool_spec = jax.tree.map(lambda x: x.sharding.spec, pool)
    arguments = [
        array((tokens, heads, head_dim), dtype, *by_head),
        array((tokens, kv_heads, head_dim), dtype, *by_head),
        array((tokens, kv_heads, head_dim), dtype, *by_head),
        array((program.num_rows, program.max_model_len // program.block_size), jnp.int32),
        array((program.num_rows,), jnp.int32),
        array((program.num_rows + 1,), jnp.int32),
        array((heads,), jnp.float32, "tp"),
    ]

    def attend(pool, q, k, v, table, kv_lens, query_starts, sinks):
        return tpu.paged_attention(
            *(q, k, v, pool, table, kv_lens, query_starts),
            scale=head_dim**-0.5,
            window=program.window,
            soft_cap=program.soft_cap,
            sinks=sinks if program.sinks else None,
            one_query_per_row=program.one_query_per_row,
            sizes=tpu_layout.TileSizes(**dict(program.sizes)),
        )

    specs = [x.sharding.spec for x in arguments]
    sharded = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(pool_spec, *specs),
        out_specs=(P(*by_head), pool_spec),
        check_vma=False,
    )

    def run(pools, q, k, v, table, kv_lens, *rest):
        def step(_, carry):
            q, kv_lens, pools = carry
            pools = list(pools)
            for layer in range(program.num_layers):
                q, pools[layer] = sharded(pools[layer], q, k, v, table, kv_lens, *rest)
            return q, kv_lens + 1, pools

        if program.num_steps == 1:
            return step(0, (q, kv_lens, pools))
        return jax.lax.fori_loop(0, program.num_steps, step, (q, kv_lens, pools))

    pools = [pool] * program.num_layers
    begin = time.perf_counter()
    with jax.set_mesh(mesh):  # Pallas asks the mesh for which chip it lowers
        compiled = jax.jit(run, donate_argnums=0).lower(pools, *arguments).compile()
    seconds = time.perf_counter() - begin
    memory, text = compiled.memory_analysis(), compiled.as_text() or ""
    leaves = jax.tree.leaves(pools)
    return {
        "name": program.name,
        "chip": devices[0].device_kind,
        "seconds": round(seconds, 2),
        "pool_bytes": sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
        // len(mesh.devices),
        "alias_bytes": memory.alias_size_in_bytes,
        "q_bytes": math.prod(arguments[0].shape) * dtype.itemsize // len(mesh.devices),
        "temp_bytes": memory.temp_size_in_bytes,
        "limits": [limit for _, limit in kernel_calls(text)],
        "copies": list(copies_of_size(text, [x.sharding.shard_shape(x.shape) for x in leaves])),
        "collectives": collectives(text),
    }


if __name__ == "__main__":
    for each in PROGRAMS:
        print(json.dumps(_compile(each, sys.argv[1])), flush=True)
