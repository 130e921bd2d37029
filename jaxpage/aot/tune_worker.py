"""Compiles the candidates of `tune`: `process.run("jaxpage.aot.tune_worker", ...)`."""

from __future__ import annotations

import dataclasses
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpage.aot.attention_kinds import tiles_of
from jaxpage.aot.attention_time import Rows, bundles
from jaxpage.aot.process import Report, serve
from jaxpage.aot.targets import Target, parse_target
from jaxpage.aot.topology import mesh_of
from jaxpage.aot.tpu_schedule import take_schedules
from pallas_kernels.paged_attention import tpu, tpu_choose, tpu_layout, tpu_shape, tune

_WORKS = {"decode": tune.DECODE, "prefill": tune.PREFILL}


def seconds_of(target: Target, dumped: Path, sizes: tpu_shape.TileSizes, work: tune.Work) -> float:
    """Seconds of a call: the larger of its bundles over the clock and its bytes over the bandwidth."""
    mesh = mesh_of(target, 1)
    place = NamedSharding(mesh, PartitionSpec())
    arrays = dict(jax.eval_shape(partial(tune.arguments, work, tune.BLOCK_SIZE["tpu"])))
    arrays["pool"] = jax.eval_shape(tpu_layout.to_tpu, arrays["pool"])
    q = arrays["q"]
    arrays["k"] = arrays["v"] = jax.ShapeDtypeStruct((q.shape[0], work.num_kv_heads, 128), q.dtype)
    arrays = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for name, x in arrays.items()
    }
    one_query = work.query_len == 1
    attend = partial(tpu.paged_attention, scale=128**-0.5, one_query_per_row=one_query, sizes=sizes)
    with jax.set_mesh(mesh):  # tells Pallas which chip to lower for
        jax.jit(attend, donate_argnames="pool").lower(**arrays).compile()
    launches = take_schedules(dumped, ["paged_attention"])
    pool: Any = arrays["pool"]
    shape = tpu_choose.shape_of(
        q,
        pool,
        work.num_kv_heads,
        arrays["block_table"].shape[1],
        sizes=sizes,
        one_query_per_row=one_query,
    )
    rows = Rows(
        count=work.num_rows,
        query_len=work.query_len,
        kv_len=work.kv_len,
        **tiles_of(shape),
    )
    num_blocks = sum(count * turn.num_blocks for turn, count in rows.turns().items())
    num_bytes = num_blocks * shape.block_size * shape.width * shape.pool_dtype.itemsize
    chip = target.chip
    total = sum(bundles(each.program, rows) for each in launches)
    return max(total / chip.clock, num_bytes / chip.bytes_per_second)


def _work(request: dict[str, Any], report: Report) -> dict[str, Any]:
    del report
    target, wanted = parse_target(request["target"]), request["candidates"]
    candidates = wanted and [(_WORKS[kind], values) for kind, values in wanted.items()]
    seconds = partial(seconds_of, target, Path(request["dumped"]))
    sizes, found = tune.tune("tpu", seconds, candidates)
    compiler = f"libtpu {metadata.version('libtpu')}"
    return {"sizes": dataclasses.asdict(sizes), "seconds": found, "compiler": compiler}


if __name__ == "__main__":
    serve(_work)
