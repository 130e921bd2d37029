"""What is drawn, against the distribution that follows from the definitions."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.sampling.features import FEATURES, bits
from jaxpage.sampling.sampler import sample
from tests.sampling import oracle
from tests.sampling.oracle import Row, make_state

V = 48
NUM_DRAWS = 200_000  # of each case
AT_ONCE = 4000
ALL = bits(*FEATURES)
NUM_CASES = 16


def random_case(seed: int) -> tuple[np.ndarray, Row]:
    """Logits and a request of many parameters; its truncation is not decided by rounding."""
    for attempt in range(100):
        rng = np.random.default_rng([seed, attempt])
        logits = (rng.normal(size=V) * rng.uniform(0.5, 3)).astype(np.float32)
        row = Row(
            prompt=rng.integers(0, V, 6).tolist(),
            output=rng.integers(0, V, 5).tolist(),
            temperature=float(np.float32(rng.uniform(0.4, 2))),
            top_k=int(rng.choice([0, 3, 10, 30])),
            top_p=float(np.float32(rng.choice([1.0, 0.5, 0.9]))),
            min_p=float(np.float32(rng.choice([0.0, 0.05, 0.3]))),
            presence_penalty=float(rng.choice([0.0, 0.5])),
            frequency_penalty=float(rng.choice([0.0, -0.3])),
            repetition_penalty=float(rng.choice([1.0, 1.5])),
            allowed_ids=None if rng.random() < 0.5 else rng.permutation(V)[:30].tolist(),
            logit_bias={int(i): float(rng.normal()) for i in rng.integers(0, V, 3)},
            bad_words=[[int(rng.integers(0, V))]],
            stop_ids=[3],
            min_tokens=int(rng.choice([0, 20])),
        )
        scaled = processed(logits, row)
        must, may = oracle.truncated_bounds(scaled, row.top_k, row.top_p, row.min_p)
        if (must == may).all():
            return logits, row
    raise AssertionError("no clear case")


def processed(logits: np.ndarray, row: Row) -> np.ndarray:
    return oracle.penalised(oracle.constrained(logits, row), row) / np.float32(row.temperature)


def probabilities(logits: np.ndarray, row: Row) -> np.ndarray:
    scaled = processed(logits, row)
    kept, _ = oracle.truncated_bounds(scaled, row.top_k, row.top_p, row.min_p)
    odds = np.where(kept, np.exp(scaled - scaled.max()), 0.0)
    return odds / odds.sum()


@jax.jit
def draw(logits, state, slots, positions, first_seed):
    seeds = first_seed + jnp.arange(AT_ONCE + 1, dtype=jnp.uint32)
    spread = {k: jnp.broadcast_to(v[1:2], (AT_ONCE + 1, *v.shape[1:])) for k, v in state.items()}
    choose = partial(sample, num_top_logprobs=0, logprobs_mode="raw")
    return choose(logits, spread | {"seed": seeds}, slots, positions, jnp.int32(ALL)).token_ids


def draws(logits: np.ndarray, row: Row, count: int) -> np.ndarray:
    """int[V]: how often each token is drawn, with as many seeds."""
    state = make_state([row], V)
    many = jnp.broadcast_to(jnp.asarray(logits)[None], (AT_ONCE, V))
    slots = jnp.arange(AT_ONCE, dtype=jnp.int32) + 1
    positions = jnp.full(AT_ONCE, row.position, jnp.int32)
    counts = np.zeros(V, np.int64)
    for first in range(0, count, AT_ONCE):
        found = draw(many, state, slots, positions, jnp.uint32(first))
        counts += np.bincount(np.asarray(found), minlength=V)
    return counts


@pytest.mark.slow
@pytest.mark.usefixtures("production_compiler")
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(i, marks=pytest.mark.deep) for i in range(1, NUM_CASES))]
)
def test_what_is_drawn_is_what_is_defined(seed):
    # Here, because each process collects all tests and runs only some.
    from scipy import stats

    logits, row = random_case(seed)
    expected = probabilities(logits, row) * NUM_DRAWS
    observed = draws(logits, row, NUM_DRAWS)
    assert (observed[expected == 0] == 0).all()
    # The tail in one class, as a chi-square wants five of each.
    rare = (expected > 0) & (expected < 5)
    assert ((observed > 0) >= (expected > 20)).all()
    keep = expected >= 5
    observed = np.append(observed[keep], observed[rare].sum())
    expected = np.append(expected[keep], expected[rare].sum())
    used = expected > 0
    if used.sum() > 1:
        p_value = stats.chisquare(observed[used], expected[used], sum_check=False).pvalue
        assert p_value > 1e-4 / NUM_CASES
