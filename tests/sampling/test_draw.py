"""Draws by groups and among the best tokens follow the softmax, and do not depend on what shares the step."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.sampling.draw import Distributions, _draw_by_groups, draw, draw_among
from jaxpage.sampling.features import bits
from jaxpage.sampling.keys import RANDOM, TOKENS, gumbel_noise, row_keys
from jaxpage.sampling.penalties import PENALTIES
from jaxpage.sampling.sampler import sample
from jaxpage.sampling.truncation import TRUNCATION
from tests.sampling.oracle import Row, make_state

V = 700  # five whole groups of tokens and a part of one
NUM_ROWS = 40_000


jitted_keys = jax.jit(row_keys)


def distributions(num_rows: int, *, best, lowest=-np.inf, temperature=1.0) -> Distributions:
    index = np.zeros(num_rows, np.int32)
    return Distributions(
        best=jax.device_put(np.full(num_rows, best, np.float32)),
        lowest=jax.device_put(np.full(num_rows, lowest, np.float32)),
        temperature=jax.device_put(np.full(num_rows, temperature, np.float32)),
        keys=jitted_keys(np.arange(num_rows, dtype=np.uint32), index, index + 3),
    )


jitted = jax.jit(draw)


def draws(logits: np.ndarray, rows: Distributions) -> np.ndarray:
    """Draws by `rows`, all from the same logits, float32[V]."""
    many = np.broadcast_to(logits, (len(rows.best), V))
    return np.asarray(jitted(many, rows))


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    return np.random.default_rng(0).normal(size=V).astype(np.float32) * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "temperature"),
    [(0.5, 1.5), (0.0, 0.7), (0.0, 1.5), (0.5, 0.7)],
)
def test_groups_are_drawn_by_the_sum_of_their_tokens(logits, temperature, share):
    """And tokens within them by their own probabilities. `share` of the tokens is dropped."""
    # Here, because each process collects all tests and runs only some.
    from scipy import stats

    lowest = np.quantile(logits, share) if share else -np.inf
    rows = distributions(NUM_ROWS, best=logits.max(), lowest=lowest, temperature=temperature)
    found = np.bincount(draws(logits, rows), minlength=V)
    odds = np.where(logits >= np.float32(lowest), np.exp(logits.astype(float) / temperature), 0.0)
    expected = NUM_ROWS * odds / odds.sum()
    assert len(found) == V and (found[expected == 0] == 0).all()
    by_group = [np.add.reduceat(x, np.arange(0, V, 128)) for x in (found, expected)]
    assert stats.chisquare(*by_group).pvalue > 1e-3
    likely = expected >= 5
    rare = (expected > 0) & ~likely
    pooled = [np.append(x[likely], x[rare].sum() + 5) for x in (found, expected)]
    assert stats.chisquare(*pooled).pvalue > 1e-3


@pytest.mark.slow
def test_tiles_of_any_height_draw_the_same(logits):
    """A TPU sees 8 rows at a time."""
    rows = distributions(64, best=logits.max(), lowest=0.0)
    padded = jnp.asarray(np.pad(logits, (0, 768 - V), constant_values=-np.inf))
    many = jnp.broadcast_to(padded, (64, 768)) + jnp.arange(64, dtype=jnp.float32)[:, None] / 1e3
    one, two, eight = (
        jax.jit(lambda x, height=height: _draw_by_groups(x, rows=rows, height=height))(many)
        for height in (1, 2, 8)
    )
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(one, eight)


def test_an_unlikely_group_that_underflows_is_never_drawn():
    logits = np.full(V, -200.0, np.float32)
    logits[300] = 0.0
    rows = distributions(64, best=0.0)
    assert (draws(logits, rows) == 300).all()


def test_among_the_best_the_noise_is_that_of_the_token(logits):
    """So a draw among them is the one that noise for the whole vocabulary gives, and their order does not matter."""
    num_rows, rng = 200, np.random.default_rng(1)
    lowest = np.sort(logits)[-20]
    rows = distributions(num_rows, best=logits.max(), lowest=lowest, temperature=0.8)
    everything = np.broadcast_to(np.arange(V, dtype=np.int32), (num_rows, V))
    noise = jax.jit(gumbel_noise, static_argnums=2)(rows.keys, everything, TOKENS)
    kept = np.where(logits >= lowest, logits / np.float32(0.8), -np.inf)
    want = (kept + np.asarray(noise)).argmax(-1)
    ids = np.stack([rng.permutation(np.argsort(logits)[-30:]) for _ in range(num_rows)])
    found = jax.jit(lambda x, ids: draw_among(x, ids, rows))(logits[ids], ids.astype(np.int32))
    np.testing.assert_array_equal(found, want)


def test_seeded_requests_get_the_tokens_they_always_got():
    """Ids as recorded in November 2026: by groups, among the best tokens, from logits as given and adjusted."""
    logits = (np.random.default_rng(3).normal(size=(12, V)) * 2).astype(np.float32)
    ways = [{}, {"top_k": 40}, {"frequency_penalty": 2.0}, {"top_p": 0.9, "presence_penalty": 2.0}]
    best = logits.argmax(-1).tolist()
    rows = [
        Row(seed=2**31 + i, prompt=[i] * i, output=[best[i]], temperature=0.8 + i / 10, **way)
        for i, way in enumerate(ways * 3)
    ]
    positions = jnp.asarray([row.position for row in rows])
    state = make_state(rows, V) | {"sequence_index": jnp.arange(13) % 3}
    run = jax.jit(partial(sample, num_top_logprobs=0, logprobs_mode="raw"))

    def tokens(*features) -> list[int]:
        slots = jnp.arange(12) + 1
        return run(logits, state, slots, positions, jnp.int32(bits(*features))).token_ids.tolist()

    expected = [9, 293, 566, 398, 120, 134, 677, 97, 560, 454, 210, 563]
    assert tokens(RANDOM) == expected
    expected[1::4] = [124, 637, 276]
    assert tokens(RANDOM, TRUNCATION) == expected
    expected[2] = 571
    assert tokens(RANDOM, TRUNCATION, PENALTIES) == expected


def test_a_row_draws_the_same_in_any_company():
    """Whether other rows need all groups, or what top-k leaves, changes nothing."""
    rng = np.random.default_rng(2)
    logits = (rng.normal(size=(8, V)) * 2).astype(np.float32)
    limits = [{}, {"top_k": 5}, {"top_k": 300}, {"top_p": 0.3}, {"top_p": 0.99}, {"min_p": 0.5}]
    rows = [Row(seed=i, temperature=1.0, **x) for i, x in enumerate(limits)]
    rows += [Row(), Row(seed=7, temperature=0.5, top_k=5, top_p=0.5)]
    state = make_state(rows, V)
    run = jax.jit(partial(sample, num_top_logprobs=0, logprobs_mode="raw"))

    def tokens(index: list[int], features: int) -> list[int]:
        slots = np.array(index, np.int32) + 1
        positions = np.ones(len(index), np.int32)
        found = run(logits[np.array(index)], state, slots, positions, np.int32(features))
        return found.token_ids.tolist()

    every = bits(RANDOM, TRUNCATION)
    together = tokens(list(range(8)), every)
    for index in range(8):
        assert tokens([index] * 8, every) == [together[index]] * 8
    assert tokens([0, 6] * 4, bits(RANDOM)) == [together[0], together[6]] * 4
