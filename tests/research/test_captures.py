"""Captures of an engine against the dense model, whatever shares the batch and however steps are cut."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxpage import LLM, SamplingParams
from jaxpage.captures import wanted_captures
from jaxpage.replay import replay
from jaxpage.research import (
    ResearchConfig,
    add,
    capture,
    generated,
    last_prompt,
    prompt,
    run_with_cache,
)
from jaxpage.research_config import ResearchSpec
from jaxpage.rl import load_module
from tests import checkpoints
from tests.few_programs import few_programs

SIZE = 32  # of the model's hidden states
RNG = np.random.default_rng(1)
PROMPT = RNG.integers(3, checkpoints.VOCAB_SIZE, 37).tolist()
PRE, POST, LAST = "blocks.1.hook_resid_pre", "blocks.0.hook_resid_post", "ln_final.hook_normalized"
CAPTURES = [PRE, "blocks.*.hook_resid_post", LAST]
MAX_TOKENS = 12
LENGTH = len(PROMPT) + MAX_TOKENS - 1  # tokens that are computed
EVERY = list(range(LENGTH))

ASKED = {
    "everything": "*",
    "prompt": capture(PRE, prompt()),
    "last": [capture(LAST, last_prompt())],
    "generated": [capture("blocks.*", generated())],
    "slice": [capture(POST, slice(5, 42, 3)), capture(POST, slice(40, 44)), capture(PRE, slice(0, 1))],
}  # fmt: skip
# By definition: positions by point.
ALL = [PRE, POST, "blocks.1.hook_resid_post", LAST]
WANTED = {
    "everything": dict.fromkeys(ALL, EVERY),
    "prompt": {PRE: EVERY[:37]},
    "last": {LAST: [36]},
    "generated": dict.fromkeys(ALL[:3], EVERY[37:]),
    "slice": {PRE: [0], POST: sorted({*EVERY[5:42:3], 40, 41, 42, 43})},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(checkpoints.build("qwen2", 0, tmp_path_factory.mktemp("qwen2")))


def make_llm(path, **options):
    defaults = dict(
        skip_tokenizer_init=True, dtype="float32", max_model_len=64, max_num_seqs=8, block_size=4,
        max_num_batched_tokens=16, num_gpu_blocks_override=48, decode_steps=4,
        research=ResearchConfig(captures=CAPTURES),
    )  # fmt: skip
    with few_programs():
        return LLM(path, **(defaults | options))


@pytest.fixture(scope="module")
def llm(path):
    return make_llm(path)


def params(asked, **options):
    return SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False, capture=asked,
        **options,
    )  # fmt: skip


def answers(llm, names, **options):
    prompts = [{"prompt_token_ids": PROMPT}] * len(names)
    asked = [params(ASKED[name], **options) for name in names]
    return llm.generate(prompts, asked, use_tqdm=False)


@pytest.fixture(scope="module")
def dense(path):
    """Values of the dense model at all points, of the whole of a sequence."""
    module = load_module(path)
    cached = jax.jit(lambda ids: run_with_cache(module, ids)[1])
    return lambda ids: {name: np.asarray(x) for name, x in cached(np.array(ids)).items()}


def assert_captured(output, name, dense):
    for completion in output.outputs:
        expected = dense([*PROMPT, *completion.token_ids])
        assert set(completion.captures) == set(WANTED[name])
        for point, (positions, values) in completion.captures.items():
            assert positions.tolist() == WANTED[name][point], (name, point)
            assert values.dtype == np.float32 and positions.dtype == np.int32
            np.testing.assert_allclose(values, expected[point][positions], atol=2e-4)


@pytest.mark.slow
def test_alone_in_chunks(llm, dense):
    """Prompts of 37 tokens come in chunks of 16; the next request finds them in the cache."""
    llm.reset_prefix_cache()
    cached = {}
    for name in ASKED:
        (output,) = answers(llm, [name])
        assert_captured(output, name, dense)
        cached[name] = output.num_cached_tokens
    # Of a prompt that is wanted nothing is read; what is not wanted is, up to there.
    assert cached == {"everything": 0, "prompt": 0, "last": 36, "generated": 36, "slice": 0}


@pytest.mark.slow
def test_together_preempted_with_neighbours_that_want_nothing(llm, dense):
    """Eight sequences of 12 blocks in a pool of 47."""
    names = [*ASKED, "everything", "generated"]
    plain = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": PROMPT}] * (len(names) + 1)
    for _ in range(2):
        asked = [*(params(ASKED[name]) for name in names), plain]
        *outputs, other = llm.generate(prompts, asked, use_tqdm=False)
        for output, name in zip(outputs, names, strict=True):
            assert_captured(output, name, dense)
        assert other.outputs[0].captures is None
    assert llm.stats().num_preemptions > 0 and llm.stats().num_recompiles == 0


@pytest.mark.slow
def test_continuations_have_the_prompt_in_common(llm, dense):
    llm.reset_prefix_cache()
    prompts, several = {"prompt_token_ids": PROMPT}, {"temperature": 1.0, "seed": 3, "n": 3}
    for name in ("everything", "slice"):
        asked = params(ASKED[name]).__dict__ | several
        (output,) = llm.generate(prompts, SamplingParams(**asked), use_tqdm=False)
        assert len({tuple(c.token_ids) for c in output.outputs}) == 3
        assert_captured(output, name, dense)


@pytest.mark.slow
def test_values_are_those_behind_an_intervention(path, dense):
    research = ResearchConfig(points=[PRE], captures=[PRE, POST])
    llm = make_llm(path, research=research, enforce_eager=True)
    vector = RNG.standard_normal(SIZE).astype(np.float32)
    asked = params([POST, PRE], interventions=[add(PRE, vector, slice(None))])
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, asked, use_tqdm=False)
    captures = output.outputs[0].captures
    np.testing.assert_allclose(
        captures[PRE].values, captures[POST].values + vector, atol=1e-5, rtol=0
    )


@pytest.mark.slow
def test_recorded_calls_capture_the_same(path, dense, tmp_path):
    file, names = tmp_path / "run.calls", ["everything", "slice"]
    llm = make_llm(path, record_calls=str(file), enforce_eager=True)
    for output, name in zip(answers(llm, names), names, strict=True):
        assert_captured(output, name, dense)
    del llm
    with few_programs(), file.open("rb") as recording:
        found = replay(recording)
    assert found.num_results > 0 and found.different == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"data_parallel_size": 2},
        {"swap_space": 0.01, "preemption_mode": "swap"},
        {"enable_prefix_caching": False, "async_scheduling": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_whatever_the_engine(path, dense, options):
    llm = make_llm(path, enforce_eager=True, **options)
    names = [*ASKED, "everything", "prompt"]
    for output, name in zip(answers(llm, names), names, strict=True):
        assert_captured(output, name, dense)


@pytest.mark.slow
def test_an_answer_that_stops_early_has_values_of_its_tokens_only(llm, dense):
    """A step is under way for a token that its text does not have."""
    (whole,) = answers(llm, ["generated"])
    stop = whole.outputs[0].token_ids[4]
    first = whole.outputs[0].token_ids.index(stop)
    asked = params(ASKED["generated"], stop_token_ids=[stop])
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, asked, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == first + 1
    for positions, _ in output.outputs[0].captures.values():
        assert positions.tolist() == EVERY[37 : 37 + first]


def test_an_answer_of_one_token_has_points_without_values():
    """Its only token is never computed."""
    spec = ResearchSpec(
        points=(), captures=(PRE, POST, LAST), max_interventions=1, hidden_size=SIZE
    )
    wanted = wanted_captures([capture(PRE, generated()), capture(LAST, generated())], 3, spec)
    found = wanted.by_point([])
    assert list(found) == [PRE, LAST]
    for positions, values in found.values():
        assert positions.shape == (0,) and values.shape == (0, SIZE)
        assert positions.dtype == np.int32 and values.dtype == np.float32


@pytest.mark.slow
def test_requests_are_refused_before_anything_changes(llm, path):
    with pytest.raises(ValueError, match="'blocks.9' is not among the captures of ResearchConfig"):
        llm.generate({"prompt_token_ids": PROMPT}, params("blocks.9"))
    with pytest.raises(ValueError, match="capture needs an engine with"):
        without = make_llm(path, research=None, enforce_eager=True)
        without.generate({"prompt_token_ids": PROMPT}, params("*"))
    assert llm.stats().num_waiting == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: capture(3), "name of a point"),
        (lambda: capture("a", slice(-1, None)), "at least 0"),
        (lambda: SamplingParams(capture=[3]), "capture must be"),
        (lambda: ResearchConfig(captures=[]), "at least one"),
        (lambda: ResearchConfig(captures=3), "captures must be names"),
    ],
)
def test_what_is_no_capture(make, message):
    with pytest.raises(ValueError, match=message):
        make()
