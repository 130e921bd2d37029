"""Whatever a model samples, its output matches, or it ran into a limit of length."""

from __future__ import annotations

import re

import pytest

from jaxpage import LLM, SamplingParams
from tests.structured_outputs.cases import GRAMMARS, REGEXES, SCHEMAS, fits


@pytest.fixture(
    scope="module", params=["random_llm", pytest.param("demo_llm", marks=pytest.mark.slow)]
)
def llm(request) -> LLM:
    return request.getfixturevalue(request.param)


@pytest.fixture
def half(llm, random_llm):
    """Every second case: one model has the even ones, the other one the odd ones."""
    first = 1 if llm is random_llm else 0
    return lambda cases: cases[first::2]


def answers(llm, wanted, **options):
    """(text, whether it ended by itself) of one output for each of `wanted`."""
    defaults = {"temperature": 1.5, "seed": 1, "max_tokens": 200}
    params = [SamplingParams(structured_outputs=w, **(defaults | options)) for w in wanted]
    outputs = llm.generate(["The answer is: "] * len(wanted), params, use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    assert {c.finish_reason for c in completions} <= {"stop", "length"}, [
        c.stop_reason for c in completions if c.finish_reason == "error"
    ]
    return [(c.text, c.finish_reason == "stop") for c in completions]


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.deep)])
def test_json_fits_its_schema(llm, half, step):
    schemas = half(SCHEMAS[::step]) if step > 1 else SCHEMAS
    wanted = [{"json": s, "disable_any_whitespace": True} for s in schemas]
    ended = 0
    for (text, ends), schema in zip(answers(llm, wanted, max_tokens=120), schemas, strict=True):
        ended += ends
        assert not ends or fits(text, schema), (text, schema)
    assert ended > len(schemas) * 0.7


@pytest.mark.slow
def test_json_with_any_whitespace_fits_its_schema(llm, half):
    few = half(SCHEMAS[:40])
    found = answers(llm, [{"json": s} for s in few], max_tokens=120)
    assert all(fits(text, s) for (text, ends), s in zip(found, few, strict=True) if ends)
    assert any(ends for _, ends in found)


def test_a_few_schemas(llm):
    few = SCHEMAS[:8]
    wanted = [{"json": s, "disable_any_whitespace": True} for s in few]
    found = answers(llm, wanted, max_tokens=100)
    assert all(fits(text, s) for (text, ends), s in zip(found, few, strict=True) if ends)
    assert sum(ends for _, ends in found) > 4


@pytest.mark.slow
def test_texts_match_their_regex(llm, half):
    regexes = half(REGEXES)
    found = answers(llm, [{"regex": r} for r in regexes])
    for (text, ends), regex in zip(found, regexes, strict=True):
        assert not ends or re.fullmatch(regex, text), (text, regex)
    assert sum(ends for _, ends in found) > 25


@pytest.mark.slow
def test_texts_are_of_their_grammar(llm, half):
    grammars = half(GRAMMARS)
    found = answers(llm, [{"grammar": g} for g, _ in grammars])
    for (text, ends), (grammar, matches) in zip(found, grammars, strict=True):
        assert not ends or matches(text), (text, grammar)
    assert sum(ends for _, ends in found) > 7


def test_choices_objects_and_tags(llm):
    choices = ["yes", "no", 'a "quoted" one', "日本"]
    tag = (
        '{"structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}], '
        '"triggers": ["<f"]}'
    )
    found = answers(llm, [{"choice": choices}, {"json_object": True}, {"structural_tag": tag}])
    assert found[0] in [(choice, True) for choice in choices]
    assert not found[1][1] or fits(found[1][0], {"type": "object"})
    assert all(re.match(r"=a>-?\d*(</f>|$)", part) for part in found[2][0].split("<f")[1:])


def test_a_grammar_wins_over_what_leaves_it_nothing(llm):
    token_ids = llm.get_tokenizer().encode("ab", add_special_tokens=False)
    for options in (
        {"min_tokens": 30},
        {"ignore_eos": True},
        {"allowed_token_ids": [5]},
        {"bad_words": ["ab", "a", "b"]},
        {"logit_bias": {i: float("-inf") for i in token_ids}},
    ):
        assert answers(llm, [{"regex": "ab"}], **options) == [("ab", True)]


def test_stop_strings_and_several_continuations(llm):
    params = SamplingParams(n=4, temperature=1.5, seed=1, structured_outputs={"regex": "[a-z]{30}"})
    params.max_tokens, params.stop = 60, ["e"]
    (output,) = llm.generate("x", params, use_tqdm=False)
    texts = [c.text for c in output.outputs]
    assert len(set(texts)) > 1 and all(re.fullmatch("[a-df-z]*", text) for text in texts)


def test_logprobs_of_constrained_tokens(llm):
    schema = {"type": "object", "properties": {"long_key": {"const": "value"}}}
    schema |= {"required": ["long_key"], "additionalProperties": False}
    wanted = {"json": schema, "disable_any_whitespace": True}
    params = SamplingParams(structured_outputs=wanted, logprobs=2, max_tokens=60)
    (output,) = llm.generate("x", params, use_tqdm=False)
    (completion,) = output.outputs
    assert completion.text == '{"long_key":"value"}'
    assert [next(iter(row)) for row in completion.logprobs] == completion.token_ids
    plain = SamplingParams(structured_outputs=wanted, max_tokens=60)
    before = llm.stats().num_steps
    assert llm.generate("x", plain, use_tqdm=False)[0].outputs[0].text == completion.text
    # All of it is forced: a step for the prompt, one for these tokens, one for EOS, and those that overlap.
    assert llm.stats().num_steps - before <= 6 < len(completion.token_ids)


def test_nothing_compiles(llm):
    assert llm.stats().num_recompiles == 0
