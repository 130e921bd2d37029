"""Compiles the products with quantised weights for chips that are not there, in a process of its own:
`python -m tests.aot.quant_matmul v6e:2x2`, or `h200`.

Knows what to compile, and judges nothing: for each program one line of JSON goes to the standard output. jax must not
have been imported with another platform, hence the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from jaxpage.aot.hlo import copies_of_size, kernel_calls
from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import cuda_folder, environment, mesh_of
from tests.aot import gpu

ROOT = Path(__file__).parents[2]
FORMATS = ("int8", "int8-rounded-x", "int4", "int4-symmetric", "fp8_e4m3")
TOKENS = (8, 64, 2048)
OTHER_SIZES = {
    "pallas_kernels.quant_matmul.gpu": dict(smem_kib=200, most_stages=8, enough_programs=264),
    "pallas_kernels.quant_matmul.tpu": dict(tile_tokens=512, tile_out=1024, several=4),
}


@dataclass(frozen=True, kw_only=True)
class Program:
    """One product of a model's layer."""

    name: str
    num_tokens: int
    num_in: int
    num_out: int
    format: str  # of FORMATS
    group_size: int = 128
    other_sizes: bool = False  # than the defaults: candidates of tuning


def programs() -> Iterator[Program]:
    """The layers of a model that read and give most, in all formats; all layers of all models in two."""
    from pallas_kernels.quant_matmul.cases import LAYERS

    for model, layers in LAYERS.items():
        for num_in, num_out in layers:
            every = (num_in, num_out) in (LAYERS["7b"][2], LAYERS["7b"][3], LAYERS["0.5b"][2])
            for format in FORMATS if every else ("int8", "int4"):
                for num_tokens in TOKENS if every else (8, 2048):
                    name = f"{model}-{num_in}x{num_out}-{format}-{num_tokens}"
                    shape = dict(num_in=num_in, num_out=num_out, num_tokens=num_tokens)
                    yield Program(name=name, format=format, **shape)
    for format in ("int8", "int4"):  # as much as there is room for
        shape = dict(num_in=28672, num_out=8192, num_tokens=2048)
        yield Program(name=f"70b-28672x8192-{format}-2048", format=format, **shape)
    for group_size in (32, 64):
        for num_tokens in (8, 2048):
            shape = dict(num_in=2048, num_out=2048, num_tokens=num_tokens)
            name = f"3b-int4-groups-of-{group_size}-{num_tokens}"
            yield Program(name=name, format="int4", group_size=group_size, **shape)
    for format, num_tokens in (("int8-rounded-x", 8), ("int8-rounded-x", 2048), ("int4", 2048)):
        shape = dict(num_in=3584, num_out=37888, num_tokens=num_tokens, format=format)
        yield Program(name=f"other-sizes-{format}-{num_tokens}", other_sizes=True, **shape)


def arguments(program: Program) -> tuple:
    """x and the weight as shapes."""
    from pallas_kernels.quant_matmul.quantized import QuantizedWeight

    num_in, num_out = program.num_in, program.num_out
    x = gpu.spec((program.num_tokens, num_in), "bfloat16")
    if not program.format.startswith("int4"):
        dtype = "float8_e4m3fn" if program.format == "fp8_e4m3" else "int8"
        scale = gpu.spec((num_out,), "float32")
        return x, QuantizedWeight(data=gpu.spec((num_out, num_in), dtype), scale=scale)
    groups = -(-num_in // program.group_size // 2) * 2
    weight = QuantizedWeight(
        data=gpu.spec((num_out, groups // 2 * program.group_size), "uint8"),
        scale=gpu.spec((groups, num_out), "float32"),
        zero=None if program.format == "int4-symmetric" else gpu.spec((groups, num_out), "uint8"),
    )
    return x, weight


@cache
def compile_all(target: str) -> list[dict]:
    """What the compiler says of each program, compiled in another process. Raises RuntimeError if it ends badly."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMPILATION_", "XLA_"))}
    told = dict(each.split("=", 1) for each in environment(parse_target(target)))
    if (folder := cuda_folder()) and target == "h200":
        told |= {"PATH": f"{folder / 'bin'}:{kept['PATH']}", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    command = [sys.executable, "-m", "tests.aot.quant_matmul", target]
    done = subprocess.run(command, cwd=ROOT, env=kept | told, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling for {target} failed:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main(target: str, chosen: str = "") -> None:
    """Compiles the programs that have `chosen` in their names."""
    import jax

    with jax.set_mesh(mesh_of(parse_target(target), 1)):
        for program in programs():
            if chosen not in program.name:
                continue
            if target == "h200":
                gpu.compile_one(program.name, partial(lowered, program, target))
            else:
                compile_for_tpu(program, target)


def lowered(program: Program, target: str):
    import jax

    if target == "h200":
        from pallas_kernels.quant_matmul import gpu as kernel
    else:
        from pallas_kernels.quant_matmul import tpu as kernel
    sizes = (
        kernel.TileSizes(**OTHER_SIZES[kernel.__name__]) if program.other_sizes else kernel.DEFAULT
    )
    options = dict(round_x=program.format == "int8-rounded-x", sizes=sizes)
    product = jax.jit(partial(kernel.quant_matmul, **options))
    return product.lower(*arguments(program))


def compile_for_tpu(program: Program, target: str) -> None:
    begin = time.perf_counter()
    compiled = lowered(program, target).compile()
    text, weight = compiled.as_text() or "", arguments(program)[1]
    result = {
        "name": program.name,
        "seconds": round(time.perf_counter() - begin, 2),
        "x_bytes": program.num_tokens * program.num_in * 2,
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "kernel_calls": len(kernel_calls(text)),
        "copies": list(copies_of_size(text, [weight.data.shape])),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
