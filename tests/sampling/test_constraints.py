"""Masks of one bit per token, and what they, bad words, min_tokens and logit_bias do to logits."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpage.sampling.constraints import (
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    constrain,
    is_set,
    pack_mask,
)
from pallas_kernels.token_mask.xla import unpack_mask
from tests.sampling.oracle import Row, constrained, make_state

V = 45
jitted = jax.jit(constrain)
unpack = jax.jit(unpack_mask, static_argnames="vocab_size")


def run(rows: list[Row], logits: np.ndarray) -> np.ndarray:
    """Of steps of four rows, so that tests share programs: the rest are padding."""
    num_rows, rows = len(rows), rows + [Row()] * (4 - len(rows))
    logits = np.pad(logits, ((0, 4 - num_rows), (0, 0)))
    slots = np.arange(1, len(rows) + 1, dtype=np.int32)
    positions = np.array([r.position for r in rows], np.int32)
    state = make_state(rows, logits.shape[1])
    return np.asarray(jitted(logits, state, slots, positions))[:num_rows]


def logits_for(num_rows: int) -> np.ndarray:
    return np.random.default_rng(num_rows).normal(size=(num_rows, V)).astype(np.float32)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_packed_mask_holds_exactly_its_ids(data):
    vocab_size = data.draw(st.sampled_from([1, 32, 33, 100]))
    ids = data.draw(st.sets(st.integers(0, vocab_size - 1)))
    mask = pack_mask(ids, vocab_size)
    assert mask.dtype == np.uint32 and mask.shape == (-(-vocab_size // 32),)
    bits = np.asarray(unpack(mask[None], vocab_size=vocab_size))[0]
    assert bits.shape == (vocab_size,)
    assert set(np.flatnonzero(bits)) == ids
    every = np.arange(vocab_size, dtype=np.int32)
    one_by_one = jax.jit(is_set)(mask[None], every, np.zeros_like(every))
    np.testing.assert_array_equal(one_by_one, bits)


@pytest.mark.parametrize("ids", [[-1], [V], [0, 10**9]])
def test_ids_outside_the_vocabulary_are_refused(ids):
    with pytest.raises(ValueError, match=r"0\.\.44"):
        pack_mask(ids, V)


def test_only_allowed_ids_keep_their_logit():
    logits = logits_for(2)
    got = run([Row(allowed_ids=[3, 31, 32, 44]), Row()], logits)
    assert set(np.flatnonzero(np.isfinite(got[0]))) == {3, 31, 32, 44}
    np.testing.assert_array_equal(got[1], logits[1])


@pytest.mark.parametrize(
    ("output", "banned"),
    [([], False), ([5], False), ([5, 6], True), ([1, 5, 6], True), ([5, 6, 1], False)],
)
def test_a_bad_word_is_banned_only_where_the_output_ends_with_its_beginning(output, banned):
    row = Row(prompt=[9], output=output, bad_words=[[5, 6, 7]])
    got = run([row], logits_for(1))[0]
    assert np.isneginf(got[7]) == banned
    assert np.isfinite(np.delete(got, 7)).all()


def test_a_bad_word_that_began_in_the_prompt_is_not_recognised():
    got = run([Row(prompt=[5], output=[6], bad_words=[[5, 6, 7]])], logits_for(1))
    assert np.isfinite(got).all()


def test_as_many_and_as_long_bad_words_as_fit_are_honoured():
    long = list(range(MAX_BAD_WORD_LEN))
    words = [[40], long, *([20 + i % 20, 44] for i in range(MAX_BAD_WORDS - 2))]
    row = Row(output=long[:-1], bad_words=words)
    assert set(np.flatnonzero(np.isneginf(run([row], logits_for(1))[0]))) == {40, long[-1]}


def test_stop_ids_are_banned_until_min_tokens_were_sampled():
    rows = [Row(prompt=[1, 2], output=[3] * n, min_tokens=2, stop_ids=[4, 33]) for n in range(4)]
    got = run(rows, logits_for(4))
    for row, banned in enumerate([{4, 33}, {4, 33}, set(), set()]):
        assert set(np.flatnonzero(np.isneginf(got[row]))) == banned


def test_a_bias_is_added_and_does_not_bring_back_a_forbidden_id():
    logits = logits_for(1)
    got = run([Row(allowed_ids=[1, 2], logit_bias={2: 3.5, 7: 100.0})], logits)[0]
    assert got[1] == logits[0, 1] and got[2] == logits[0, 2] + np.float32(3.5)
    assert np.isneginf(got[7])


def test_as_many_biases_as_fit_are_honoured():
    logits = np.zeros((1, MAX_LOGIT_BIAS + 3), np.float32)
    got = run([Row(logit_bias={i: i / 8 for i in range(MAX_LOGIT_BIAS)})], logits)[0]
    np.testing.assert_array_equal(got, [*(i / 8 for i in range(MAX_LOGIT_BIAS)), 0, 0, 0])


tokens = st.integers(0, 5)  # few, so that words and histories meet


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.builds(
            Row,
            prompt=st.lists(tokens, min_size=1, max_size=4),
            output=st.lists(tokens, max_size=6),
            min_tokens=st.integers(0, 4),
            stop_ids=st.lists(tokens, max_size=2),
            allowed_ids=st.none() | st.lists(tokens, min_size=1),
            logit_bias=st.dictionaries(tokens, st.floats(-5, 5, width=32)),
            bad_words=st.lists(st.lists(tokens, min_size=1, max_size=4), max_size=5),
        ),
        min_size=3,
        max_size=3,
    )
)
def test_everything_together_equals_the_plain_definition(rows):
    logits = logits_for(len(rows))[:, :40]
    want = [constrained(x, row) for x, row in zip(logits, rows, strict=True)]
    np.testing.assert_allclose(run(rows, logits), want, rtol=1e-6, atol=1e-6)
