"""What every implementation of products has to do: its tests subclass `MatmulTests`."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import cases
from pallas_kernels.matmul.cases import Case
from tests.kernels.quant_matmul import distance


class MatmulTests:
    cases: ClassVar[tuple[Case, ...]] = cases.SMALL
    fast: ClassVar[tuple[str, ...] | None] = None  # names in the fast core; None: all

    def product(self, **arguments) -> np.ndarray:
        """arguments: x, weight, bias, dtype, and options of the implementation."""
        raise NotImplementedError

    def test_the_product_is_that_of_the_numbers(self, case: Case):
        self.check(case)

    def check(self, case: Case, **options) -> None:
        """Nothing is rounded but float32's sums."""
        arguments = cases.arguments(case)
        out, want = self.product(**arguments, **options), numpy_product(**arguments)
        assert out.shape == want.shape and out.dtype == np.float32
        assert distance(out, want) < 5e-6

    @pytest.mark.parametrize("name", ["bias-in-the-kernel", "bias-after-the-parts"])
    def test_the_cast_comes_last(self, name):
        (case,) = (case for case in self.cases if case.name == name)
        arguments = cases.arguments(case)
        out = self.product(**arguments, dtype=jnp.bfloat16)
        want = self.product(**arguments)
        np.testing.assert_array_equal(out, want.astype(jnp.bfloat16))


def numpy_product(x, weight, bias) -> np.ndarray:
    """float64 [T, F]"""
    out = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    return out if bias is None else out + np.asarray(bias, np.float64)
