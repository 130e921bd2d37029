"""Families made from the shared decoder's parts: transformers' logits and tokens."""

from __future__ import annotations

import numpy as np
import pytest

from tests import checkpoints, dense_families
from tests.end_to_end import test_parity as parity
from tests.models import test_families as dense

FAST = {("cohere2", 0), ("glm4", 2)}  # of the tests of logits


def cases(fast: set, shallow: tuple[int, ...]):
    """`fast` ones have no mark, the variants `shallow` are slow tests, the others deep ones."""
    for family, variant in dense_families.CASES:
        marks = pytest.mark.slow if variant in shallow else pytest.mark.deep
        if (family, variant) in fast:
            marks = ()
        yield pytest.param(family, variant, marks=marks, id=f"{family}-{variant}")


@pytest.mark.parametrize(("family", "variant"), list(cases(FAST, shallow=(0, 1, 2))))
def test_float32_logits_equal_transformers(family, variant, tmp_path):
    path = dense_families.build(family, variant, tmp_path)
    token_ids = dense.tokens(1, 150)
    expected = checkpoints.torch_logits(path, token_ids)
    assert dense.rms(expected) > 1  # else a mistake would not show
    found = dense.logits(dense.loaded(path), token_ids)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("family", "variant"), list(cases(set(), shallow=())))
def test_greedy_tokens_equal_transformers(family, variant, tmp_path):
    path = dense_families.build(family, variant, tmp_path)
    parity.check_greedy_tokens(path, parity.prompts_of(parity.PROMPT_LENS))


@pytest.mark.deep
@pytest.mark.parametrize("family", dense_families.VARIANTS)
def test_bfloat16_logits_are_as_close_to_float32_as_those_of_torch(family, tmp_path):
    def built(*case):
        return dense_families.build(*case, tmp_path)

    dense.test_bfloat16_logits_are_as_close_to_float32_as_those_of_torch((family, 0), built)


@pytest.mark.deep
@pytest.mark.parametrize("family", dense_families.VARIANTS)
def test_gradient_is_finite_and_equals_a_finite_difference(family, tmp_path):
    def built(*case):
        return dense_families.build(*case, tmp_path)

    dense.test_gradient_is_finite_and_equals_a_finite_difference((family, 0), built)
