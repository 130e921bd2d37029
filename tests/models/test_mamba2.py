"""Mamba-2 layers: what is computed in another way on a TPU. Logits are in the tests of families."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpage.models.mamba2 import of_columns_by_product
from pallas_kernels.mamba2.reference import of_columns


@pytest.mark.parametrize(("heads", "num_columns"), [(1, 64), (6, 384), (64, 4096)])
def test_a_product_repeats_to_the_bit(heads, num_columns):
    rng = np.random.default_rng(heads)
    x = rng.standard_normal((3, 2, heads)) * 2.0 ** rng.integers(-40, 40, (3, 2, heads))
    x = x.astype(np.float32)
    found = np.asarray(of_columns_by_product(x, num_columns))
    np.testing.assert_array_equal(found, np.asarray(of_columns(x, num_columns)))
    np.testing.assert_array_equal(found, np.repeat(x, num_columns // heads, axis=-1))
