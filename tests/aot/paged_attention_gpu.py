"""Attention's kernels for Hopper, of the heads of several models; and one that asks for too much."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from jaxpage.aot.contents import exchanges
from jaxpage.aot.hlo import parse
from jaxpage.aot.topology import H200
from jaxpage.kv_groups import Location
from jaxpage.parallel.sharding import TENSOR
from tests.aot import compiling, ptxas
from tests.aot.program import Program
from tests.aot.shapes import spec

TARGETS = ("h200",)
environment = compiling.ptxas_environment
# By kind of step the bytes a thread that may leave the registers: in a program of prompts what it knows of its tile of
# queries, and nothing in the loops over keys.
SPILLED = {"decode": 0, "mixed": 32}
# name: heads, KV heads, head dim, block size, dtype, what else the call says
GQA = dict(heads=16, kv_heads=2, head_dim=128, block_size=16, dtype="bfloat16")
LATENTS = dict(heads=16, kv_heads=1, head_dim=576, value_dim=512, block_size=16, dtype="bfloat16")
ATTENTION: dict[str, dict[str, Any]] = {
    "gqa-16-2": GQA,
    "gqa-32-8": GQA | dict(heads=32, kv_heads=8, block_size=32),
    "head-dim-64": GQA | dict(heads=14, head_dim=64, block_size=8),
    "head-dim-96": GQA | dict(head_dim=96),
    "head-dim-192": GQA | dict(head_dim=192),
    "head-dim-256": GQA | dict(head_dim=256, block_size=128),
    "head-dim-512": GQA | dict(head_dim=512, window=1000),
    "head-dim-512-mqa": GQA | dict(head_dim=512, heads=32, kv_heads=1),
    "head-dim-512-of-a-part": GQA | dict(head_dim=512, pool_heads=8, pool_head_dim=256),
    "mha-float16": GQA | dict(heads=4, kv_heads=4, block_size=64, dtype="float16"),
    "mqa": GQA | dict(heads=48, kv_heads=1),
    "int8": GQA | dict(format="int8"),
    "int8-float16": GQA | dict(format="int8", dtype="float16"),
    "int4": GQA | dict(format="int4", heads=32, kv_heads=8),
    "fp8": GQA | dict(format="fp8_e4m3"),
    "int8-head-dim-192": GQA | dict(format="int8", head_dim=192),
    "window-soft-cap-sinks": GQA | dict(window=1000, soft_cap=30.0, sinks=True),
    # Of 576 columns, whose first 512 are values.
    "latents-16": LATENTS,
    "latents-8-float16": LATENTS | dict(heads=8, block_size=64, dtype="float16"),
    # 64 rows of 32 groups: 64 MB of sums.
    "long-table": GQA | dict(heads=32, kv_heads=8, block_size=64, keys=1 << 17),
    "other-sizes": GQA | dict(sizes=dict(tile_kv=64, stages=4, programs_per_sm=4)),
}


def programs(target: str) -> Iterator[Program]:
    import jax

    with jax.set_mesh(_mesh(2)):
        yield Program(name="two-devices", lower=two_devices, look=_look)
    with jax.set_mesh(_mesh(1)):
        for name, options in ATTENTION.items():
            for kind, tokens in (("decode", 64), ("mixed", 8192)):
                lower = partial(attention, rows=64, tokens=tokens, **options)
                yield Program(name=f"{name}-{kind}", lower=lower, look=_look)
        yield Program(name="too-much-shared-memory", lower=greedy, look=_look, is_refused=True)


def _mesh(num_devices: int) -> Any:
    import numpy as np
    from jax._src import xla_bridge
    from jax.experimental import topologies
    from jax.sharding import Mesh

    xla_bridge.discover_pjrt_plugins()
    name = f"1x1x{num_devices}"
    description = topologies.get_topology_desc(
        platform="cuda", topology_name=name, target_config=H200, topology=name
    )
    return Mesh(np.array(description.devices), (TENSOR,))


def _look(compiled: Any, log: str) -> dict[str, Any]:
    memory = compiled.memory_analysis()
    return {
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "exchanges": exchanges(parse(compiled.as_text())),
        "ptxas": ptxas.report(log),
    }


def attention(
    *,
    rows,
    tokens,
    heads,
    kv_heads,
    head_dim,
    block_size,
    dtype,
    format=None,
    value_dim=None,
    pool_heads=None,
    pool_head_dim=None,
    sinks=False,
    keys=4096,
    sizes=None,
    **options,
):
    """Lowered for `rows` rows of up to `keys` keys, and a pool twice as large as they need. pool_heads, pool_head_dim:
    KV heads and head dim of a pool that several layers share, of which the layer has the last part.
    """
    import jax

    from pallas_kernels.kv_write.latents import LatentPool
    from pallas_kernels.kv_write.parts import PoolPart
    from pallas_kernels.kv_write.quantized import LEVELS, QuantizedPool
    from pallas_kernels.paged_attention import gpu, gpu_layout

    width = keys // block_size
    slots = 2 * rows * width, block_size, 2 * kv_heads
    pool: Any = spec((*slots, head_dim), dtype)
    if format is not None:
        columns = head_dim // 2 if format == "int4" else head_dim
        scale_zero = spec((*slots, 2), "bfloat16") if format in LEVELS else None
        data = spec((*slots, columns), "uint8")
        pool = QuantizedPool(data=data, scale_zero=scale_zero, format=format)
    if value_dim is not None:
        pool = LatentPool(spec((*slots[:2], head_dim), dtype), value_dim)
    if pool_heads is not None:
        pieces = head_dim // pool_head_dim
        pool = spec((*slots[:2], 2 * pool_heads, pool_head_dim), dtype)
        pool = PoolPart(pool, kv_heads, pieces, pool_heads // (kv_heads * pieces) - 1)
    arguments = {
        "q": spec((tokens, heads, head_dim), dtype),
        "pool": pool,
        "block_table": spec((rows, width), "int32"),
        "kv_lens": spec((rows,), "int32"),
        "query_starts": spec((rows + 1,), "int32"),
    }
    if sinks:
        arguments["sinks"] = spec((heads,), "float32")
    options |= dict(sizes=gpu_layout.TileSizes(**sizes or {}), one_query_per_row=tokens == rows)
    function = partial(gpu.paged_attention, scale=0.1, **options)
    return jax.jit(function).lower(**arguments)


def two_devices():
    """A step's attention with its write, as the engine has it where two devices share the heads."""
    import jax
    import jax.numpy as jnp

    from jaxpage.batch import StepBatch
    from jaxpage.kv_pool import KVPoolSpec
    from jaxpage.ops.attention import PagedAttention
    from pallas_kernels.paged_attention.gpu_layout import TileSizes

    mesh, rows, width, block_size = jax.sharding.get_mesh(), 64, 64, 64
    tokens, heads, kv_heads, head_dim = 256, 16, 4, 128
    pool_spec = KVPoolSpec(
        num_arrays=1,
        num_blocks=2 * rows * width,
        block_size=block_size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=jnp.dtype(jnp.bfloat16),
        sharded=True,
        platform="gpu",
        attention="hopper",
        kernel_sizes=TileSizes(),
    )

    def step(pool, q, k, v, lens, starts, slots, table):
        batch = StepBatch(
            slots=lens,
            query_starts=starts,
            kv_lens=lens,
            token_ids=lens,
            positions=lens,
            slot_mappings=slots[None],
            block_tables=table[None],
        )
        options = dict(spec=pool_spec, one_query_per_row=False, mesh=mesh)
        attention = PagedAttention([pool], batch, (Location(0, 0),), **options)
        out = attention(0, q, k, v, scale=0.1, window=None, soft_cap=None)
        return attention.kv_pool[0], out

    return jax.jit(step, donate_argnums=0).lower(
        spec(pool_spec.array_shape, "bfloat16", None, None, TENSOR),
        spec((tokens, heads, head_dim), "bfloat16", None, TENSOR),
        spec((tokens, kv_heads, head_dim), "bfloat16", None, TENSOR),
        spec((tokens, kv_heads, head_dim), "bfloat16", None, TENSOR),
        spec((rows,), "int32"),
        spec((rows + 1,), "int32"),
        spec((tokens,), "int32"),
        spec((rows, width), "int32"),
    )


def greedy():
    """A kernel with 4 bytes more of shared memory than an H200 has, to see that too much is an error here too."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(out_ref, smem):
        smem[...] = jnp.zeros_like(smem)
        out_ref[...] = smem[:128]

    size = 232448 // 4 // 128 * 128 + 128
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=(plgpu.SMEM((size,), jnp.float32),),
        grid=(1,),
        grid_names=("x",),
    )
    return jax.jit(kernel).lower()
