"""Compiles the grouped product for a chip that is not there: `python -m tests.aot.grouped_matmul v6e:2x2`.

Judges nothing: a JSON object a line to the standard output for each program. A process of its own, with the variables
of `jaxpage.aot.topology.environment`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import cuda_folder, environment, mesh_of

ROOT = Path(__file__).parents[2]
OTHER_SIZES = {
    "gpu": dict(few_columns=256, few_stages=3, many_stages=2),
    "tpu": dict(few_tile=64, outputs=512),
}


@cache
def compile_all(target: str) -> list[dict]:
    """What the compiler says of each program. Raises RuntimeError if it ends badly."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMPILATION_", "XLA_"))}
    told = dict(each.split("=", 1) for each in environment(parse_target(target)))
    if (folder := cuda_folder()) and target == "h200":
        told |= {"PATH": f"{folder / 'bin'}:{kept['PATH']}", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    command = [sys.executable, "-m", "tests.aot.grouped_matmul", target]
    done = subprocess.run(command, cwd=ROOT, env=kept | told, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling for {target} failed:\n{done.stderr[-4000:]}")
    programs, report = [], []
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            programs.append(json.loads(line) | {"ptxas": "\n".join(report)})
            report = []
        else:  # of the program whose line follows
            report.append(line)
    return programs


def ragged_dot(x, weights, group_sizes):
    """JAX's own, of weights in the same order."""
    import jax.numpy as jnp
    from jax import lax

    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    return lax.ragged_dot_general(
        x, weights, group_sizes, dimensions, preferred_element_type=jnp.float32
    )


def programs(platform: str) -> Iterator[tuple[str, Callable, tuple]]:
    """Name, function, arguments. "Other" is with sizes that are candidates of tuning."""
    import jax.numpy as jnp

    from pallas_kernels.grouped_matmul import cases, tune
    from tests.aot.gpu import spec

    for model, num_tokens in itertools.product(cases.MODELS, cases.TOKENS):
        rows = num_tokens * model.experts_per_token

        def arguments(dtype=jnp.bfloat16, model=model, rows=rows):
            weights = model.num_groups, model.num_outputs, model.num_inputs
            x = spec((rows, model.num_inputs), dtype)
            return x, spec(weights, dtype), spec((model.num_groups,), jnp.int32)

        name = f"{model.name}-{num_tokens}"
        kernel = tune.kernel_of(platform)
        yield f"{name}-ours", kernel.grouped_matmul, arguments()
        yield f"{name}-ragged_dot", ragged_dot, arguments()
        sizes = kernel.TileSizes(**OTHER_SIZES[platform])
        yield f"{name}-other", partial(kernel.grouped_matmul, sizes=sizes), arguments()
        if platform == "tpu":
            yield f"{name}-float32", kernel.grouped_matmul, arguments(jnp.float32)


def main(target: str) -> None:
    import jax

    from tests.aot.tpu import copies_of_size

    platform = parse_target(target).chip.platform
    with jax.set_mesh(mesh_of(parse_target(target), 1)):  # Pallas asks it for which chip to lower
        for name, function, arguments in programs(platform):
            compiled = jax.jit(function).lower(*arguments).compile()
            (x, weights, _), text = arguments, compiled.as_text() or ""
            kernels = re.findall(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu\w*)"', text)
            result = {
                "name": name,
                "weight_bytes": weights.size * weights.dtype.itemsize,
                "x_bytes": x.size * x.dtype.itemsize,
                "out_bytes": 4 * x.shape[0] * weights.shape[1],
                "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
                "kernels": len(kernels),
                "copies": list(copies_of_size(text, [weights.shape])),
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
