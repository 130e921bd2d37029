"""Families made from the shared decoder's parts: transformers' logits and tokens, several devices, int8."""

from __future__ import annotations

import numpy as np
import pytest

from tests import checkpoints, dense_families
from tests.end_to_end import test_parity as parity
from tests.end_to_end.test_tensor_parallel import WAYS, all_answers
from tests.models import test_families as dense

FAST = {("cohere2", 0), ("glm4", 2)}  # of the tests of logits
SHARED = {"plain": (1, 4), "int8 weights": (0, 2), "quantised pool": (2, 2), "preempted": (2, 8)}


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


def shared():
    for family in dense_families.VARIANTS:
        for way in SHARED:
            slow = (family, way) in {("olmo2", "plain"), ("starcoder2", "int8 weights")}
            marks = pytest.mark.slow if slow else pytest.mark.deep
            yield pytest.param(family, way, marks=marks, id=f"{family}-{way}")


@pytest.mark.parametrize(("family", "way"), list(shared()))
def test_tokens_of_several_devices_are_those_of_one(family, way, tmp_path):
    """Of the variants some have heads that are padded or shared."""
    variant, num_devices = SHARED[way]
    path = dense_families.build(family, variant, tmp_path)
    one = all_answers(path, **WAYS[way])
    several = all_answers(path, tensor_parallel_size=num_devices, **WAYS[way])
    rounds = way in ("quantised pool", "int8 weights")
    checkpoints.assert_same_answers(several, one, atol=3e-2 if rounds else 1e-4)
