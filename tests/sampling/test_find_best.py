"""The search that GPUs make in the place of XLA's sort, on any platform, against `lax.top_k` itself."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from jax import lax

from jaxpage.sampling.truncation import _best_by_groups, find_best


def check(x, k):
    best, ids = jax.jit(partial(_best_by_groups, k=k))(x)
    expected, expected_ids = lax.top_k(x, k)
    np.testing.assert_array_equal(best, expected)
    np.testing.assert_array_equal(ids, expected_ids)


@pytest.mark.parametrize(
    ("width", "k"), [(151_936, 128), (32_000, 20), (4096, 128), (5000, 512), (300, 128)]
)
def test_values_ids_and_the_order_of_equal_ones(width, k):
    """Of few different values, so that equal ones lie on both sides of every border; and of all different ones."""
    rng = np.random.default_rng(width)
    check(rng.integers(0, 50, (3, width)).astype(np.float32), k)
    check(rng.standard_normal((3, width)).astype(np.float32), k)


def test_rows_with_fewer_numbers_than_are_asked_for():
    rng = np.random.default_rng(0)
    x = np.full((2, 20_000), -np.inf, np.float32)
    x[0, rng.integers(0, 20_000, 30)] = 1.0
    x[1, 19_999] = 0.0
    check(x, 128)


def test_ids_are_of_the_row_whatever_it_holds():
    """With NaN they mean nothing else."""
    x = np.full((2, 20_001), np.nan, np.float32)
    x[0, ::7] = 1.0
    _, ids = jax.jit(partial(_best_by_groups, k=128))(x)
    assert ((ids >= 0) & (ids < x.shape[1])).all()


def test_a_cpu_has_xla_s_own():
    x = np.random.default_rng(0).standard_normal((2, 9000)).astype(np.float32)
    text = jax.jit(partial(find_best, k=7)).lower(x).as_text()
    assert "top_k" in text and "reduce" not in text
