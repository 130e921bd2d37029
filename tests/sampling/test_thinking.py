"""Thinking budgets: what a history says of the reasoning in it, and when which token is forced."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpage.reasoning import MAX_MARKER_LEN
from jaxpage.sampling.features import bits
from jaxpage.sampling.keys import RANDOM
from jaxpage.sampling.sampler import sample
from jaxpage.sampling.thinking import THINKING, count_thinking, force_end_of_thinking
from tests.sampling.oracle import (
    THINKING_BIT,
    Row,
    forced_token,
    make_state,
    num_thinking,
    with_forced_token,
)

V = 40
START, END = [7], [8]
jitted = jax.jit(force_end_of_thinking)
jitted_count = jax.jit(count_thinking)
jitted_sample = jax.jit(
    partial(sample, processors=(THINKING,)), static_argnames=("num_top_logprobs", "logprobs_mode")
)


def arguments(rows: list[Row], max_len: int = 64):
    slots = np.arange(1, len(rows) + 1, dtype=np.int32)
    positions = np.array([r.position for r in rows], np.int32)
    return make_state(rows, V, max_len), slots, positions


def logits_for(num_rows: int) -> np.ndarray:
    return np.random.default_rng(num_rows).normal(size=(num_rows, V)).astype(np.float32)


def thinker(**params) -> Row:
    markers = {"think_start": START, "think_end": END, "think_forced_end": END}
    return Row(**{"thinking_budget": 2} | markers | params)


def check(rows: list[Row], max_len: int = 64) -> None:
    logits = logits_for(len(rows))
    logits[:, 11] = np.nan
    want = [with_forced_token(x, row) for x, row in zip(logits, rows, strict=True)]
    np.testing.assert_array_equal(jitted(logits, *arguments(rows, max_len)), want)


@pytest.mark.parametrize(
    ("row", "forced"),
    [
        (thinker(output=[1, 2, 3]), None),  # does not reason
        (thinker(prompt=[7], output=[1]), None),
        (thinker(prompt=[7], output=[1, 2]), 8),
        (thinker(prompt=[7], output=[1, 2, 3]), 8),  # beyond it
        (thinker(prompt=[7, 1, 2, 3]), 8),  # spent within the prompt
        (thinker(prompt=[7, 1], output=[2]), 8),  # the prompt's share counts
        (thinker(output=[1, 7, 2]), None),  # starts later
        (thinker(output=[1, 7, 2, 3]), 8),
        (thinker(output=[7, 2, 3, 8]), None),  # over
        (thinker(output=[7, 2, 3, 8, 7, 1]), None),  # a second block starts anew
        (thinker(output=[7, 2, 3, 8, 7, 1, 1]), 8),
        (thinker(output=[7, 2, 7, 1]), None),  # a second start too
        (thinker(thinking_budget=0, prompt=[7]), 8),
        (thinker(thinking_budget=0, prompt=[1]), None),
        (thinker(thinking_budget=-1, prompt=[7, 1, 2, 3]), None),
        (thinker(think_end=[7], prompt=[7, 1, 2, 3]), None),  # the same marker starts and ends
        (thinker(think_start=[7, 9], prompt=[7], output=[9, 1]), None),  # half in the prompt
        (thinker(think_start=[7, 9], prompt=[7], output=[9, 1, 2]), 8),
    ],
)
def test_the_end_is_forced_where_the_budget_is_spent(row, forced):
    assert forced_token(row) == forced
    check([row])


def end_of(output: list[int], forced: list[int], end: list[int], budget: int = 2) -> list[int]:
    """`output` continued by forced tokens as long as there are any."""
    row = thinker(thinking_budget=budget, output=output, think_forced_end=forced, think_end=end)
    logits = np.zeros((1, V), np.float32)
    while len(row.output) < 20:
        best = np.asarray(jitted(logits, *arguments([row])))[0]
        if best.max() == 0:
            break
        row = dataclasses.replace(row, output=[*row.output, int(best.argmax())])
    return row.output[len(output) :]


def test_a_forced_end_of_several_tokens_is_written_one_after_the_other():
    words = [20, 21, 22]
    assert end_of([7, 1, 2], words, end=words) == words
    assert end_of([7, 1, 20], words, end=words) == [21, 22]  # as the row has begun it itself
    assert end_of([7, 20, 21], words, end=words) == [22]
    assert end_of([7, 21, 22], words, end=words) == words
    assert end_of([7, 20, 21, 22], words, end=words) == []
    assert end_of([7, 20, 20, 20], [20, 20, 21], end=[20, 20, 21]) == [21]
    # The parser's marker ends the reasoning, and the forced end if that goes on.
    assert end_of([7, 1, 2], [20, 21, 8], end=[8]) == [20, 21, 8]
    assert end_of([7, 1, 2], [20, 8, 21], end=[8]) == [20, 8]


tokens = st.integers(0, 4)  # few, so that markers and histories meet
marker = st.lists(tokens, min_size=1, max_size=3)


histories = st.builds(
    Row,
    prompt=st.lists(tokens, min_size=1, max_size=8),
    output=st.lists(tokens, max_size=30),
    thinking_budget=st.integers(-1, 5),
    think_start=marker,
    think_end=marker,
    think_forced_end=marker,
)


@settings(max_examples=20, deadline=None)
@given(st.lists(histories, min_size=8, max_size=8))
def test_any_history_gives_what_the_plain_definition_says(rows):
    check(rows)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(histories, min_size=8, max_size=8))
def test_any_history_gives_what_the_plain_definition_says_in_depth(rows):
    check(rows)


# Histories are searched in windows of 320 tokens: lengths below, at, between and beyond their ends.
@pytest.mark.parametrize(
    "max_len", [*(pytest.param(n, marks=pytest.mark.slow) for n in (40, 64, 320, 1000)), 321]
)
@pytest.mark.parametrize("marker_len", [1, pytest.param(3, marks=pytest.mark.slow), MAX_MARKER_LEN])
def test_markers_are_found_anywhere_in_a_long_history(max_len, marker_len):
    rng = np.random.default_rng(max_len)
    start, end = ([i + 1, *[i] * (marker_len - 1)] for i in (10, 20))
    rows = []
    for i in range(60):
        known = rng.integers(30, V, rng.integers(1, max_len + 1) if i % 3 else max_len)
        for marker in (start, end, start)[: rng.integers(0, 4)]:
            if len(known) >= marker_len:
                at = rng.integers(0, len(known) - marker_len + 1)
                known[at : at + marker_len] = marker
        half = int(rng.integers(1, len(known) + 1))
        budget = [0, 100, -1][i % 3]
        parts = {"prompt": known[:half].tolist(), "output": known[half:].tolist()}
        markers = {"think_start": start, "think_end": end, "think_forced_end": end}
        rows.append(Row(thinking_budget=budget, **parts, **markers))
    check(rows, max_len)
    want = [num_thinking(row) if row.thinking_budget >= 0 else -1 for row in rows]
    np.testing.assert_array_equal(jitted_count(*arguments(rows, max_len)), want)
    assert max_len < marker_len or max(want) >= 0


def test_embeddings_of_a_prompt_are_no_markers():
    row = thinker(think_start=[0], prompt=[0, 0, 0], output=[1, 2])
    state, slots, positions = arguments([row])
    logits = logits_for(1)
    assert jitted(logits, state, slots, positions)[0, 8] == 1e9
    state["first_token"] = state["first_token"].at[1].set(3)
    np.testing.assert_array_equal(jitted(logits, state, slots, positions), logits)


def sampled(rows: list[Row], logits: np.ndarray, features: int, mode: str = "raw"):
    return jitted_sample(
        logits,
        *arguments(rows),
        np.int32(features),
        num_top_logprobs=0,
        logprobs_mode=mode,
    )


@pytest.mark.slow
def test_a_forced_token_wins_whatever_else_the_row_asks_for():
    others = {
        "allowed_ids": [1, 2],
        "bad_words": [[8]],
        "logit_bias": {8: -100.0},
        "repetition_penalty": 2.0,
    }
    draws = [{}, {"temperature": 0.1}, {"temperature": 2.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1}]
    rows = [thinker(prompt=[7, 1, 2], seed=i, **others, **draws[i % 3]) for i in range(8)]
    for mode in ("raw", "processed"):
        got = sampled(rows, logits_for(8), -1, mode)
        assert (got.token_ids == 8).all() and np.isfinite(got.logprobs).all()
    assert (got.logprobs == 0).all()


@pytest.mark.slow
def test_rows_beside_one_that_is_forced_sample_what_they_would_without_it():
    rows = [Row(seed=i, temperature=[0.0, 1.0][i % 2]) for i in range(8)]
    logits = logits_for(8)
    alone = sampled(rows, logits, bits(RANDOM))
    rows[3] = thinker(prompt=[7, 1, 2])
    rows[4] = thinker(seed=4, output=[7])
    mixed = sampled(rows, logits, bits(RANDOM) | THINKING_BIT)
    assert mixed.token_ids[3] == 8 != alone.token_ids[3]
    keep = np.arange(8) != 3
    for name in ("token_ids", "logprobs", "ranks"):
        want, got = (np.asarray(getattr(x, name))[keep] for x in (alone, mixed))
        np.testing.assert_array_equal(got, want)
