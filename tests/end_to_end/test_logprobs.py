"""Logprobs of prompts, of given ids, of the whole vocabulary, in every mode: against transformers' log-softmax."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpage import SamplingParams
from jaxpage.flat_logprobs import FlatLogprobs
from tests import checkpoints
from tests.end_to_end.test_parity import log_softmax

LENGTHS = (1, 2, 40, 63, 70)
ATOL = 1e-4


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return checkpoints.build("qwen2", 0, tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(3, checkpoints.VOCAB_SIZE, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def logits(path, prompts):
    return [checkpoints.torch_logits(path, np.array([p]))[0] for p in prompts]


@pytest.fixture(scope="module")
def llm(path):
    return checkpoints.make_llm(path, **checkpoints.TIGHT)  # prompts come in chunks


def generate(llm, prompts, **options):
    params = SamplingParams(**({"max_tokens": 3, "temperature": 0.0} | options))
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


def assert_scored(found, prompt, logits, num_best):
    """Every dict has the token and the best, with the values and ranks of float32[T, V] logits."""
    assert len(found) == len(prompt) and not found[0]
    expected = log_softmax(logits)
    for position in range(1, len(prompt)):
        row, entries = expected[position - 1], found[position]
        assert next(iter(entries)) == prompt[position]
        best = set(np.argsort(-row)[:num_best].tolist()) | {prompt[position]}
        assert len(entries) in (num_best, num_best + 1) and set(entries) == best
        for token_id, entry in entries.items():
            assert entry.logprob == pytest.approx(row[token_id], abs=ATOL)
            below, above = (row > row[token_id] + ATOL).sum(), (row >= row[token_id] - ATOL).sum()
            assert below < entry.rank <= above


def test_prompts_are_scored_as_by_transformers(llm, prompts, logits):
    outputs = generate(llm, prompts, prompt_logprobs=3)
    for output, prompt, expected in zip(outputs, prompts, logits, strict=True):
        assert_scored(output.prompt_logprobs, prompt, expected, 3)
        assert output.outputs[0].logprobs is None
    again = generate(llm, prompts, prompt_logprobs=3)  # the cache knows them now, and is not read
    assert [o.prompt_logprobs for o in again] == [o.prompt_logprobs for o in outputs]
    assert all(o.num_cached_tokens == 0 for o in again)
    assert generate(llm, prompts)[3].prompt_logprobs is None


def test_the_whole_vocabulary_of_a_prompt(llm, prompts, logits):
    (output,) = generate(llm, prompts[3:4], prompt_logprobs=-1)
    assert_scored(output.prompt_logprobs, prompts[3], logits[3], checkpoints.VOCAB_SIZE)


def test_given_ids_of_a_prompt(llm, prompts, logits):
    prompt, start = prompts[3], len(prompts[3]) - 5
    rows = [[5, 7], [9], [], [3, 5]]  # of the last four tokens
    options = {"prompt_logprob_token_ids": rows, "prompt_logprob_start": start}
    expected = np.full((4, 2), -np.inf)
    for row, ids in enumerate(rows):
        expected[row, : len(ids)] = log_softmax(logits[3])[start + row, ids]
    outputs = [
        generate(llm, [prompt], **options, prompt_logprobs=count)[0] for count in (None, 2, -1)
    ]
    for output in outputs:
        assert output.prompt_token_id_logprobs.dtype == np.float32
        np.testing.assert_allclose(output.prompt_token_id_logprobs, expected, atol=ATOL)
    assert outputs[0].prompt_logprobs is None
    assert_scored(outputs[1].prompt_logprobs, prompt, logits[3], 2)
    assert_scored(outputs[2].prompt_logprobs, prompt, logits[3], checkpoints.VOCAB_SIZE)
    assert generate(llm, [prompt], prompt_logprobs=2)[0].prompt_token_id_logprobs is None


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"async_scheduling": False}, {"num_gpu_blocks_override": 22}])
def test_scores_do_not_depend_on_the_engine(path, llm, prompts, options):
    def scores(llm):
        found = generate(llm, prompts * 2, prompt_logprobs=2, max_tokens=30, ignore_eos=True)
        return [
            [[(i, e.rank) for i, e in row.items()] for row in o.prompt_logprobs if row]
            for o in found
        ]

    other = checkpoints.make_llm(path, **options)
    assert scores(other) == scores(llm)
    if "num_gpu_blocks_override" in options:
        assert other.stats().num_preemptions > 0
    assert other.stats().num_recompiles == 0


def test_several_continuations_of_a_scored_prompt(llm, prompts):
    (output,) = generate(llm, prompts[2:3], prompt_logprobs=0, n=3, temperature=1.0)
    assert [len(c.token_ids) for c in output.outputs] == [3] * 3
    assert [list(row or ()) for row in output.prompt_logprobs[1:]] == [[i] for i in prompts[2][1:]]


def test_given_ids_and_all_of_them_at_each_token(llm, path, prompts):
    best = generate(llm, prompts, logprobs=2)
    given = generate(llm, prompts, logprob_token_ids=[5, 9, 200])
    whole = generate(llm, prompts, logprobs=-1)
    for one, some, all_ in zip(best, given, whole, strict=True):
        one, some, all_ = one.outputs[0], some.outputs[0], all_.outputs[0]
        assert one.token_ids == some.token_ids == all_.token_ids
        for token_id, b, s, a in zip(
            one.token_ids, one.logprobs, some.logprobs, all_.logprobs, strict=True
        ):
            assert set(s) == {token_id, 5, 9, 200} and len(a) == checkpoints.VOCAB_SIZE
            assert sum(np.exp(e.logprob) for e in a.values()) == pytest.approx(1, abs=1e-4)
            ordered = sorted(a.values(), key=lambda e: -e.logprob)
            assert [e.rank for e in ordered[:20]] == list(range(1, 21))
            for found in (b, s):
                for i, entry in found.items():
                    assert entry.logprob == pytest.approx(a[i].logprob, abs=1e-5)
                    assert entry.rank == a[i].rank
        assert one.cumulative_logprob == pytest.approx(all_.cumulative_logprob, abs=1e-4)
    assert llm.stats().num_recompiles == 0


def test_flat_logprobs_read_like_the_others(llm, prompts):
    plain = generate(llm, prompts, logprobs=2, prompt_logprobs=1)
    flat = generate(llm, prompts, logprobs=2, prompt_logprobs=1, flat_logprobs=True)
    for p, f in zip(plain, flat, strict=True):
        assert isinstance(f.prompt_logprobs, FlatLogprobs)
        assert isinstance(f.outputs[0].logprobs, FlatLogprobs)
        assert list(f.prompt_logprobs) == [entries or {} for entries in p.prompt_logprobs]
        assert list(f.outputs[0].logprobs) == p.outputs[0].logprobs
        assert list(f.outputs[0].logprobs[1:]) == p.outputs[0].logprobs[1:]
        assert f.prompt_logprobs.end_indices[-1] == len(f.prompt_logprobs.token_ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["temperature", "processed_logprobs", "raw_logits", "processed_logits"]
)
def test_every_mode_says_the_same_of_the_best_and_of_all(path, prompts, logits, mode):
    llm = checkpoints.make_llm(path, logprobs_mode=mode, enforce_eager=True)
    options = {"temperature": 0.5, "seed": 1, "logit_bias": {5: 3.0}, "max_tokens": 1}
    best = generate(llm, prompts, logprobs=3, **options)
    whole = generate(llm, prompts, logprobs=-1, **options)
    for index, (one, all_) in enumerate(zip(best, whole, strict=True)):
        (b,), (a,) = one.outputs[0].logprobs, all_.outputs[0].logprobs
        assert {i: e.rank for i, e in b.items()} == {i: a[i].rank for i in b}
        expected = logits[index][-1].astype(np.float64)
        if mode.startswith("processed"):
            expected = expected + 3.0 * (np.arange(len(expected)) == 5)
        if not mode.startswith("raw"):
            expected = expected / 0.5
        if not mode.endswith("logits"):
            expected = log_softmax(expected)
        for i, entry in a.items():
            assert entry.logprob == pytest.approx(expected[i], abs=5e-4)
        for i, entry in b.items():
            assert entry.logprob == pytest.approx(a[i].logprob, abs=1e-4)
