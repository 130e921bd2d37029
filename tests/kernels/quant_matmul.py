"""What every implementation of products with quantised weights has to do: its tests subclass `QuantMatmulTests`."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quant_matmul import cases
from pallas_kernels.quant_matmul.cases import Case
from pallas_kernels.quant_matmul.quantized import QuantizedWeight, round_rows


class QuantMatmulTests:
    """`cases` are those that the implementation serves, `fast` the names in the fast core (None: all)."""

    cases: ClassVar[tuple[Case, ...]] = cases.SMALL
    fast: ClassVar[tuple[str, ...] | None] = None
    bound: ClassVar[float]  # of a row's error, see `distance`

    def product(self, x, weight: QuantizedWeight, *, round_x: bool, **options) -> np.ndarray:
        """options: of the implementation."""
        raise NotImplementedError

    def test_the_product_is_that_of_the_rounded_numbers(self, case: Case):
        self.check(case)

    def check(self, case: Case, **options) -> None:
        x, weight = cases.arguments(case)
        out = self.product(x, weight, round_x=case.round_x, **options)
        want = numpy_product(x, weight, case.round_x, rounds_weight=self.rounds_weight(case))
        assert out.shape == want.shape and out.dtype == np.float32
        assert distance(out, want) < self.bound_of(case)

    def bound_of(self, case: Case) -> float:
        return self.bound

    def rounds_weight(self, case: Case) -> bool:
        """Whether each weight is rounded to bfloat16 after scaling."""
        return False

    def check_what_comes_last(self, case: Case, **options) -> None:
        """Bias and cast, of a result of which nothing else has to be rounded."""
        x, weight = cases.arguments(case)
        scale, zero = scale_of_powers_of_two(weight), zero_of_powers_of_two(weight)
        weight = replace(weight, scale=scale, zero=zero)
        bias = jnp.asarray(np.random.default_rng(1).standard_normal(case.num_out), "bfloat16")
        plain = self.product(x, weight, round_x=case.round_x, **options)
        last = dict(bias=bias, dtype=jnp.bfloat16)
        out = self.product(x, weight, round_x=case.round_x, **last, **options)
        want = plain + np.asarray(bias, np.float32)
        np.testing.assert_array_equal(out, want.astype(jnp.bfloat16))

    def check_rows_alone(
        self, case: Case, num_tokens: int = 64, fewer=(slice(0, 1), slice(3, 11)), **changes
    ) -> None:
        """A row is the same to the bit among any number of rows. changes: of the weight."""
        x, weight = cases.arguments(replace(case, num_tokens=num_tokens))
        weight = replace(weight, **{name: change(weight) for name, change in changes.items()})
        out = self.product(x, weight, round_x=case.round_x)
        for rows in fewer:
            alone = self.product(x[rows], weight, round_x=case.round_x)
            np.testing.assert_array_equal(alone, out[rows])


def case_of(name: str) -> Case:
    return next(case for case in cases.SMALL if case.name == name)


@jax.jit
def scale_of_powers_of_two(weight: QuantizedWeight) -> jax.Array:
    """XLA:CPU rounds a product before it is added or not, as it likes; with these there is nothing to round."""
    return jnp.exp2(jnp.round(jnp.log2(weight.scale)))


@jax.jit
def zero_of_powers_of_two(weight: QuantizedWeight) -> jax.Array | None:
    """4 or 8: zero - 8, which a kernel may use instead, is then -4 or 0, and exact as well."""
    return None if weight.zero is None else jnp.uint8(4) << (weight.zero & 1)


def numpy_weight(weight: QuantizedWeight) -> np.ndarray:
    """float64[F, E] of a formula written out, a number at a time."""
    data, scale = np.asarray(weight.data), np.asarray(weight.scale, np.float64)
    if scale.ndim == 1:
        return data.astype(np.float64) * scale[:, None]
    num_out, num_in = weight.shape
    size, out = num_in // scale.shape[0], np.zeros((num_out, num_in))
    for column in range(num_in):
        group = column // size
        if weight.format != "int4":
            out[:, column] = data[:, column].astype(np.float64) * scale[group]
            continue
        byte = data[:, group // 2 * size + column % size].astype(int)
        q = byte // 16 if group % 2 else byte % 16
        zero = 8 if weight.zero is None else np.asarray(weight.zero)[group].astype(int)
        out[:, column] = (q - zero) * scale[group]
    return out


def numpy_product(
    x, weight: QuantizedWeight, round_x: bool, rounds_weight: bool = False
) -> np.ndarray:
    """float64 [T, F]"""
    x, w = np.asarray(x, np.float64), numpy_weight(weight)
    if rounds_weight:
        w = w.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
    if round_x:  # `round_rows` has a test of its own: which way half a step is rounded depends on the scale's last bit
        integers, scale = (np.asarray(each, np.float64) for each in jax.jit(round_rows)(x))
        x = integers * scale
    return x @ w[:, : x.shape[1]].T


def distance(got, want) -> float:
    """The greatest norm of a row's error, in units of the row's norm."""
    error = np.linalg.norm(np.asarray(got, np.float64) - want, axis=1)
    return float((error / np.linalg.norm(want, axis=1)).max())
