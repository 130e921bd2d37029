"""What a head reads beside tokens."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxpage.runner.eagle_drafting import given_after


def test_an_embedding_is_given_to_the_token_before_it_in_its_row():
    """Rows of three tokens, one and two; what begins the second and third is not behind the row before, nor is the
    first token behind the last.
    """
    values = jnp.arange(12.0).reshape(6, 2)
    where = jnp.array([True, False, True, True, True, True])
    found, is_given = given_after((values, where), jnp.array([0, 0, 0, 1, 2, 2]))
    np.testing.assert_array_equal(is_given, [False, True, False, False, True, False])
    np.testing.assert_array_equal(found[jnp.array([1, 4])], values[jnp.array([2, 5])])
