"""The hash is JAX's, on host and device, and the noise made of it is Gumbel noise."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.sampling.keys import GROUPS, TOKENS, gumbel_noise, row_keys

SEEDS = [0, 1, 12345, 2**31 - 1, 2**31, 2**32 - 1]


@pytest.mark.parametrize("partitionable", [True, False])
def test_row_keys_are_fold_in_of_the_seed(partitionable):
    rows = list(itertools.product(SEEDS, (0, 1, 16383), (0, 1, 1000, 2**20)))
    keys = np.stack(row_keys_of(rows), axis=1)
    with jax.threefry_partitionable(partitionable):
        for (seed, index, position), key in zip(rows, keys, strict=True):
            expected = jax.random.fold_in(jax.random.key(np.uint32(seed)), index)
            expected = jax.random.fold_in(expected, position)
            np.testing.assert_array_equal(key, jax.random.key_data(expected))


def row_keys_of(rows):
    """For (seed, sequence index, position)."""
    seeds, indices, positions = zip(*rows, strict=True)
    integers = np.array([indices, positions], np.int32)
    return jax.jit(row_keys)(np.array(seeds, np.uint32), *integers)


jitted = jax.jit(gumbel_noise, static_argnums=2)


def noise_of(keys, num_words, stream=TOKENS):
    words = np.broadcast_to(np.arange(num_words, dtype=np.int32), (len(keys[0]), num_words))
    return np.asarray(jitted(keys, words, stream))


@pytest.mark.parametrize("partitionable", [True, False])
def test_noise_is_made_of_the_bits_that_jax_draws_for_the_key(partitionable):
    keys = row_keys_of([(seed, 0, 5) for seed in SEEDS])
    with jax.threefry_partitionable(partitionable):
        noise = noise_of(keys, 1001)
    with jax.threefry_partitionable(True):
        for row in range(len(SEEDS)):
            key = jax.random.wrap_key_data(jnp.stack([word[row] for word in keys]))
            bits = np.asarray(jax.random.bits(key, (1001,), jnp.uint32)).astype(np.float64)
            uniform = (bits + 0.5) * 2.0**-32
            # float32 rounds `uniform`, which is felt near 1, at the small end of the noise.
            np.testing.assert_allclose(noise[row], -np.log(-np.log1p(-uniform)), atol=2e-3)


def test_noise_has_the_gumbel_distribution():
    # Here, because each process collects all tests and runs only some.
    from scipy import stats

    keys = row_keys_of([(seed, 1, 0) for seed in range(8)])
    noise = np.stack([noise_of(keys, 10_000, x) for x in (TOKENS, GROUPS)])
    assert np.isfinite(noise).all()
    assert stats.kstest(noise.ravel(), stats.gumbel_r.cdf).pvalue > 0.01


def test_streams_are_independent():
    # Here, because each process collects all tests and runs only some.
    from scipy import stats

    keys = row_keys_of([(seed, 1, 0) for seed in range(8)])
    tokens, groups = (noise_of(keys, 10_000, x) for x in (TOKENS, GROUPS))
    assert not (tokens == groups).any()
    assert stats.pearsonr(tokens.ravel(), groups.ravel()).pvalue > 0.01


def test_noise_of_a_word_does_not_depend_on_the_other_words_or_rows():
    keys = row_keys_of([(seed, 0, seed) for seed in range(5)])
    wide = noise_of(keys, 300)
    fourth = keys[0][3:4], keys[1][3:4]
    np.testing.assert_array_equal(wide[3:4, :77], noise_of(fourth, 77))
    words = np.array([[299, 5, 120]])
    some = jitted(fourth, words, TOKENS)
    np.testing.assert_array_equal(wide[3:4, words[0]], some)
