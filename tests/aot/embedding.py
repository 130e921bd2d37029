"""Lookups of tokens: the kernel's, XLA's, how XLA lays tables out, and the steps of gpt-oss, whose table lies by
column.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxpage.aot.contents import copies_of_size, exchanges, kernel_calls
from jaxpage.aot.hlo import parse
from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import mesh_of
from tests.aot import steps
from tests.aot.largest import largest_steps
from tests.aot.models import EXPERTS
from tests.aot.program import Program
from tests.aot.shapes import spec
from tests.aot.steps import Place

if TYPE_CHECKING:
    import jax

    from jaxpage.aot.worker import CompileJob

TARGETS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


@dataclass(frozen=True, kw_only=True)
class Call:
    """by: "kernel"; "ops" for `jaxpage.ops.embedding` with the kernel; or "xla". is_tied: it also multiplies with the
    table, as a head does.
    """

    name: str
    num_rows: int = 201088
    width: int = 2880
    num_tokens: int = 64
    dtype: str = "bfloat16"
    by: str = "kernel"
    num_devices: int = 1
    is_tied: bool = False

    @property
    def share(self) -> tuple[int, int]:
        """The table of one device."""
        return self.num_rows // self.num_devices, self.width


CALLS = (
    Call(name="gpt-oss-1", num_tokens=1),
    Call(name="gpt-oss-64"),
    Call(name="gpt-oss-2048", num_tokens=2048),
    Call(name="gpt-oss-float32", dtype="float32"),
    Call(name="gpt-oss-of-tp4-1", num_rows=50272, num_tokens=1),
    Call(name="gpt-oss-of-tp4-512", num_rows=50272, num_tokens=512),
    Call(name="gpt2-xl-64", num_rows=50257, width=1600),
    Call(name="tied-64", by="ops", is_tied=True),
    Call(name="tied-64-tp4", by="ops", is_tied=True, num_devices=4),
    Call(name="gpt-oss-64-xla", by="xla"),
    Call(name="gpt-oss-64-tp4-xla", by="xla", num_devices=4),
)
# Where one order of rows and elements takes little less memory than the other, or no less.
TABLES = (
    (1000, 2880),
    (1020, 2880),
    (250, 2880),
    (4090, 4090),
    (5000, 4000),
    (32003, 1600),
    (131072, 2036),
    (131072, 2041),
    (131072, 2688),
    (151936, 896),
)
GPT_OSS = EXPERTS["gpt-oss-20b"] | {"num_hidden_layers": 2}
STEPS = (
    Place("v6e:2x2", 1, "gpt-oss"),
    Place("v6e:2x2", 4, "gpt-oss"),
    Place("v5e:2x2", 4, "gpt-oss"),
)


def programs(target: str) -> Iterator[Program]:
    import jax

    for call in CALLS:
        with jax.set_mesh(mesh_of(parse_target(target), call.num_devices)):  # for Pallas
            yield Program(name=call.name, lower=partial(_lower, call), look=partial(_look, call))
    for num_rows, width in TABLES:
        for dtype in ("bfloat16", "float32"):
            name = f"table {num_rows} x {width} {dtype}"
            call = Call(name=name, num_rows=num_rows, width=width, dtype=dtype, by="xla")
            with jax.set_mesh(mesh_of(parse_target(target), 1)):
                yield Program(name=name, lower=partial(_lower, call), look=partial(_look, call))
    for place in STEPS:
        if place.target == target:
            job, names = largest_steps(place, GPT_OSS)
            num_tokens = {each.name: each.num_tokens for each in job.spec.buckets}
            for name in names:
                yield Program(
                    name=f"step TP {place.num_devices} {name}",
                    lower=partial(steps.lower, job, name),
                    look=partial(_look_at_step, job, num_tokens[name]),
                    observers=(sys.modules[__name__],),
                )


def _lower(call: Call) -> jax.stages.Lowered:
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from jaxpage.device import Device
    from jaxpage.ops import embedding
    from jaxpage.parallel.sharding import TENSOR
    from pallas_kernels.embedding import tpu

    axes = (TENSOR,) if call.num_devices > 1 else ()
    table = spec((call.num_rows, call.width), call.dtype, *axes)
    find: Any = tpu.lookup if call.by == "kernel" else embedding.lookup
    if call.by == "ops":
        where = {"mesh": jax.sharding.get_mesh(), "spec": PartitionSpec(*axes)}
        choice = embedding.choose(table, Device(platform="tpu"), **where)
        find = partial(embedding.lookup, kernel=choice.chosen)

    def both(table, ids, hidden):
        return find(table, ids), jnp.matmul(hidden, table.T)

    ids = spec((call.num_tokens,), jnp.int32)
    if call.is_tied:
        return jax.jit(both).lower(table, ids, spec((call.num_tokens, call.width), call.dtype))
    return jax.jit(find).lower(table, ids)


def _look(call: Call, compiled: jax.stages.Compiled, log: str) -> dict[str, Any]:
    text = compiled.as_text() or ""
    contents = parse(text)
    layout = re.search(r"entry_computation_layout=\{\(\w+\[[\d,]+\]\{([\d,]+)", text)
    assert layout is not None
    return {
        "kernels": len(kernel_calls(contents)),
        "copies": list(copies_of_size(contents, [call.share])),
        "lies_by_column": layout[1] == "0,1",
        "exchanges": exchanges(contents),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def _look_at_step(
    job: CompileJob, num_tokens: int, compiled: jax.stages.Compiled, log: str
) -> dict[str, Any]:
    contents, num_devices = parse(compiled.as_text() or ""), job.spec.num_devices
    share = GPT_OSS["vocab_size"] // num_devices, GPT_OSS["hidden_size"]
    return {
        "num_tokens": num_tokens,
        "share": share,
        "lookups": sum("embedding/" in name for name, _ in kernel_calls(contents)),
        # Of the embedding, and of the head, which has its size.
        "copies": list(copies_of_size(contents, [share])),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }
