"""The sampler of a vocabulary of 151,936, compiled for a TPU and an H200 that are not there: it sorts no vocabulary."""

from __future__ import annotations

import math

import pytest

from jaxpage.aot.hlo import parse
from tests.aot.compiling import missing, seen
from tests.aot.sampling import ROWS, TARGETS, VOCAB, sorted_shapes

pytestmark = pytest.mark.aot

LOGITS_BYTES = 4 * ROWS * VOCAB


def compiled(target: str) -> dict:
    if reason := missing(target):
        pytest.skip(reason)
    (program,) = seen("sampling", target).programs
    return program


@pytest.mark.parametrize("name", TARGETS)
def test_no_vocabulary_is_sorted(name):
    """Only the maxima of its groups, on an H200; a TPU's compiler has an operation of its own."""
    program = compiled(name)
    # Top logprobs; and what truncation looks at, in a branch for original logits and one for adjusted ones.
    assert len(program["top_k"]) == (3 if name.startswith("v6e") else 0)
    # What is sorted besides: places of a scatter, the tokens that rows have had.
    widest = max((sizes[-1] for sizes in program["sorted"] if len(sizes) == 2), default=0)
    assert widest == (2560 if name == "h200" else 0), program
    assert all(math.prod(sizes) <= ROWS * 2560 for sizes in program["sorted"]), program


@pytest.mark.parametrize("name", TARGETS)
def test_temporaries_are_a_few_copies_of_the_logits(name):
    """Processed logits, counts for penalties, the weights of what is kept."""
    assert compiled(name)["temp_bytes"] < 5 * LOGITS_BYTES


def test_a_sort_of_the_vocabulary_would_be_found():
    text = """
      ROOT %sort.1 = (f32[64,151936]{1,0}, s32[64,151936]{1,0}) sort(%x, %iota), dimensions={1}
      %sort.2 = s32[64,128]{1,0:T(8,128)} sort(%y), dimensions={1}
    """
    assert sorted_shapes(parse(text)) == [(64, 151936), (64, 128)]
