"""The whole sampler: distributions, order of operations, logprobs, and independence of what shares the step."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpage.sampling.features import FEATURES, bits
from jaxpage.sampling.keys import RANDOM
from jaxpage.sampling.logprobs import LOGPROBS, TOP_LOGPROBS
from jaxpage.sampling.penalties import PENALTIES
from jaxpage.sampling.sampler import Sampled, sample, stops
from jaxpage.sampling.thinking import THINKING
from jaxpage.sampling.truncation import TRUNCATION
from tests.sampling import oracle
from tests.sampling.oracle import Row, make_state

V = 40
ALL = bits(*FEATURES) | oracle.THINKING_BIT


@partial(jax.jit, static_argnames=("num_top_logprobs", "logprobs_mode"))
def jitted(*args, num_top_logprobs, logprobs_mode):
    return sample(
        *args,
        num_top_logprobs=num_top_logprobs,
        logprobs_mode=logprobs_mode,
        processors=(THINKING,),
    )


def run(
    rows: list[Row],
    logits: np.ndarray,
    features: int = ALL,
    *,
    mode: str = "raw",
    top: int | None = None,
    slots: list[int] | None = None,
) -> Sampled:
    """rows[i] lives in slot i + 1; `slots` chooses which of them form the step, and 0 is padding.

    Without `slots` the step is padded to a multiple of 8 rows, so that tests share programs.
    """
    num_rows = len(rows) if slots is None else len(slots)
    rows = rows + [Row()] * (-len(rows) % 8)
    if slots is None:
        slots = list(range(1, num_rows + 1)) + [0] * (len(rows) - num_rows)
        logits = np.pad(logits, ((0, len(rows) - num_rows), (0, 0)))
    positions = [0 if slot == 0 else rows[slot - 1].position for slot in slots]
    result = jitted(
        logits,
        make_state(rows, logits.shape[1]),
        np.array(slots, np.int32),
        np.array(positions, np.int32),
        np.int32(features),
        num_top_logprobs=logits.shape[1] if top is None else top,
        logprobs_mode=mode,
    )
    return jax.tree.map(lambda x: np.asarray(x)[:num_rows], result)


def distribution(sampled: Sampled) -> np.ndarray:
    """[R, V] log-probabilities by id, from the top logprobs of the whole vocabulary."""
    by_id = np.full(sampled.top_logprobs.shape, np.nan)
    np.put_along_axis(by_id, sampled.top_token_ids, sampled.top_logprobs, axis=1)
    return by_id


def logits_for(num_rows: int, scale: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(num_rows)
    return (rng.normal(size=(num_rows, V)) * scale).astype(np.float32)


def assert_equal(got: Sampled, want: Sampled) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)


ids = st.integers(0, V - 1)
any_row = st.builds(
    Row,
    prompt=st.lists(ids, min_size=1, max_size=20),
    output=st.lists(ids, max_size=20),
    seed=st.integers(0, 2**32 - 1),
    temperature=st.just(0.0) | st.floats(0.1, 2),
    top_k=st.sampled_from([0, 1, 5, 39, 40, 100]),
    top_p=st.just(1.0) | st.floats(0.01, 0.99),
    # XLA takes subnormal numbers for zero, which turns min_p off.
    min_p=st.just(0.0) | st.floats(0, 1, width=32, allow_subnormal=False),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.5, 2),
    min_tokens=st.integers(0, 25),
    stop_ids=st.lists(ids, max_size=3),
    allowed_ids=st.none() | st.lists(ids, min_size=8, unique=True),
    logit_bias=st.dictionaries(ids, st.floats(-10, 10, width=32), max_size=4),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=2), max_size=2),
    thinking_budget=st.integers(-1, 10),
    think_start=st.lists(ids, min_size=1, max_size=2),
    think_end=st.lists(ids, min_size=1, max_size=2),
    think_forced_end=st.lists(ids, min_size=1, max_size=2),
)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}])
def test_the_best_token_stays_at_any_temperature(limit):
    rows = [Row(temperature=t, **limit) for t in np.linspace(0.1, 2, 32).tolist()]
    logits = logits_for(32, scale=2)
    for some in (slice(i, i + 8) for i in range(0, 32, 8)):  # with a program that other tests have
        np.testing.assert_array_equal(
            run(rows[some], logits[some]).token_ids, logits[some].argmax(-1)
        )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(any_row, min_size=3, max_size=3))
def test_a_token_is_drawn_from_what_the_plain_definition_leaves(rows):
    logits = logits_for(3, scale=2)
    sampled = run(rows, logits, mode="processed")
    got = distribution(sampled)
    for i, row in enumerate(rows):
        want = oracle.penalised(oracle.constrained(logits[i], row), row)
        want = oracle.with_forced_token(want, row)
        if not np.isfinite(want).any():
            assert sampled.token_ids[i] == 0
            continue
        if row.temperature > 0:
            want = want / np.float32(row.temperature)
            limits = (row.top_k, np.float32(row.top_p), np.float32(row.min_p))
            must, may = oracle.truncated_bounds(want, *limits)
            kept = np.isfinite(got[i])
            assert (kept | ~must | np.isneginf(want)).all() and (may | ~kept).all()
            want = np.where(kept, want, -np.inf)
        else:
            assert want[sampled.token_ids[i]] >= want.max() - 1e-4
        np.testing.assert_allclose(got[i], oracle.log_softmax(want), rtol=1e-4, atol=1e-4)
        assert np.isfinite(want[sampled.token_ids[i]])


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 6, "top_p": 0.8},
        {"temperature": 1.5, "min_p": 0.2, "repetition_penalty": 1.4},
    ],
)
def test_frequencies_over_seeds_and_positions_are_the_probabilities(params):
    # Here, because each process collects all tests and runs only some.
    from scipy import stats

    num_rows = 3000
    rows = [Row(seed=i % 120, output=[0] * (i // 120), **params) for i in range(num_rows)]
    logits = np.repeat(logits_for(1, scale=1.5)[:, :12], num_rows, axis=0)
    sampled = run(rows, logits, mode="processed")
    probs = np.exp(distribution(sampled))
    expected = probs.sum(0)
    observed = np.bincount(sampled.token_ids, minlength=12)
    assert (observed[expected == 0] == 0).all()
    possible = expected > 0
    p_value = stats.chisquare(observed[possible], expected[possible], sum_check=False).pvalue
    assert p_value > 1e-3


def test_greedy_rows_take_the_best_token_and_the_first_of_equals():
    logits = logits_for(3)
    logits[1, [7, 30]] = 9.0
    rows = [Row(), Row(), Row(top_k=3, top_p=0.5, min_p=0.9)]
    for features in (bits(LOGPROBS), ALL):
        sampled = run(rows, logits, features)
        np.testing.assert_array_equal(sampled.token_ids, logits.argmax(-1))
        np.testing.assert_array_equal(sampled.ranks, [1, 2, 1])


def test_a_greedy_row_is_unmoved_by_random_rows_beside_it():
    logits = logits_for(2)
    rows = [Row(), Row(temperature=1.0, top_k=1)]
    np.testing.assert_array_equal(run(rows, logits).token_ids, logits.argmax(-1))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["raw", "temperature", "processed"])
def test_features_that_no_row_needs_change_nothing(mode):
    logits = logits_for(4)
    greedy = [Row(seed=i) for i in range(4)]
    random = [Row(seed=i, temperature=0.5 + i) for i in range(4)]
    logprobs = bits(LOGPROBS, TOP_LOGPROBS)
    for rows, needed in (greedy, logprobs), (random, bits(RANDOM) | logprobs):
        assert_equal(run(rows, logits, needed, mode=mode), run(rows, logits, ALL, mode=mode))


def test_a_row_samples_the_same_in_any_company():
    rng = np.random.default_rng(0)
    rows = [
        Row(
            prompt=rng.integers(0, V, 5).tolist(),
            output=rng.integers(0, V, i).tolist(),
            seed=i,
            temperature=1.0,
            top_k=[0, 10][i % 2],
            top_p=[1.0, 0.9, 0.5][i % 3],
            presence_penalty=i / 8,
        )
        for i in range(8)
    ]
    logits = logits_for(8, scale=2)
    together = run(rows, logits)
    for order in ([3], [8, 7, 6, 5, 4, 3, 2, 1], [0, 2, 0, 0, 4, 0, 5, 1], [6] * 8):
        index = np.array(order)
        some = run(rows, logits[np.maximum(index - 1, 0)], slots=order)
        live = index > 0
        want = together.token_ids[index[live] - 1]
        np.testing.assert_array_equal(some.token_ids[live], want)
        np.testing.assert_array_equal(some.ranks[live], together.ranks[index[live] - 1])
        close = together.logprobs[index[live] - 1]
        np.testing.assert_allclose(some.logprobs[live], close, rtol=1e-6)


@pytest.mark.slow
def test_seed_and_position_change_the_draw_and_the_rest_of_the_history_does_not():
    logits = np.zeros((200, V), np.float32)
    base = [Row(prompt=[i % V, 3], temperature=1.0) for i in range(200)]
    assert len(set(run(base, logits).token_ids)) == 1
    seeds = [dataclasses.replace(row, seed=i) for i, row in enumerate(base)]
    positions = [dataclasses.replace(row, output=[1] * (i % 50)) for i, row in enumerate(base)]
    assert len(set(run(seeds, logits).token_ids)) > V / 2
    assert len(set(run(positions, logits).token_ids)) > V / 4


@pytest.mark.parametrize("mode", ["raw", "temperature"])
def test_logprobs_and_ranks_are_those_of_the_named_distribution(mode):
    logits = logits_for(5)
    temperatures = [0.0, 0.3, 1.0, 1.7, 2.0]
    rows = [
        Row(seed=i, temperature=t, top_k=9, logit_bias={3: 6.0}, allowed_ids=[*range(20)])
        for i, t in enumerate(temperatures)
    ]
    sampled = run(rows, logits, mode=mode)
    divisor = np.array([t if mode == "temperature" and t else 1.0 for t in temperatures])
    want = oracle.log_softmax(logits / divisor[:, None])
    own = np.take_along_axis(want, sampled.token_ids[:, None], 1)
    np.testing.assert_allclose(sampled.logprobs, own[:, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(sampled.ranks, (want >= own).sum(-1))
    order = np.argsort(-want, axis=-1, kind="stable")
    np.testing.assert_array_equal(sampled.top_token_ids, order)
    best = np.take_along_axis(want, order, 1)
    np.testing.assert_allclose(sampled.top_logprobs, best, rtol=1e-5, atol=1e-6)


def test_processed_logprobs_are_renormalised_over_what_is_left():
    rows = [Row(temperature=0.8, top_k=4, seed=i) for i in range(3)]
    sampled = run(rows, logits_for(3), mode="processed")
    np.testing.assert_allclose(np.exp(distribution(sampled)).sum(-1), 1, rtol=1e-5)
    assert (np.isfinite(distribution(sampled)).sum(-1) == 4).all()
    assert (sampled.ranks <= 4).all()


@pytest.mark.slow
def test_no_top_logprobs_are_empty_arrays():
    sampled = run([Row()], logits_for(1), top=0)
    assert sampled.top_token_ids.shape == sampled.top_logprobs.shape == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["raw", "temperature", "processed"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_token_ids_are_in_the_vocabulary_whatever_the_logits(mode, temperature, bad):
    logits = logits_for(3)
    logits[0, 5] = bad
    logits[1] = bad
    rows = [Row(temperature=temperature, top_k=k, top_p=0.9) for k in (0, 3, 5)]
    for features in (ALL, ALL & ~bits(TRUNCATION)):
        sampled = run(rows, logits, features, mode=mode, top=4)
        assert ((sampled.token_ids >= 0) & (sampled.token_ids < V)).all()
        alone = run(rows, logits[2:], features, mode=mode, top=4, slots=[3])
        np.testing.assert_array_equal(sampled.token_ids[2:], alone.token_ids)
        if np.isnan(bad) and mode == "raw":
            assert np.isnan(sampled.logprobs[:2]).all() and np.isfinite(sampled.logprobs[2])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_without_logprobs_the_tokens_are_the_same_and_nan_is_told(temperature, bad):
    logits = logits_for(3)
    logits[1, 5] = bad
    rows = [Row(seed=i, temperature=temperature) for i in range(3)]
    asked = bits(RANDOM) if temperature else 0
    sampled = run(rows, logits, asked)
    np.testing.assert_array_equal(sampled.token_ids, run(rows, logits).token_ids)
    np.testing.assert_array_equal(sampled.logprobs, [0, np.nan, 0])
    np.testing.assert_array_equal(sampled.ranks, 0)


def test_padding_rows_are_harmless():
    sampled = run([Row(temperature=1.0)], logits_for(8), slots=[0, 1, 0, 0, 0, 0, 0, 0])
    assert ((sampled.token_ids >= 0) & (sampled.token_ids < V)).all()


def test_one_program_serves_every_request():
    logits = logits_for(8)
    rows = [Row() for _ in range(8)]
    run(rows, logits, 0)
    before = jitted._cache_size()
    run([Row(temperature=1.0, top_k=3), Row(allowed_ids=[1], min_p=0.2), *rows[2:]], logits, ALL)
    run(rows, logits, bits(PENALTIES), slots=[2, 1, 0, 3, 4, 0, 0, 5])
    assert jitted._cache_size() == before


@pytest.mark.parametrize(
    "platform", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("cpu", "cuda")), "tpu"]
)
def test_the_sampler_lowers_for_every_platform(platform):
    state, rows = make_state([Row()], V), jnp.zeros(2, jnp.int32)
    function = jax.jit(partial(sample, num_top_logprobs=2, logprobs_mode="raw"))
    exported = jax.export.export(function, platforms=[platform])(
        jnp.zeros((2, V)), state, rows, rows, jnp.int32(0)
    )
    assert exported.platforms == (platform,)


def test_a_stop_id_ends_only_the_sequence_that_has_it():
    state = make_state([Row(stop_ids=[0, 33]), Row(stop_ids=[39]), Row()], V)
    for token, want in (0, [1, 0, 0]), (33, [1, 0, 0]), (39, [0, 1, 0]), (5, [0, 0, 0]):
        token_ids = jnp.full(3, token, jnp.int32)
        got = stops(token_ids, state, jnp.asarray([1, 2, 3], jnp.int32))
        np.testing.assert_array_equal(got, np.array(want, bool))


@pytest.mark.parametrize(("top", "mode"), [(V + 1, "raw"), (-1, "raw"), (1, "logits")])
def test_impossible_static_choices_are_refused(top, mode):
    with pytest.raises(ValueError, match="num_top_logprobs=|logprobs_mode="):
        run([Row()], logits_for(1), top=top, mode=mode)
