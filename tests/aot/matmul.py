"""The products of few tokens: layers of models, whole and shared by two devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxpage.aot.contents import copies_of_size, exchanges, kernel_calls
from jaxpage.aot.hlo import parse
from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import mesh_of
from pallas_kernels.quant_matmul.cases import LAYERS
from tests.aot import compiling, ptxas
from tests.aot.program import Program
from tests.aot.shapes import spec

TARGETS = ("h200",)
environment = compiling.ptxas_environment


@dataclass(frozen=True, kw_only=True)
class Product:
    """One of a model's layer."""

    num_tokens: int
    num_in: int
    num_out: int
    rows: int = 128
    bias: bool = False
    axis: int | None = None  # of the weight, that two devices share: 0 outputs, 1 inputs

    @property
    def name(self) -> str:
        shape = f"{self.num_tokens}x{self.num_in}x{self.num_out}-rows-{self.rows}"
        shared = "" if self.axis is None else f"-shared-{('outputs', 'inputs')[self.axis]}"
        return f"{shape}{'-bias' if self.bias else ''}{shared}"


def products() -> Iterator[Product]:
    for num_tokens in (2, 64, 256):
        for rows in (64, 128):
            for num_in, num_out in LAYERS["3b"]:
                shape = dict(num_in=num_in, num_out=num_out, bias=num_out == 2560)
                yield Product(num_tokens=num_tokens, rows=rows, **shape)
    for num_in, num_out in LAYERS["0.5b"]:
        yield Product(num_tokens=8, num_in=num_in, num_out=num_out)
    # No multiples of 8, and more tokens than a tile has.
    for num_tokens in (67, 131):
        yield Product(num_tokens=num_tokens, num_in=2048, num_out=2560)
    # As the engine's layers: through `ops.matmul`.
    yield Product(num_tokens=64, num_in=2048, num_out=2048, bias=True, axis=0)
    yield Product(num_tokens=64, num_in=11008, num_out=2048, axis=1)


def programs(target: str) -> Iterator[Program]:
    for product in products():
        yield Program(
            name=product.name,
            lower=partial(_lower, product, target),
            look=partial(_look, product),
        )


def _lower(product: Product, target: str) -> Any:
    import jax
    from jax.sharding import PartitionSpec as P

    from jaxpage.ops.matmul import MatmulKernel, matmul
    from pallas_kernels.matmul.gpu import TileSizes

    mesh = mesh_of(parse_target(target), 1)
    axes: list[str | None] = [None, None]
    if product.axis is not None:
        mesh = mesh_of(parse_target(f"{target}:2"), 2)
        (axes[product.axis],) = mesh.axis_names
    kernel = MatmulKernel(
        "gpu", TileSizes(rows=product.rows, xla_from=257), mesh=mesh, spec=P(*axes)
    )
    with jax.set_mesh(mesh):  # Pallas asks it for which chip to lower
        return jax.jit(partial(matmul, kernel=kernel, dtype="bfloat16")).lower(
            spec((product.num_tokens, product.num_in), "bfloat16", None, axes[1]),
            spec((product.num_out, product.num_in), "bfloat16", *axes),
            bias=spec((product.num_out,), "bfloat16", axes[0]) if product.bias else None,
        )


def _look(product: Product, compiled: Any, log: str) -> dict[str, Any]:
    memory, contents = compiled.memory_analysis(), parse(compiled.as_text() or "")
    return {
        "temp_bytes": memory.temp_size_in_bytes,
        "kernel_calls": len(kernel_calls(contents)),
        "exchanges": exchanges(contents),
        "copies": list(copies_of_size(contents, [(product.num_out, product.num_in)])),
        "ptxas": ptxas.report(log),
    }
