"""What is computed only if a row needs it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.sampling.row_ops import argmax, first_of, where_any


@pytest.mark.parametrize("needs", [[False, False], [True, False]])
def test_rows_that_need_it_get_the_value(needs):
    logits = jnp.asarray([[1.0, 5.0], [7.0, 2.0]])
    otherwise = jnp.asarray([-1.0, -2.0])
    found = jax.jit(lambda c: where_any(c, lambda: logits.max(-1), otherwise, of=logits))
    np.testing.assert_array_equal(
        found(jnp.asarray(needs)), np.where(needs, [5.0, 7.0], [-1.0, -2.0])
    )


@pytest.mark.parametrize(
    ("platform", "num_rows", "branches"),
    [("cuda", 64, False), ("cuda", 256, True), ("tpu", 64, True), ("cpu", 1, True)],
)
def test_a_gpu_branches_only_around_a_large_array(platform, num_rows, branches):
    def best(condition, logits):
        return where_any(condition, lambda: logits.max(-1), jnp.zeros(num_rows), of=logits)

    shapes = ((num_rows,), jnp.bool_), ((num_rows, 151_936), jnp.float32)
    arrays = [jax.ShapeDtypeStruct(*each) for each in shapes]
    text = jax.export.export(jax.jit(best), platforms=[platform])(*arrays).mlir_module()
    # Only a branch asks whether any row needs it.
    assert ("stablehlo.or" in text) == branches


def test_the_first_of_the_largest():
    logits = jnp.asarray([[0.0, 3.0, 3.0], [-jnp.inf, -jnp.inf, -jnp.inf], [jnp.nan, 1.0, 2.0]])
    found = np.asarray(argmax(logits))
    assert found[:2].tolist() == [1, 0] and 0 <= found[2] < 3
    np.testing.assert_array_equal(first_of(logits, logits.max(-1))[:2], [1, 0])
