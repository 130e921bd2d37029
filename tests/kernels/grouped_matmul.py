"""What every implementation of the grouped product has to do: its tests subclass `GroupedMatmulTests`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import cases, reference
from pallas_kernels.grouped_matmul.cases import Case
from pallas_kernels.quant_matmul.reference import dequantize


class GroupedMatmulTests:
    """`cases` are those that the implementation serves, `fast` the names in the fast core (None: all)."""

    cases: ClassVar[tuple[Case, ...]] = cases.SMALL
    fast: ClassVar[tuple[str, ...] | None] = None

    def multiply(self, **arguments) -> np.ndarray:
        """x, weights and group_sizes, with integers their scales → float32[T, F]"""
        raise NotImplementedError

    def test_the_product_is_the_definition_s(self, case: Case):
        """Rows of no group, where x or its scale is NaN, are 0."""
        arguments = cases.arguments(case)
        check(case, self.multiply(**arguments), arguments, self.rounds_weights(case))

    def rounds_weights(self, case: Case) -> bool:
        """Whether each quantized weight is rounded to bfloat16 after scaling."""
        return False

    def check_rows_alone(
        self, dtype: str, rows, before, lengths=(None,), exact=False, **options
    ) -> None:
        """A row is the same to the bit alone with its expert, in other places of a tile, beside other rows, and beside
        experts of NaN. rows: (row, its group); before: numbers of rows of its own group; lengths: of x; exact: of
        numbers whose sums need no rounding; options: of the case.
        """
        sizes = dict(group_sizes=(5, 70, 0, 53), num_rows=130, num_inputs=512)
        case = Case(name="", dtype=dtype, **sizes, **options)
        arguments = cases.arguments(case)
        if exact:
            arguments["x"] = jnp.round(arguments["x"] * 4) / 4
            arguments["weights"] = jax.tree.map(_exact, arguments["weights"])
        together = self.multiply(**arguments)
        for row, group in rows:
            for count, length in zip(before, lengths * len(before), strict=False):
                moved = replace(case, group_sizes=(0,) * 4, num_rows=length or case.num_rows)
                x = np.array(cases.arguments(moved, seed=row + count)["x"])
                x[:count], x[count] = 1.5, np.asarray(arguments["x"])[row]
                weights = jax.tree.map(partial(_alone, group), arguments["weights"])
                group_sizes = np.where(np.arange(4) == group, count + 1, 0).astype(np.int32)
                # In NumPy until here, as JAX would compile each step for each number of rows.
                given = dict(x=x, weights=weights, group_sizes=group_sizes)
                alone = self.multiply(**jax.tree.map(jnp.asarray, given))
                np.testing.assert_array_equal(alone[count], together[row])


def _alone(group: int, array: jax.Array) -> np.ndarray:
    """NaN in all other groups; integers have scales that are NaN."""
    alone = np.array(array)
    if jnp.issubdtype(array.dtype, jnp.floating):
        alone[np.arange(len(alone)) != group] = np.nan
    return alone


def _exact(array: jax.Array) -> jax.Array:
    """Few bits of floats; of scales, which are float32, one."""
    if array.dtype == jnp.float32:
        return jnp.exp2(jnp.round(jnp.log2(array)))
    return jnp.round(array * 4) / 4 if array.dtype == jnp.bfloat16 else array


def check(case: Case, got: np.ndarray, arguments: dict, rounds_weights: bool = False) -> None:
    with jax.default_matmul_precision("highest"):
        sizes = arguments["group_sizes"]  # known to the program: the definition slices by them
        others = {name: x for name, x in arguments.items() if name != "group_sizes"}
        if rounds_weights:
            weights = jax.jit(jax.vmap(dequantize))(others["weights"])
            others["weights"] = weights.astype(jnp.bfloat16)
        definition = partial(reference.grouped_matmul, group_sizes=sizes)
        expected = jax.jit(lambda others: definition(**others))(others)
    assert got.dtype == np.float32
    if case.dtype == "int8":
        np.testing.assert_array_equal(got, expected)
    # Products of bfloat16 are exact in float32; sums of 128 to 640 of them are not.
    scale = 1.0 if case.format is None else max(1.0, float(np.nanmax(np.abs(expected))) / 50)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3 * scale)
    assert (got[sum(case.group_sizes) :] == 0).all()


def case_of(name: str) -> Case:
    return next(case for case in cases.SMALL if case.name == name)
