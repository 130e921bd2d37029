"""Attention's kernel for TPUs, of the heads of several models."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxpage.aot.contents import copies_of_size, exchanges, kernel_calls
from jaxpage.aot.hlo import parse
from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import mesh_of
from jaxpage.parallel.sharding import TENSOR
from tests.aot.program import Program

# A v6e has the kernel in its steps.
TARGETS = ("v5e:2x2", "v5p:2x2x1", "tpu7x:2x2x1")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One of the kernel, of a model's heads."""

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
    # Lanes of a slot that other layers share, and which part of them is the layer's; None: it has the slot to itself.
    slot_lanes: int | None = None
    part: int = 0
    value_dim: int | None = None  # of a pool of latents

    @property
    def one_query_per_row(self) -> bool:
        return self.num_tokens == self.num_rows


# Of what `tune.CANDIDATES` has, all at once; a test holds it to that.
_LARGEST = (("tile_rows", 512), ("head_rows", 4096), ("tile_kv", 2048), ("tile_bytes", 4 << 20))
_WIDE = Call(name="", num_heads=32, num_kv_heads=32, head_dim=256, num_blocks=1009)
_PHI_3 = Call(name="phi-3-mini", num_heads=32, num_kv_heads=32, head_dim=96, num_blocks=1009)
_PHI_4 = Call(name="", num_heads=40, num_kv_heads=10, head_dim=128)
_LLAMA_8B = Call(name="llama-8b", num_heads=32, num_kv_heads=8, head_dim=128)
_GEMMA_4_WINDOW = Call(
    name="", num_heads=8, num_kv_heads=2, head_dim=256, window=512, slot_lanes=2048, part=1
)
_GEMMA_4_31B = Call(
    name="", num_heads=32, num_kv_heads=4, head_dim=512, slot_lanes=8192, part=1, num_blocks=1009
)
# Of each of eight chips.
_DEEPSEEK_V3 = Call(
    name="deepseek-v3-of-tp8", num_heads=16, num_kv_heads=1, head_dim=576, value_dim=512
)
_F32 = replace(_LLAMA_8B, name="llama-8b-float32", dtype="float32", num_blocks=1009)
CALLS = (
    Call(name="qwen-0.5b", num_heads=14, num_kv_heads=2, head_dim=64),
    Call(name="qwen-0.5b-decode", num_heads=14, num_kv_heads=2, head_dim=64, num_tokens=64),
    Call(name="qwen-3b", num_heads=16, num_kv_heads=2, head_dim=128),
    _LLAMA_8B,
    replace(_LLAMA_8B, name="llama-8b-decode", num_tokens=64),
    replace(_LLAMA_8B, name="llama-8b-int8", format="int8"),
    replace(_LLAMA_8B, name="llama-8b-int8-decode", format="int8", num_tokens=64),
    replace(_LLAMA_8B, name="llama-8b-int4", format="int4"),
    replace(_LLAMA_8B, name="llama-8b-fp8-e4m3", format="fp8_e4m3"),
    replace(_LLAMA_8B, name="llama-8b-fp8-e4m3-decode", format="fp8_e4m3", num_tokens=64),
    replace(_LLAMA_8B, name="llama-8b-fp8-e5m2-decode", format="fp8_e5m2", num_tokens=64),
    _F32,
    replace(_LLAMA_8B, name="full-scalar-memory", num_rows=464, max_model_len=131072),
    replace(_LLAMA_8B, name="llama-8b-tp4", num_devices=4),
    replace(_LLAMA_8B, name="two-layers-in-a-loop", num_tokens=64, num_layers=2, num_steps=8),
    _PHI_3,
    replace(_PHI_3, name="phi-3-mini-decode", num_tokens=64),
    Call(name="head-dim-80", num_heads=32, num_kv_heads=8, head_dim=80),
    Call(name="head-dim-192", num_heads=16, num_kv_heads=4, head_dim=192),
    Call(name="gemma-2b", num_heads=8, num_kv_heads=1, head_dim=256),
    Call(name="gemma-2-9b", num_heads=16, num_kv_heads=8, head_dim=256, window=4096, soft_cap=50.0),
    # Of Gemma 4: layers of E4B with and without a window, and the second of two of 31B in the same slots.
    replace(_GEMMA_4_WINDOW, name="gemma-4-e4b-window"),
    replace(_GEMMA_4_WINDOW, name="gemma-4-e4b-window-decode", num_tokens=64),
    Call(name="gemma-4-e4b", num_heads=8, num_kv_heads=2, head_dim=512),
    replace(_GEMMA_4_31B, name="gemma-4-31b"),
    replace(_GEMMA_4_31B, name="gemma-4-31b-decode", num_tokens=64),
    _DEEPSEEK_V3,
    replace(_DEEPSEEK_V3, name="deepseek-v3-of-tp8-decode", num_tokens=64),
    replace(_DEEPSEEK_V3, name="deepseek-v3-of-tp8-fp8", format="fp8_e4m3"),
    replace(_DEEPSEEK_V3, name="deepseek-v3-of-tp8-fp8-decode", format="fp8_e4m3", num_tokens=64),
    replace(_DEEPSEEK_V3, name="deepseek-v3", num_heads=128),
    replace(_DEEPSEEK_V3, name="deepseek-v3-decode", num_heads=128, num_tokens=64),
    # Heads that fill no registers with a token's queries.
    replace(_DEEPSEEK_V3, name="glm-4.7-flash", num_heads=20),
    Call(name="gpt-oss", num_heads=64, num_kv_heads=8, head_dim=64, window=128, sinks=True),
    # Of each chip an odd number of heads, whose scales would not fill registers.
    replace(_PHI_4, name="phi-4-int8-tp2", num_devices=2, format="int8"),
    # More than VMEM holds, but for the smaller tiles that are taken.
    replace(_WIDE, name="32-heads-of-256-int8", format="int8"),
    replace(_LLAMA_8B, name="blocks-of-16", block_size=16, num_blocks=8009),
    replace(_WIDE, name="largest-tiles", sizes=_LARGEST),
    replace(_LLAMA_8B, name="largest-tiles-int4", sizes=_LARGEST, format="int4"),
    replace(_F32, name="largest-tiles-float32", sizes=_LARGEST),
)


def programs(target: str) -> Iterator[Program]:
    for call in CALLS:
        yield Program(
            name=call.name,
            lower=lambda call=call: lower(call, target),
            look=partial(_look, call, target),
        )


def _array(mesh: Any, shape: tuple[int, ...], dtype: Any, *axes: str | None) -> Any:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))


def _pool(program: Call, mesh: Any) -> Any:
    import jax.numpy as jnp

    from pallas_kernels.kv_write.quantized import LEVELS, QuantizedPool
    from pallas_kernels.mosaic_tpu import LANES
    from pallas_kernels.paged_attention import tpu_layout

    kv_heads, head_dim = program.num_kv_heads, program.head_dim
    dtype, array = jnp.dtype(program.dtype), partial(_array, mesh)
    width = 2 * kv_heads * head_dim // (2 if program.format == "int4" else 1)
    width = program.slot_lanes or width
    if program.value_dim:
        width = -(-head_dim // LANES) * LANES
    pool = array(
        (program.num_blocks, program.block_size, width),
        jnp.uint8 if program.format else dtype,
        *(None, None, TENSOR),
    )
    if not program.format:
        return pool
    rows = tpu_layout.scale_rows(kv_heads // program.num_devices) * kv_heads
    scales = array((program.num_blocks, rows, program.block_size), dtype, None, TENSOR)
    has_scales = program.format in LEVELS
    return QuantizedPool(
        data=pool, scale_zero=scales if has_scales else None, format=program.format
    )


def lower(program: Call, target: str) -> Any:
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from pallas_kernels.kv_write.latents import LatentPool
    from pallas_kernels.kv_write.parts import PoolPart
    from pallas_kernels.paged_attention import tpu, tpu_layout

    mesh = mesh_of(parse_target(target), program.num_devices)
    array, by_head = partial(_array, mesh), (None, TENSOR)
    heads, kv_heads, head_dim = program.num_heads, program.num_kv_heads, program.head_dim
    tokens, dtype = program.num_tokens, jnp.dtype(program.dtype)
    pool = _pool(program, mesh)
    pool_spec = jax.tree.map(lambda x: x.sharding.spec, pool)
    arguments = [
        array((tokens, heads, head_dim), dtype, *by_head),
        array((tokens, kv_heads, head_dim), dtype, *by_head),
        array((tokens, kv_heads, program.value_dim or head_dim), dtype, *by_head),
        array((program.num_rows, program.max_model_len // program.block_size), jnp.int32),
        array((program.num_rows,), jnp.int32),
        array((program.num_rows + 1,), jnp.int32),
        array((heads,), jnp.float32, TENSOR),
    ]

    def attend(pool, q, k, v, table, kv_lens, query_starts, sinks):
        if program.slot_lanes:
            pool = PoolPart(pool, k.shape[1], 1, program.part)
        elif program.value_dim:
            pool = LatentPool(pool, program.value_dim)
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
        out_specs=(PartitionSpec(*by_head), pool_spec),
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
    with jax.set_mesh(mesh):  # Pallas asks the mesh for which chip it lowers
        return jax.jit(run, donate_argnums=0).lower(pools, *arguments)


def _look(program: Call, target: str, compiled: Any, log: str) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    mesh = mesh_of(parse_target(target), program.num_devices)
    leaves = jax.tree.leaves([_pool(program, mesh)] * program.num_layers)
    q_size = program.num_tokens * program.num_heads * program.head_dim
    memory, contents = compiled.memory_analysis(), parse(compiled.as_text() or "")
    return {
        "pool_bytes": sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves) // mesh.size,
        "alias_bytes": memory.alias_size_in_bytes,
        "q_bytes": q_size * jnp.dtype(program.dtype).itemsize // mesh.size,
        "temp_bytes": memory.temp_size_in_bytes,
        "limits": [limit for _, limit in kernel_calls(contents)],
        "copies": list(copies_of_size(contents, [x.sharding.shard_shape(x.shape) for x in leaves])),
        "exchanges": exchanges(contents),
    }
