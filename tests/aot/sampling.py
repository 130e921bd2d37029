"""The sampler of a vocabulary of 151,936."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from jaxpage.aot import hlo
from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import mesh_of
from tests.aot.program import Program

TARGETS = ("v6e:2x2", "h200")
ROWS, VOCAB = 64, 151_936
_TOP_K = re.compile(r'custom_call_target="\w*TopK\w*"')


def programs(target: str) -> Iterator[Program]:
    yield Program(name="sample", lower=partial(_lower, target), look=_look)


def _lower(target: str) -> Any:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxpage.kv_groups import group_layers
    from jaxpage.runner.slots import abstract_request_state
    from jaxpage.runner.spec import StepSpec
    from jaxpage.sampling.sampler import sample

    mesh = mesh_of(parse_target(target), 1)
    place = NamedSharding(mesh, PartitionSpec())

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    spec = StepSpec(
        block_size=64,
        max_model_len=1024,
        num_blocks_per_row=16,
        groups=group_layers((None,), 1024),
        num_slots=ROWS + 1,
        vocab_size=VOCAB,
        hidden_size=64,
        dtype=jnp.bfloat16,
        decode_steps=1,
        num_top_logprobs=20,
        logprobs_mode="raw",
        num_scored=64,
    )
    state = jax.tree.map(lambda x: array(x.shape, x.dtype), abstract_request_state(spec))
    integers = array((ROWS,), jnp.int32)
    program = partial(sample, num_top_logprobs=20, logprobs_mode="raw")
    with jax.set_mesh(mesh):
        return jax.jit(program).lower(
            array((ROWS, VOCAB), jnp.float32), state, integers, integers, array((), jnp.int32)
        )


def _look(compiled: Any, log: str) -> dict[str, Any]:
    contents = hlo.parse(compiled.as_text() or "")
    return {
        "sorted": sorted_shapes(contents),
        "top_k": [each.name for each in contents if _TOP_K.search(each.line)],
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def sorted_shapes(contents: hlo.Program) -> list[tuple[int, ...]]:
    return [each.arrays[0].shape for each in contents if each.opcode == "sort"]
