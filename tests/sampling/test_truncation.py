"""top_k, top_p and min_p keep the right tokens, both among the 128 best and where bisection must find the end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from jaxpage.sampling import truncation
from jaxpage.sampling.truncation import truncate
from tests.sampling.oracle import truncated_bounds

V = 700
jitted = jax.jit(truncate)


def run(logits, *, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Parameters may be one number or one for each row."""
    logits = np.asarray(logits, np.float32)
    rows = (logits.shape[0],)
    kept = jitted(
        logits,
        temperature=np.ones(rows, np.float32),
        top_k=np.broadcast_to(top_k, rows).astype(np.int32),
        top_p=np.broadcast_to(top_p, rows).astype(np.float32),
        min_p=np.broadcast_to(min_p, rows).astype(np.float32),
    )
    return np.where(logits >= np.asarray(kept.lowest)[:, None], logits, -np.inf)


def random_logits(seed: int, num_rows: int = 4, scale: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(num_rows, V)) * scale).astype(np.float32)


def transformers_says(warper, logits: np.ndarray) -> np.ndarray:
    return warper(torch.zeros((len(logits), 1), dtype=torch.long), torch.tensor(logits)).numpy()


@pytest.mark.parametrize("top_k", [1, 2, 127, 128, 129, 500, V - 1, V])
def test_top_k_equals_transformers(top_k):
    logits = random_logits(top_k)
    want = transformers_says(TopKLogitsWarper(top_k=top_k), logits)
    np.testing.assert_array_equal(run(logits, top_k=top_k), want)


@pytest.mark.parametrize("scale", [0.3, 1.0, 6.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.99, 1.0])
def test_top_p_equals_transformers(top_p, scale):
    logits = random_logits(3, scale=scale)
    want = transformers_says(TopPLogitsWarper(top_p=top_p), logits)
    np.testing.assert_array_equal(run(logits, top_p=top_p), want)


@pytest.mark.parametrize("min_p", [0.0, 0.01, 0.3, 1.0])
def test_min_p_equals_transformers(min_p):
    logits = random_logits(4)
    want = transformers_says(MinPLogitsWarper(min_p=min_p), logits)
    np.testing.assert_array_equal(run(logits, min_p=min_p), want)


combinations = given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.1, 1.0, 3.0, 20.0]),
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 3, 100, 128, 130, 400, 699, 700, 10**6]),
            st.sampled_from([1.0]) | st.floats(1e-4, 0.999),
            # XLA takes subnormal numbers for zero, which turns min_p off.
            st.sampled_from([0.0]) | st.floats(0, 1, width=32, allow_subnormal=False),
        ),
        min_size=4,
        max_size=4,
    ),
    st.booleans(),
)


@settings(max_examples=25, deadline=None)
@combinations
def test_any_combination_equals_the_plain_definition(seed, scale, params, with_ties):
    check_combination(seed, scale, params, with_ties)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@combinations
def test_any_combination_equals_the_plain_definition_in_depth(seed, scale, params, with_ties):
    check_combination(seed, scale, params, with_ties)


def check_combination(seed, scale, params, with_ties):
    logits = random_logits(seed, scale=scale)
    if with_ties:
        logits = np.round(logits / scale) * np.float32(scale)
    logits[:, seed % V] = -np.inf
    top_k, top_p, min_p = map(np.array, zip(*params, strict=True))
    got = run(logits, top_k=top_k, top_p=top_p, min_p=min_p)
    for i, x in enumerate(logits.astype(np.float64)):
        must, may = truncated_bounds(x, top_k[i], np.float32(top_p[i]), np.float32(min_p[i]))
        kept = np.isfinite(got[i])
        must &= np.isfinite(x)
        assert (kept | ~must).all() and (may | ~kept).all()
        np.testing.assert_array_equal(got[i][kept], logits[i][kept])


def test_equal_logits_are_kept_or_dropped_together():
    logits = np.repeat(np.linspace(3, -3, 7), 100)[None]
    assert np.isfinite(run(logits, top_k=5)).sum() == 100
    assert np.isfinite(run(logits, top_k=150)).sum() == 200
    assert np.isfinite(run(logits, top_p=0.5)).sum() == 100
    assert np.isfinite(run(logits, top_p=0.7)).sum() == 200
    equal = np.full((1, V), 1.25)
    assert np.isfinite(run(equal, top_k=3)).all()
    assert np.isfinite(run(equal, top_p=1e-3)).all()
    assert np.isfinite(run(equal, min_p=1.0)).all()


def test_a_logit_one_float_below_the_last_kept_is_dropped():
    logits = np.full((1, V), np.nextafter(np.float32(1), np.float32(0)))
    logits[0, :200] = 1
    assert np.isfinite(run(logits, top_k=150)).sum() == 200
    assert np.isfinite(run(logits, top_p=0.2)).sum() == 200


def test_off_drops_nothing_however_unlikely():
    logits = random_logits(5, scale=40.0)
    logits[:, :3] = -1e30
    np.testing.assert_array_equal(run(logits), logits)
    np.testing.assert_array_equal(run(logits, top_k=V + 5), logits)


def test_the_best_token_is_always_kept():
    logits = random_logits(6)
    got = run(logits, top_k=1, top_p=np.float32(1e-30), min_p=1.0)
    assert (np.isfinite(got).sum(-1) == 1).all()
    np.testing.assert_array_equal(got.argmax(-1), logits.argmax(-1))


def test_masked_logits_stay_masked():
    logits = random_logits(7)
    logits[:, 5:] = -np.inf
    for params in ({"top_k": 200}, {"top_p": 0.999}, {"min_p": 1e-30}, {"top_k": 3}):
        got = run(logits, **params)
        assert np.isneginf(got[:, 5:]).all() and np.isfinite(got[:, :5]).any(-1).all()
    assert np.isneginf(run(np.full((2, V), -np.inf), top_k=200, top_p=0.5, min_p=0.1)).all()


def test_top_p_is_the_share_of_what_top_k_leaves():
    logits = np.log(np.array([[0.4, 0.2, 0.2 - 1e-3, 0.1, 0.1 + 1e-3]]))
    # Of 0.4 and 0.2 the first is two thirds; of all of it 0.4.
    assert np.isfinite(run(logits, top_k=2, top_p=0.6)).sum() == 1
    assert np.isfinite(run(logits, top_p=0.6 - 1e-4)).sum() == 2


def test_zeros_of_either_sign_are_equal():
    logits = np.full((1, V), -1.0)
    logits[0, :200] = np.where(np.arange(200) % 2, 0.0, -0.0)
    assert np.isfinite(run(logits, top_k=150)).sum() == 200


@pytest.mark.slow
def test_searching_row_by_row_finds_what_searching_all_rows_at_once_finds():
    logits = jnp.asarray(random_logits(8))
    weights = jnp.exp(logits)
    target = jnp.asarray([0.9, 0.5, 0.99, 0.1], jnp.float32) * weights.sum(-1)
    low = truncation._order(jnp.full(4, -jnp.inf, jnp.float32))
    high = truncation._order(logits.max(-1)) + 1
    both = [
        truncation._search(logits, weights, target, low, high, one_by_one=one_by_one)
        for one_by_one in (True, False)
    ]
    np.testing.assert_array_equal(*(logits >= t[:, None] for t in both))
    kept = np.asarray(logits >= both[0][:, None])
    masses = np.where(kept, weights, 0).sum(-1)
    smallest = np.where(kept, weights, np.inf).min(-1)
    assert (masses >= target * (1 - 1e-6)).all() and (masses - smallest < target).all()


def test_floats_are_numbered_in_their_order():
    values = np.array([-np.inf, -1e30, -1.5, -1e-30, 0.0, 1e-30, 1.5, 1e30, np.inf], np.float32)
    order = np.asarray(truncation._order(jnp.asarray(values))).astype(np.int64)
    assert (np.diff(order) > 0).all()
    np.testing.assert_array_equal(truncation._float(jnp.asarray(order, jnp.int32)), values)
