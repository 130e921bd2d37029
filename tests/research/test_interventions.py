"""Interventions of an engine against hooks on the dense model, whatever shares the batch and however steps are cut."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage import LLM, SamplingParams
from jaxpage.config import EngineConfig
from jaxpage.replay import replay
from jaxpage.research import (
    ResearchConfig,
    add,
    generated,
    last_prompt,
    prompt,
    replace,
    run_with_hooks,
    scale,
)
from jaxpage.rl import load_module
from tests import checkpoints
from tests.few_programs import few_programs

SIZE = 32  # of the model's hidden states
RNG = np.random.default_rng(0)
PROMPT = RNG.integers(3, checkpoints.VOCAB_SIZE, 37).tolist()
POINTS = ["blocks.*.hook_resid_p*", "blocks.*.hook_mlp_out", "ln_final.hook_normalized"]
MAX_TOKENS = 12


def vector():
    return 2 * RNG.standard_normal(SIZE).astype(np.float32)


ASKED = {
    "nothing": [],
    "steer": [add("blocks.1.hook_resid_pre", vector(), generated())],
    "other vector": [add("blocks.1.hook_resid_pre", vector(), generated())],
    "prompt": [replace("blocks.0.hook_mlp_out", vector(), prompt())],
    "last": [scale("blocks.1.hook_resid_post", -1.5, last_prompt())],
    "slice": [add("blocks.0.hook_resid_post", vector(), slice(5, 42, 3))],
    "two": [
        scale("blocks.0.hook_resid_post", 0.5, slice(None)),
        add("blocks.0.hook_resid_post", vector(), slice(30, None)),
    ],
    "head": [add("ln_final.hook_normalized", vector(), slice(35, None))],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(checkpoints.build("qwen2", 0, tmp_path_factory.mktemp("qwen2")))


def make_llm(path, **options):
    defaults = dict(
        skip_tokenizer_init=True, dtype="float32", max_model_len=64, max_num_seqs=8, block_size=4,
        max_num_batched_tokens=16, num_gpu_blocks_override=48, decode_steps=4,
        research=ResearchConfig(points=POINTS, max_interventions=2),
    )  # fmt: skip
    with few_programs():
        return LLM(path, **(defaults | options))


@pytest.fixture(scope="module")
def llm(path):
    return make_llm(path)


def params(name):
    return SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0, detokenize=False,
        interventions=ASKED[name],
    )  # fmt: skip


def answers(llm, names):
    prompts = [{"prompt_token_ids": PROMPT}] * len(names)
    return llm.generate(prompts, [params(name) for name in names], use_tqdm=False)


def said(output):
    (completion,) = output.outputs
    ids = completion.token_ids
    chosen = [x[i].logprob for x, i in zip(completion.logprobs, ids, strict=True)]
    return list(ids), chosen


def where(name, length):
    """bool[length]: which tokens, from the definition."""
    index = np.arange(length)
    return {
        "steer": index >= len(PROMPT),
        "other vector": index >= len(PROMPT),
        "prompt": index < len(PROMPT),
        "last": index == len(PROMPT) - 1,
        "slice": (index >= 5) & (index < 42) & (index % 3 == 2),
        "head": index >= 35,
    }[name]


def hooks_of(name, length):
    """The same interventions as hooks of the dense model, written for themselves."""
    if name == "two":
        _, added = ASKED[name]
        late = (np.arange(length) >= 30)[:, None] * added.vector
        return [(added.point, lambda value, _: value * 0.5 + late)]
    hooks = []
    for each in ASKED[name]:
        here = where(name, length)[:, None]

        def hook(value, _, each=each, here=here):
            change = {
                "prompt": lambda: jnp.broadcast_to(each.vector[None], value.shape),
                "last": lambda: value * -1.5,
            }
            new = change.get(name, lambda: value + each.vector[None])()
            return jnp.where(here, new, value)

        hooks.append((each.point, hook))
    return hooks


@pytest.fixture(scope="module")
def expected(path):
    """Greedy tokens and their logprobs of the dense model, by name of what is asked."""
    module = load_module(path)
    length = len(PROMPT) + MAX_TOKENS

    def greedy(name):
        @jax.jit
        def logprobs(ids):
            return jax.nn.log_softmax(run_with_hooks(module, ids, hooks_of(name, length)))

        ids, chosen = np.array(PROMPT + [0] * MAX_TOKENS), []
        for position in range(len(PROMPT), length):
            row = np.asarray(logprobs(ids)[position - 1])
            ids[position] = row.argmax()
            chosen.append(row.max())
        return ids[len(PROMPT) :].tolist(), chosen

    return {name: greedy(name) for name in ASKED}


def assert_expected(outputs, names, expected):
    for output, name in zip(outputs, names, strict=True):
        ids, chosen = said(output)
        assert ids == expected[name][0], name
        np.testing.assert_allclose(chosen, expected[name][1], atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_alone_in_chunks_and_several_steps_a_launch(llm, expected):
    """Prompts of 37 tokens come in chunks of 16; a launch has four decode steps."""
    llm.reset_prefix_cache()
    for name in ASKED:
        assert_expected(answers(llm, [name]), [name], expected)
    assert len({tuple(ids) for ids, _ in expected.values()}) >= 6


@pytest.mark.slow
def test_together_preempted_and_cached_without_compiling(llm, expected):
    """Eight sequences of 13 blocks in a pool of 47; then again, with what is cached. New vectors compile nothing."""
    names = list(ASKED)
    before = llm.stats().num_recompiles
    for _ in range(2):
        outputs = answers(llm, names)
        assert_expected(outputs, names, expected)
    assert llm.stats().num_preemptions > 0
    assert llm.stats().num_recompiles == before == 0


@pytest.mark.slow
def test_blocks_are_shared_where_nothing_was_changed(llm, expected):
    """Before the first changed token, and only there; equal interventions share everything."""
    llm.reset_prefix_cache()
    answers(llm, ["nothing"])
    cached = {}
    for name in ("steer", "slice", "prompt", "last"):
        (output,) = answers(llm, [name])
        assert_expected([output], [name], expected)
        cached[name] = output.num_cached_tokens
    assert cached == {"steer": 36, "slice": 4, "prompt": 0, "last": 36}
    (again,) = answers(llm, ["prompt"])
    assert again.num_cached_tokens == 36
    assert_expected([again], ["prompt"], expected)


@pytest.mark.slow
def test_recorded_calls_have_the_vectors(path, expected, tmp_path):
    file, names = tmp_path / "run.calls", ["steer", "prompt", "two"]
    llm = make_llm(path, record_calls=str(file), enforce_eager=True)
    assert_expected(answers(llm, names), names, expected)
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
        {"enable_prefix_caching": False, "kv_cache_dtype": "float32", "async_scheduling": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_whatever_the_engine(path, expected, options):
    llm, names = make_llm(path, enforce_eager=True, **options), list(ASKED)
    assert_expected(answers(llm, names), names, expected)


@pytest.mark.slow
def test_requests_are_refused_before_anything_changes(llm, path):
    point = "blocks.1.hook_resid_pre"
    ones = np.ones(SIZE)
    bad = {
        "not among the points": [add("blocks.1.hook_attn_out", ones, prompt())],
        "max_interventions=2": [add(point, ones, prompt())] * 3,
        r"must be \[32\], got \[31\]": [add(point, np.ones(31), prompt())],
    }
    for message, asked in bad.items():
        with pytest.raises(ValueError, match=message):
            llm.generate(
                {"prompt_token_ids": PROMPT}, SamplingParams(interventions=asked, detokenize=False)
            )
    assert llm.stats().num_waiting == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: add("a", [1.0, float("nan")], prompt()), "1 of its numbers"),
        (lambda: replace("a", [[1.0]], prompt()), r"one axis, got \[1, 1\]"),
        (lambda: add("a", {"a": 1}, prompt()), "has numbers"),
        (lambda: scale("a", float("inf"), prompt()), "finite"),
        (lambda: scale("a", 10**400, prompt()), "finite"),
        (lambda: scale("a", 1.0, slice(-3, None)), "at least 0"),
        (lambda: scale("a", 1.0, slice(0, 4, 0)), "at least 1"),
        (lambda: scale("a", 1.0, 3), "positions must be"),
        (lambda: SamplingParams(interventions=[3]), "interventions must be"),
        (lambda: ResearchConfig(points=[]), "at least one"),
        (lambda: ResearchConfig(points=["a"], max_interventions=0), "1..64"),
        (lambda: EngineConfig(model="m", research=3), "research must be"),
    ],
)
def test_what_is_no_intervention(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_lora": True}, "enable_lora"),
        ({"numerics": "strict"}, "strict"),
        ({"tensor_parallel_size": 2}, "2 devices"),
        ({"research": ResearchConfig(points=["blocks.0.attn.hook_z"])}, "inside attention"),
        ({"research": ResearchConfig(points=["blocks.9.hook_resid_pre"])}, "no point is called"),
        ({"research": None}, "ResearchConfig"),
    ],
)
def test_engines_that_have_none(path, options, message):
    with pytest.raises(ValueError, match=message):
        llm = make_llm(path, enforce_eager=True, **options)
        llm.generate({"prompt_token_ids": PROMPT}, params("steer"))
