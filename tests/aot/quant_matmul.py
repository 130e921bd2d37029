"""The products with quantised weights: layers of models, in all formats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxpage.aot.contents import copies_of_size, kernel_calls
from jaxpage.aot.hlo import parse
from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import mesh_of
from tests.aot import compiling, ptxas
from tests.aot.program import Program
from tests.aot.shapes import spec

TARGETS = ("v5e:2x2", "tpu7x:2x2x1", "h200")
FORMATS = (
    "int8",
    "int8-rounded-x",
    "int8-groups",
    "int4",
    "int4-symmetric",
    "fp8_e4m3",
    "fp8_e4m3-groups",
)
OTHER_SIZES = {
    "gpu": dict(smem_kib=200, most_stages=8, enough_programs=264),
    "tpu": dict(tile_tokens=256, tile_out=1024, least_tiles=4),
}
environment = compiling.ptxas_environment


@dataclass(frozen=True, kw_only=True)
class Product:
    """One of a model's layer."""

    num_tokens: int
    num_in: int
    num_out: int
    format: str  # of FORMATS
    group_size: int = 128
    other_sizes: bool = False  # than the defaults: candidates of tuning

    @property
    def name(self) -> str:
        shape = f"{self.num_tokens}x{self.num_in}x{self.num_out}"
        groups = f"-groups-of-{self.group_size}" if self.group_size != 128 else ""
        return f"{self.format}{groups}-{shape}{'-other-sizes' if self.other_sizes else ''}"


def products() -> Iterator[Product]:
    """A few tokens and many, of the widest output and the widest input of a model; then what is odd."""
    wide = dict(num_in=3584, num_out=37888)
    for format in FORMATS:
        for num_tokens in (8, 2048):
            yield Product(format=format, num_tokens=num_tokens, **wide)
    for format in ("int8", "int4", "fp8_e4m3-groups"):
        for num_tokens in (8, 2048):
            yield Product(format=format, num_tokens=num_tokens, num_in=18944, num_out=3584)
        yield Product(format=format, num_tokens=64, **wide)
        # Its widths are no multiples of the tiles.
        yield Product(format=format, num_tokens=8, num_in=896, num_out=1152)
        # As much as there is room for.
        yield Product(format=format, num_tokens=2048, num_in=28672, num_out=8192)
    # With one buffer of x, and large tiles of everything else: of results, or of the scales of groups.
    yield Product(format="fp8_e4m3-groups", num_tokens=2048, num_in=14336, num_out=4096)
    yield Product(format="int4", group_size=32, num_tokens=2048, num_in=28672, num_out=8192)
    for group_size, num_tokens in ((32, 8), (64, 2048)):
        shape = dict(num_in=2048, num_out=2048, num_tokens=num_tokens)
        yield Product(format="int4", group_size=group_size, **shape)
    for format, num_tokens in (("int8-rounded-x", 2048), ("int4", 2048)):
        yield Product(format=format, num_tokens=num_tokens, other_sizes=True, **wide)


def programs(target: str) -> Iterator[Program]:
    import jax

    with jax.set_mesh(mesh_of(parse_target(target), 1)):  # Pallas asks it for which chip to lower
        for product in products():
            yield Program(
                name=product.name,
                lower=partial(_lower, product, parse_target(target).chip.platform),
                look=partial(_look, product),
            )


def _arguments(product: Product) -> tuple:
    """x and the weight as shapes."""
    from pallas_kernels.quant_matmul.quantized import QuantizedWeight

    num_in, num_out = product.num_in, product.num_out
    x = spec((product.num_tokens, num_in), "bfloat16")
    if not product.format.startswith("int4"):
        dtype = "float8_e4m3fn" if product.format.startswith("fp8_e4m3") else "int8"
        by_group = (num_in // product.group_size,) if product.format.endswith("groups") else ()
        return x, QuantizedWeight(
            data=spec((num_out, num_in), dtype), scale=spec((*by_group, num_out), "float32")
        )
    groups = -(-num_in // product.group_size // 2) * 2
    weight = QuantizedWeight(
        data=spec((num_out, groups // 2 * product.group_size), "uint8"),
        scale=spec((groups, num_out), "float32"),
        zero=None if product.format == "int4-symmetric" else spec((groups, num_out), "uint8"),
    )
    return x, weight


def _lower(product: Product, platform: str) -> Any:
    import jax

    if platform == "gpu":
        from pallas_kernels.quant_matmul import gpu as kernel
    else:
        from pallas_kernels.quant_matmul import tpu as kernel
    sizes = kernel.TileSizes(**OTHER_SIZES[platform]) if product.other_sizes else kernel.DEFAULT
    rounds = product.format == "int8-rounded-x"
    multiply = partial(kernel.quant_matmul, round_x=rounds, dtype="bfloat16", sizes=sizes)
    # As in the layers of a model, whose weights are int8.
    bias = spec((product.num_out,), "bfloat16") if rounds else None
    return jax.jit(multiply).lower(*_arguments(product), bias=bias)


def _look(product: Product, compiled: Any, log: str) -> dict[str, Any]:
    memory, contents = compiled.memory_analysis(), parse(compiled.as_text() or "")
    return {
        "x_bytes": product.num_tokens * product.num_in * 2,
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "kernel_calls": len(kernel_calls(contents)),
        "copies": list(copies_of_size(contents, [_arguments(product)[1].data.shape])),
        "ptxas": ptxas.report(log),
    }
