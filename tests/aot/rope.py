"""Rotary embeddings of the queries and keys of models, and of what is odd."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from jaxpage.aot.contents import copies_of_size, kernel_calls
from jaxpage.aot.hlo import parse
from jaxpage.aot.targets import parse_target
from jaxpage.aot.topology import mesh_of
from pallas_kernels.rope.cases import Case
from tests.aot.program import Program
from tests.aot.shapes import spec

TARGETS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")

MODELS = (
    Case(name="qwen2.5-0.5b", heads=(14, 2, 2), head_dim=64, half=32),
    Case(name="qwen2.5-7b", heads=(28, 4, 4)),
    Case(name="llama-70b", heads=(64, 8, 8)),
    Case(name="gemma3-4b", heads=(8, 4, 4), head_dim=256, half=128),
    Case(name="phi4-mini", heads=(24, 8, 8), half=48),
    Case(name="glm4-9b", heads=(32, 2, 2), half=32, interleaved=True),
    Case(name="phi3-mini", heads=(32, 32, 32), head_dim=96, half=48),
    Case(name="qwen2.5-7b-float32", heads=(28, 4, 4), dtype="float32"),
)
NUM_TOKENS = (1, 256, 2048)


def calls() -> Iterator[Case]:
    for case in MODELS:
        for num_tokens in NUM_TOKENS:
            yield replace(case, name=f"{case.name}-{num_tokens}", num_tokens=num_tokens)


def programs(target: str) -> Iterator[Program]:
    import jax

    with jax.set_mesh(mesh_of(parse_target(target), 1)):  # Pallas asks it for which chip to lower
        for case in calls():
            yield Program(
                name=case.name,
                lower=partial(_lower, case),
                look=partial(_look, case),
                observers=(sys.modules[__name__],),
            )


def _lower(case: Case) -> Any:
    import jax

    from pallas_kernels.rope.tpu import split_and_rotate

    angles = spec((case.num_tokens, 1, case.half), case.dtype)
    joined = spec((case.num_tokens, sum(case.heads) * case.head_dim), case.dtype)

    def rotate(joined, cos, sin):
        """[T, N * D] each, as attention takes them. The result of a program XLA would lay out in another way."""
        options = {"interleaved": case.interleaved}
        parts = split_and_rotate(joined, cos, sin, heads=case.heads, **options)
        return [x.reshape(case.num_tokens, -1) for x in parts]

    return jax.jit(rotate).lower(joined, angles, angles)


def _shapes(case: Case) -> list[tuple[int, int]]:
    """Of what is given, and of the queries; those of few keys would be other arrays', too."""
    heads = (sum(case.heads), case.heads[0])
    return [(case.num_tokens, each * case.head_dim) for each in heads]


def _look(case: Case, compiled: Any, log: str) -> dict[str, Any]:
    memory, contents = compiled.memory_analysis(), parse(compiled.as_text() or "")
    return {
        "kernel_calls": len(kernel_calls(contents)),
        "num_tokens": case.num_tokens,
        "given_bytes": memory.argument_size_in_bytes,
        "copies": list(copies_of_size(contents, _shapes(case))),
        "temp_bytes": memory.temp_size_in_bytes,
    }
