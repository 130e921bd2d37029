"""The grouped product at the sizes of two models: ours, with other sizes of tiles, and JAX's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
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
OTHER_SIZES = {
    "gpu": dict(few_columns=256, few_stages=3, many_stages=2),
    "tpu": dict(least_tile=64, most_tile=128, outputs=512),
}
environment = compiling.ptxas_environment


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


def programs(target: str) -> Iterator[Program]:
    import jax

    mesh = mesh_of(parse_target(target), 1)
    with jax.set_mesh(mesh):  # Pallas asks it for which chip to lower
        for name, function, arguments in _products(parse_target(target).chip.platform):
            yield Program(
                name=name,
                lower=partial(jax.jit(function).lower, *arguments),
                look=partial(_look, arguments),
            )


def _products(platform: str) -> Iterator[tuple[str, Callable, tuple]]:
    """Name, function, arguments. "Other" is with sizes that are candidates of tuning."""
    import jax.numpy as jnp

    from pallas_kernels.grouped_matmul import cases
    from pallas_kernels.tile_sizes import kernel_of

    for model, num_tokens in itertools.product(cases.MODELS, cases.TOKENS):
        rows = num_tokens * model.experts_per_token

        def arguments(dtype=jnp.bfloat16, model=model, rows=rows):
            weights = model.num_groups, model.num_outputs, model.num_inputs
            x = spec((rows, model.num_inputs), dtype)
            return x, spec(weights, dtype), spec((model.num_groups,), jnp.int32)

        name = f"{model.name}-{num_tokens}"
        kernel = kernel_of("grouped_matmul", platform)
        yield f"{name}-ours", kernel.grouped_matmul, arguments()
        yield f"{name}-ragged_dot", ragged_dot, arguments()
        sizes = kernel.TileSizes(**OTHER_SIZES[platform])
        yield f"{name}-other", partial(kernel.grouped_matmul, sizes=sizes), arguments()
        if platform == "tpu":
            yield f"{name}-float32", kernel.grouped_matmul, arguments(jnp.float32)
        for form, rounds in FORMATS.items():
            of_model = partial(_quantized, rows=rows, model=model, form=form, rounds=rounds)
            yield f"{name}-{form}", partial(_of_rows, kernel.grouped_matmul), of_model()


# Of quantized weights, by format and groups of inputs: whether x is rounded too.
FORMATS = {"int8": True, "int4-128": False, "fp8_e4m3": False, "fp8_e4m3-128": False}


def _quantized(*, rows: int, model: Any, form: str, rounds: bool) -> tuple:
    """Shapes of the arguments of `_of_rows`."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.quant_matmul.quantized import quantize

    format, _, group_size = form.partition("-")
    quantized = jax.eval_shape(
        jax.vmap(lambda weight: quantize(weight, format, int(group_size) if group_size else None)),
        jax.ShapeDtypeStruct((model.num_groups, model.num_outputs, model.num_inputs), jnp.float32),
    )
    weights = jax.tree.map(lambda array: spec(array.shape, array.dtype), quantized)
    x = spec((rows, model.num_inputs), jnp.int8 if rounds else jnp.bfloat16)
    scales = (spec((rows, 1), jnp.float32),) if rounds else ()
    return x, weights, spec((model.num_groups,), jnp.int32), *scales


def _of_rows(product: Callable, x, weights, group_sizes, row_scale=None):
    return product(x, weights, group_sizes, row_scale=row_scale)


def _look(arguments: tuple, compiled: Any, log: str) -> dict[str, Any]:
    import jax

    x, weights, *_ = arguments
    arrays = jax.tree.leaves(weights)
    contents = parse(compiled.as_text() or "")
    return {
        "weight_bytes": sum(array.size * array.dtype.itemsize for array in arrays),
        "x_bytes": x.size * x.dtype.itemsize,
        "out_bytes": 4 * x.shape[0] * weights.shape[1],
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "kernels": len(kernel_calls(contents)),
        # Of quantized weights the data.
        "copies": list(copies_of_size(contents, [arrays[0].shape])),
        "ptxas": ptxas.report(log),
    }
