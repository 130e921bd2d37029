"""The sampler of a vocabulary of 151,936, compiled for a TPU and an H200 that are not there: it sorts no vocabulary.

Run as a module it compiles for one target, with the variables of `jaxpage.aot.topology.environment`.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import pytest

from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import environment, mesh_of, missing_compiler

pytestmark = pytest.mark.aot

ROWS, VOCAB = 64, 151_936
LOGITS_BYTES = 4 * ROWS * VOCAB


def compile_for(name: str) -> dict:
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxpage.kv_groups import group_layers
    from jaxpage.runner.step import StepSpec, abstract_request_state
    from jaxpage.sampling.sampler import sample

    mesh = mesh_of(parse_target(name), 1)
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
    )
    state = jax.tree.map(lambda x: array(x.shape, x.dtype), abstract_request_state(spec))
    integers = array((ROWS,), jnp.int32)
    program = partial(sample, num_top_logprobs=20, logprobs_mode="raw")
    with jax.set_mesh(mesh):
        compiled = (
            jax.jit(program)
            .lower(
                array((ROWS, VOCAB), jnp.float32), state, integers, integers, array((), jnp.int32)
            )
            .compile()
        )
    text = compiled.as_text() or ""
    return {
        "sorted": [[int(n) for n in sizes.split(",")] for sizes in sorts(text)],
        "top_k": re.findall(r'custom_call_target="\w*TopK\w*"', text),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def sorts(text: str) -> list[str]:
    """Shapes of what is sorted in an HLO text."""
    return re.findall(r"= \(?\w+\[([\d,]+)\][^=]* sort\(", text)


@cache
def compiled(name: str) -> dict:
    if reason := missing_compiler(parse_target(name).chip.platform):
        pytest.skip(reason)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMPILATION_", "XLA_"))}
    told = dict(each.split("=", 1) for each in environment(parse_target(name)))
    command = [sys.executable, "-m", "tests.aot.test_sampling", name]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=kept | told, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["v6e:2x2", "h200"])
def test_no_vocabulary_is_sorted(name):
    """Only the maxima of its groups, on an H200; a TPU's compiler has an operation of its own."""
    program = compiled(name)
    assert len(program["top_k"]) == (2 if name.startswith("v6e") else 0)
    # What is sorted besides: places of a scatter, the tokens that rows have had.
    widest = max((sizes[-1] for sizes in program["sorted"] if len(sizes) == 2), default=0)
    assert widest == (2560 if name == "h200" else 0), program
    assert all(math.prod(sizes) <= ROWS * 2560 for sizes in program["sorted"]), program


@pytest.mark.parametrize("name", ["v6e:2x2", "h200"])
def test_temporaries_are_a_few_copies_of_the_logits(name):
    """Processed logits, counts for penalties, odds, the weights of what is kept: 6 on a v6e, 4 on an H200."""
    assert compiled(name)["temp_bytes"] < 7 * LOGITS_BYTES


def test_a_sort_of_the_vocabulary_would_be_found():
    text = """
      ROOT %sort.1 = (f32[64,151936]{1,0}, s32[64,151936]{1,0}) sort(%x, %iota), dimensions={1}
      %sort.2 = s32[64,128]{1,0:T(8,128)} sort(%y), dimensions={1}
    """
    assert sorts(text) == ["64,151936", "64,128"]


if __name__ == "__main__":
    print(json.dumps(compile_for(sys.argv[1])))
