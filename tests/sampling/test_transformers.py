"""Each parameter against transformers' logits processor of the same meaning, and all of them together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers import LogitsProcessor

from jaxpage.sampling.constraints import pack_mask
from jaxpage.sampling.features import FEATURES, bits
from jaxpage.sampling.sampler import Sampled, sample
from tests.sampling.oracle import Row, make_state

V = 48
NUM_ROWS = 16
EOS = [3, 29]
ALL = bits(*FEATURES)


@jax.jit
def sampled(logits, state, positions) -> Sampled:
    slots = jnp.arange(1, NUM_ROWS + 1, dtype=jnp.int32)
    choose = partial(sample, num_top_logprobs=V, logprobs_mode="processed")
    return choose(logits, state, slots, positions, jnp.int32(ALL))


def our_logprobs(logits: np.ndarray, rows: list[Row], **masks: np.ndarray) -> np.ndarray:
    """float32[R, V] of what is sampled from; greedy rows sample the best. `masks` replace parts of the state."""
    state = make_state(rows, V) | masks
    positions = np.array([row.position for row in rows], np.int32)
    found = sampled(logits, state, positions)
    logprobs = np.full(logits.shape, np.nan)
    np.put_along_axis(logprobs, np.asarray(found.top_token_ids), np.asarray(found.top_logprobs), 1)
    greedy = [index for index, row in enumerate(rows) if row.temperature == 0]
    best = np.asarray(found.token_ids)[greedy]
    np.testing.assert_array_equal(best, logprobs[greedy].argmax(-1))
    return logprobs


def their_logprobs(
    logits: np.ndarray, rows: list[Row], processors: Callable[[Row], list[LogitsProcessor]]
) -> np.ndarray:
    logprobs = []
    for row, row_logits in zip(rows, logits, strict=True):
        ids, scores = torch.tensor([row.prompt + row.output]), torch.tensor(row_logits[None])
        for processor in processors(row):
            scores = processor(ids, scores)
        logprobs.append(torch.log_softmax(scores, -1)[0].numpy())
    return np.stack(logprobs)


def histories(seed: int) -> list[tuple[list[int], list[int]]]:
    """Prompts of ids from 24 on, outputs of a few ids below, so that no word begins in a prompt."""
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(24, V, rng.integers(1, 9)).tolist(), rng.integers(0, 6, length).tolist())
        for length in range(NUM_ROWS)
    ]


def logits_for(seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(NUM_ROWS, V)) * 2).astype(np.float32)


WORDS = [[7], [3], [1, 2], [5, 5], [0, 1, 2], [4, 3]]
BIASES = {0: 2.5, 5: -1.25, 30: 100.0, 47: -100.0}
BANNED = [0, 5, 17, 40]
ALLOWED = [1, 2, 3, 4, 20, 29, 47]


def min_tokens_of(row: Row) -> LogitsProcessor:
    return transformers.MinNewTokensLengthLogitsProcessor(len(row.prompt), row.min_tokens, EOS)


def bad_words_of(row: Row) -> LogitsProcessor:
    return transformers.NoBadWordsLogitsProcessor(row.bad_words, eos_token_id=None)


def biases_of(row: Row) -> LogitsProcessor:
    biases = [[[token_id], bias] for token_id, bias in row.logit_bias.items()]
    return transformers.SequenceBiasLogitsProcessor(biases)


def allowed_of(row: Row) -> LogitsProcessor:
    return transformers.PrefixConstrainedLogitsProcessor(lambda _, ids: row.allowed_ids, 1)


# Name -> (the fields of a row, what transformers has for it).
CASES: dict[str, tuple[dict, Callable[[Row], list[LogitsProcessor]]]] = {
    "temperature": (
        {"temperature": 0.7},
        lambda row: [transformers.TemperatureLogitsWarper(0.7)],
    ),
    "top_k": ({"top_k": 7}, lambda row: [transformers.TopKLogitsWarper(7)]),
    "top_p": ({"top_p": 0.8}, lambda row: [transformers.TopPLogitsWarper(0.8)]),
    "min_p": ({"min_p": 0.1}, lambda row: [transformers.MinPLogitsWarper(0.1)]),
    "repetition_penalty": (
        {"repetition_penalty": 1.7},
        lambda row: [transformers.RepetitionPenaltyLogitsProcessor(1.7)],
    ),
    "min_tokens": ({"min_tokens": 6, "stop_ids": EOS}, lambda row: [min_tokens_of(row)]),
    "min_tokens at the beginning": (
        {"min_tokens": 1, "stop_ids": EOS},
        lambda row: [
            transformers.SuppressTokensAtBeginLogitsProcessor(EOS, begin_index=len(row.prompt))
        ],
    ),
    "bad_words": ({"bad_words": WORDS}, lambda row: [bad_words_of(row)]),
    "logit_bias": ({"logit_bias": BIASES}, lambda row: [biases_of(row)]),
    "bans": (
        {"logit_bias": dict.fromkeys(BANNED, -np.inf)},
        lambda row: [transformers.SuppressTokensLogitsProcessor(BANNED)],
    ),
    "allowed_token_ids": ({"allowed_ids": ALLOWED}, lambda row: [allowed_of(row)]),
    "all": (
        {
            "allowed_ids": [*range(0, V, 2), *EOS, 1, 5],
            "bad_words": WORDS,
            "min_tokens": 9,
            "stop_ids": EOS,
            "logit_bias": BIASES,
            "repetition_penalty": 0.8,
            "temperature": 1.4,
            "min_p": 0.01,
            "top_k": 12,
            "top_p": 0.9,
        },
        lambda row: [
            allowed_of(row),
            bad_words_of(row),
            min_tokens_of(row),
            biases_of(row),
            transformers.RepetitionPenaltyLogitsProcessor(0.8),
            transformers.TemperatureLogitsWarper(1.4),
            transformers.MinPLogitsWarper(0.01),
            transformers.TopKLogitsWarper(12),
            transformers.TopPLogitsWarper(0.9),
        ],
    ),
}


OF_RANDOM_ROWS = {"temperature", "top_k", "top_p", "min_p"}


def assert_same_distribution(case: str, temperature: float) -> None:
    fields, processors = CASES[case]
    rows = [
        Row(prompt=prompt, output=output, **({"temperature": temperature} | fields))
        for prompt, output in histories(0)
    ]
    logits = logits_for(1)
    expected = their_logprobs(logits, rows, processors)
    np.testing.assert_allclose(our_logprobs(logits, rows), expected, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_the_distribution_is_that_of_transformers(case):
    assert_same_distribution(case, temperature=1.0)


@pytest.mark.parametrize("case", [c for c in CASES if not OF_RANDOM_ROWS & CASES[c][0].keys()])
def test_greedy_rows_take_the_best_of_it(case):
    assert_same_distribution(case, temperature=0.0)


def test_a_mask_of_one_token_forces_it_as_transformers_forces_an_eos():
    rows = [Row(prompt=p, output=o, temperature=1.0, bad_words=WORDS) for p, o in histories(2)]
    lengths = [row.position for row in rows]
    last = max(lengths)
    masks = np.full((NUM_ROWS + 1, -(-V // 32)), 2**32 - 1, np.uint32)
    for slot, length in enumerate(lengths, start=1):
        if length == last:
            masks[slot] = pack_mask([29], V)

    def processors(row: Row) -> list[LogitsProcessor]:
        forced = transformers.ForcedEOSTokenLogitsProcessor(max_length=last + 1, eos_token_id=29)
        return [bad_words_of(row), forced]

    logits = logits_for(3)
    found = our_logprobs(logits, rows, step_mask=masks)
    np.testing.assert_allclose(found, their_logprobs(logits, rows, processors), atol=1e-5)
    assert (np.isfinite(found).sum(-1) == 1).sum() == lengths.count(last)
