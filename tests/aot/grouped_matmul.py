"""Compiles the grouped product for a chip that is not there: `python -m tests.aot.grouped_matmul v6e:2x2`.

Judges nothing: a JSON object a line to the standard output for each program. A process of its own, with the variables
of `jaxpage.aot.topology.environment`.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import environment, mesh_of

ROOT = Path(__file__).parents[2]


def compile_all(target: str) -> list[dict]:
    """What the compiler says of each program. Raises RuntimeError if it ends badly."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMPILATION_", "XLA_"))}
    told = dict(each.split("=", 1) for each in environment(parse_target(target)))
    command = [sys.executable, "-m", "tests.aot.grouped_matmul", target]
    done = subprocess.run(command, cwd=ROOT, env=kept | told, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling for {target} failed:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


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


def main(target: str) -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxpage.ops.experts import choose
    from pallas_kernels.grouped_matmul import cases
    from tests.aot.tpu import copies_of_size

    mesh = mesh_of(parse_target(target), 1)
    place = NamedSharding(mesh, PartitionSpec())

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    for model in cases.MODELS:
        for num_tokens in cases.TOKENS:
            rows, width = num_tokens * model.experts_per_token, model.num_outputs
            arguments = (
                array(rows, model.num_inputs),
                array(model.num_groups, width, model.num_inputs),
                array(model.num_groups, dtype=jnp.int32),
            )
            ours, reason = choose(parse_target(target).chip.platform, *arguments[:2])
            assert reason is None, reason
            for function in (ours, ragged_dot):
                with jax.set_mesh(mesh):  # Pallas asks it for which chip to lower
                    compiled = jax.jit(function).lower(*arguments).compile()
                text, weights = compiled.as_text() or "", arguments[1].shape
                print(
                    json.dumps(
                        {
                            "name": f"{model.name}-{num_tokens}",
                            "function": function.__name__,
                            "weight_bytes": 2 * math.prod(weights),
                            "x_bytes": 2 * rows * model.num_inputs,
                            "out_bytes": 4 * rows * width,
                            "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
                            "kernels": len(
                                re.findall(
                                    r'custom_call_target="(?:tpu_custom_call|mosaic_gpu\w*)"', text
                                )
                            ),
                            "copies": list(copies_of_size(text, [weights])),
                        }
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1])
