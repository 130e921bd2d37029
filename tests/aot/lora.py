"""Low-rank adapters of a batch: layers of models, with the slots of a server."""

from __future__ import annotations

import sys
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

TARGETS = ("v5e:2x2", "v6e:2x2", "tpu7x:2x2x1", "h200")
environment = compiling.ptxas_environment


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Of a model, and its adapters."""

    num_tokens: int
    num_in: int
    num_outs: tuple[int, ...]
    num_slots: int = 8
    rank: int = 64
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        outs = "+".join(map(str, self.num_outs))
        shape = f"{self.num_tokens}x{self.num_in}x{outs}"
        return f"{self.num_slots}-of-rank-{self.rank}-{shape}-{self.dtype}"


def layers(platform: str) -> Iterator[Layer]:
    """Qwen2.5's; then what is odd, and many tokens, which engines leave to XLA. GPUs' kernel reads no float32."""
    odd = "float16" if platform == "gpu" else "float32"
    for num_in, num_outs in (
        (3584, (3584, 512, 512)),
        (3584, (3584,)),
        (3584, (18944, 18944)),
        (18944, (3584,)),
    ):
        yield Layer(num_tokens=32, num_in=num_in, num_outs=num_outs)
    yield Layer(num_tokens=8, num_in=896, num_outs=(896, 128, 128), num_slots=16, rank=16)
    yield Layer(num_tokens=67, num_in=4864, num_outs=(896,), rank=32)
    yield Layer(num_tokens=128, num_in=18944, num_outs=(3584,), num_slots=4, rank=256)
    yield Layer(num_tokens=64, num_in=2048, num_outs=(2048, 256, 256), dtype=odd)
    yield Layer(num_tokens=2048, num_in=3584, num_outs=(3584, 512, 512))


def programs(target: str) -> Iterator[Program]:
    import jax

    platform = parse_target(target).chip.platform
    look, observers = _look, ()
    if platform == "gpu":
        look, observers = _look_on_gpu, (sys.modules[__name__],)
    with jax.set_mesh(mesh_of(parse_target(target), 1)):  # Pallas asks it for which chip to lower
        for layer in layers(platform):
            yield Program(
                name=layer.name,
                lower=partial(_lower, layer, platform),
                look=partial(look, layer),
                observers=observers,
            )


def _arguments(layer: Layer) -> dict[str, Any]:
    columns = layer.num_slots * layer.rank
    return {
        "y": spec((layer.num_tokens, sum(layer.num_outs)), "float32"),
        "x": spec((layer.num_tokens, layer.num_in), layer.dtype),
        "a": spec((columns * len(layer.num_outs), layer.num_in), layer.dtype),
        "b": [spec((num_out, columns), layer.dtype) for num_out in layer.num_outs],
        "slots": spec((layer.num_tokens,), "int32"),
    }


def _lower(layer: Layer, platform: str) -> Any:
    import jax

    if platform == "gpu":
        from pallas_kernels.lora import gpu as kernel
    else:
        from pallas_kernels.lora import tpu as kernel
    adapters = partial(kernel.lora, num_slots=layer.num_slots)
    return jax.jit(adapters).lower(**_arguments(layer))


def _look(layer: Layer, compiled: Any, log: str) -> dict[str, Any]:
    memory, contents = compiled.memory_analysis(), parse(compiled.as_text() or "")
    arguments = _arguments(layer)
    weights = [arguments["a"].shape, *(each.shape for each in arguments["b"])]
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "kernel_calls": len(kernel_calls(contents)),
        "copies": list(copies_of_size(contents, weights)),
    }


def _look_on_gpu(layer: Layer, compiled: Any, log: str) -> dict[str, Any]:
    return _look(layer, compiled, log) | {"ptxas": ptxas.report(log)}
