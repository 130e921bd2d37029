"""Penalties count the right tokens of the history, and change the logits as vLLM and transformers do."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from jaxpage.sampling.penalties import count_history, penalise
from tests.sampling.oracle import Row, make_state, penalised

V = 50
penalised_logits = jax.jit(penalise)
counted = jax.jit(count_history, static_argnums=3)


def arguments(rows: list[Row], max_len: int):
    slots = np.arange(1, len(rows) + 1, dtype=np.int32)
    positions = np.array([r.position for r in rows], np.int32)
    return make_state(rows, V, max_len), *jax.device_put((slots, positions))


def random_row(rng: np.random.Generator, prompt_len: int, output_len: int, **params) -> Row:
    prompt, output = (rng.integers(0, V, n).tolist() for n in (prompt_len, output_len))
    return Row(prompt=prompt, output=output, **params)


# The history is counted in chunks of 256: lengths below, at, between and beyond their ends.
@pytest.mark.parametrize("max_len", [40, 256, 257, 600])
def test_every_token_of_the_history_is_counted_once(max_len):
    rng = np.random.default_rng(max_len)
    lens = [(max_len, 0), (1, max_len - 1), (max_len // 2, max_len // 3), (1, 0)]
    rows = [random_row(rng, *both) for both in lens]
    seen, counts = counted(*arguments(rows, max_len), V)
    for i, row in enumerate(rows):
        np.testing.assert_array_equal(counts[i], np.bincount(row.output, minlength=V)[:V])
        assert set(np.flatnonzero(seen[i])) == set(row.prompt + row.output)


def test_penalties_equal_the_plain_definition():
    rng = np.random.default_rng(0)
    rows = [
        random_row(
            rng,
            *rng.integers(1, 30, 2),
            repetition_penalty=rng.uniform(0.5, 2),
            frequency_penalty=rng.uniform(-2, 2),
            presence_penalty=rng.uniform(-2, 2),
        )
        for _ in range(12)
    ]
    logits = rng.normal(size=(12, V)).astype(np.float32) * 4
    logits[:, ::7] = -np.inf
    got = penalised_logits(logits, *arguments(rows, 64))
    want = [penalised(x, row) for x, row in zip(logits, rows, strict=True)]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_repetition_penalty_equals_that_of_transformers():
    rng = np.random.default_rng(1)
    row = random_row(rng, 10, 15, repetition_penalty=1.7)
    logits = rng.normal(size=(1, V)).astype(np.float32)
    oracle = RepetitionPenaltyLogitsProcessor(penalty=1.7)
    want = oracle(torch.tensor([row.prompt + row.output]), torch.tensor(logits))
    got = penalised_logits(logits, *arguments([row], 64))
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-6)


def test_rows_without_penalties_keep_their_logits_to_the_bit():
    rng = np.random.default_rng(2)
    rows = [random_row(rng, 5, 9), random_row(rng, 5, 9, repetition_penalty=1.3)]
    logits = rng.normal(size=(2, V)).astype(np.float32)
    got = np.asarray(penalised_logits(logits, *arguments(rows, 64)))
    np.testing.assert_array_equal(got[0], logits[0])
    assert (got[1] != logits[1]).any()
