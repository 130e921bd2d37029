"""The hash is JAX's, on host and device, and the noise made of it is Gumbel noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.sampling.keys import GROUPS, TOKENS, gumbel_noise, row_keys

SEEDS = [0, 1, 12345, 2**31 - 1, 2**31, 2**32 - 1]


@pytest.mark.parametrize("partitionable", [True, False])
def test_row_keys_are_fold_in_of_the_seed(partitionable):
    pairs = [(seed, index) for seed in SEEDS for index in (0, 1, 16383)]
    keys = row_keys_of(pairs)
    with jax.threefry_partitionable(partitionable):
        for (seed, index), key in zip(pairs, keys, strict=True):
            expected = jax.random.fold_in(jax.random.key(np.uint32(seed)), index)
            np.testing.assert_array_equal(key, jax.random.key_data(expected))


def row_keys_of(pairs):
    """uint32[R, 2] for (seed, sequence index)."""
    seeds, indices = zip(*pairs, strict=True)
    return jax.jit(row_keys)(np.array(seeds, np.uint32), np.array(indices, np.int32))


jitted = jax.jit(gumbel_noise, static_argnums=3)


def noise_of(keys, positions, num_words, stream=TOKENS):
    words = np.broadcast_to(np.arange(num_words, dtype=np.int32), (len(positions), num_words))
    return np.asarray(jitted(keys, positions, words, stream))


@pytest.mark.parametrize("partitionable", [True, False])
def test_noise_is_made_of_the_bits_that_jax_draws_for_the_folded_key(partitionable):
    keys = row_keys_of([(seed, 0) for seed in SEEDS])
    positions = np.array([0, 1, 2, 1000, 2**20, 5], np.int32)
    with jax.threefry_partitionable(partitionable):
        noise = noise_of(keys, positions, 1001)
    with jax.threefry_partitionable(True):
        for row in range(len(SEEDS)):
            key = jax.random.fold_in(jax.random.wrap_key_data(keys[row]), positions[row])
            bits = np.asarray(jax.random.bits(key, (1001,), jnp.uint32)).astype(np.float64)
            uniform = (bits + 0.5) * 2.0**-32
            # float32 rounds `uniform`, which is felt near 1, at the small end of the noise.
            np.testing.assert_allclose(noise[row], -np.log(-np.log1p(-uniform)), atol=2e-3)


def test_noise_has_the_gumbel_distribution():
    # Here, because each process collects all tests and runs only some.
    from scipy import stats

    keys = row_keys_of([(seed, 1) for seed in range(8)])
    noise = np.stack([noise_of(keys, np.zeros(8, np.int32), 10_000, x) for x in (TOKENS, GROUPS)])
    assert np.isfinite(noise).all()
    assert stats.kstest(noise.ravel(), stats.gumbel_r.cdf).pvalue > 0.01


def test_streams_are_independent():
    # Here, because each process collects all tests and runs only some.
    from scipy import stats

    keys = row_keys_of([(seed, 1) for seed in range(8)])
    tokens, groups = (noise_of(keys, np.zeros(8, np.int32), 10_000, x) for x in (TOKENS, GROUPS))
    assert not (tokens == groups).any()
    assert stats.pearsonr(tokens.ravel(), groups.ravel()).pvalue > 0.01


def test_noise_of_a_word_does_not_depend_on_the_other_words_or_rows():
    keys = row_keys_of([(seed, 0) for seed in range(5)])
    positions = np.arange(5, dtype=np.int32)
    wide = noise_of(keys, positions, 300)
    np.testing.assert_array_equal(wide[3:4, :77], noise_of(keys[3:4], positions[3:4], 77))
    words = np.array([[299, 5, 120]])
    some = jitted(keys[3:4], positions[3:4], words, TOKENS)
    np.testing.assert_array_equal(wide[3:4, words[0]], some)
