"""Masks, forced tokens and phases of reasoning, on the packaged tokenizer and without an engine."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxpage.demo import checkpoint
from jaxpage.reasoning import ReasoningTokens
from jaxpage.structured_outputs import StructuredOutputsConfig, StructuredOutputsParams
from jaxpage.structured_outputs.compiler import GrammarCompiler
from jaxpage.structured_outputs.masks import GrammarMasks, reasoning_at_end
from jaxpage.tokenizer import load_tokenizer
from tests.structured_outputs.cases import SCHEMAS, fits

EOS = 2


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(checkpoint()))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(
        tokenizer,
        vocab_size=len(tokenizer) + 5,
        eos_token_ids=(EOS,),
        config=StructuredOutputsConfig(),
    )


def make(compiler, wanted, **options) -> GrammarMasks:
    grammar = compiler.compile(StructuredOutputsParams(**wanted))
    grammar.matcher.result()
    return GrammarMasks(compiler, grammar, **options)


def allowed(source, output, index=0) -> set[int]:
    bits = np.unpackbits(source.mask(index, output).view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_a_mask_has_the_tokens_after_which_the_text_can_go_on(compiler, tokenizer):
    source = make(compiler, {"choice": ["abc", "abd", "x"]})
    texts = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    wanted = {
        i
        for i, text in enumerate(texts)
        if text and any(c.startswith(text) for c in ("abc", "abd", "x"))
    }
    assert allowed(source, []) == wanted
    ids = tokenizer.encode("abc", add_special_tokens=False)
    for count in range(1, len(ids)):
        assert ids[count] in allowed(source, ids[:count])
    assert allowed(source, ids) == {EOS}


def test_continuations_are_apart_and_may_be_asked_again(compiler, tokenizer):
    source = make(compiler, {"regex": "[ab]{4}"})
    a, b = (tokenizer.encode(x, add_special_tokens=False)[0] for x in "ab")
    first = allowed(source, [a], 0)
    assert allowed(source, [b, b], 1) and allowed(source, [a], 0) == first
    assert allowed(source, [a, b, b, a], 0) == {EOS}
    assert allowed(source, [b, b], 1) != {EOS}


def test_a_request_that_begins_anew_is_asked_from_its_beginning(compiler, tokenizer):
    source = make(compiler, {"choice": ["red", "green"]})
    first = allowed(source, [])
    token_id = next(iter(first))
    allowed(source, [token_id])
    assert source.mask(1, [EOS]) is None and source.error(1) is not None
    source.restart()
    assert allowed(source, []) == first == allowed(source, [], index=1)
    assert source.error(1) is None


def test_what_is_forced_and_what_is_not(compiler, tokenizer):
    schema = {"type": "object", "properties": {"some_key": {"type": "boolean"}}}
    schema |= {"required": ["some_key"], "additionalProperties": False}
    source = make(compiler, {"json": schema, "disable_any_whitespace": True})
    forced = source.forced(0, [])
    assert tokenizer.decode(forced) == '{"some_key":'
    assert source.forced(0, forced) == []
    true = tokenizer.encode("true", add_special_tokens=False)
    output = [*forced, *true[:1]]
    assert tokenizer.decode(output + source.forced(0, output)).startswith('{"some_key":t')
    never = make(compiler, {"json": schema, "disable_any_whitespace": True}, forces=False)
    assert never.forced(0, []) == []


def test_a_token_that_does_not_fit_is_an_error(compiler):
    source = make(compiler, {"regex": "a"})
    assert source.mask(0, [EOS]) is None
    assert "does not continue it" in source.error(0) and source.error(1) is None
    assert source.mask(1, []) is not None


@pytest.mark.parametrize("wanted", [{"json": {"$ref": "#"}}, {"regex": r"[^\s\S]"}])
def test_a_grammar_without_any_text_is_told_in_words(compiler, wanted):
    source = make(compiler, wanted)
    assert source.mask(0, []) is None
    assert source.error(0).startswith("structured output: no text continues it; a rule that only")


@pytest.mark.parametrize("seed", range(6))
def test_random_walks_end_in_outputs_that_fit(compiler, tokenizer, seed):
    rng, schema = random.Random(seed), SCHEMAS[seed]
    source = make(compiler, {"json": schema, "disable_any_whitespace": True})
    output: list[int] = []
    for _ in range(300):
        output += source.forced(0, output)
        token_id = rng.choice(sorted(allowed(source, output)))
        if token_id == EOS:
            assert fits(tokenizer.decode(output), schema)
            return
        output.append(token_id)


THINK = ReasoningTokens(start=(40, 41), end=(50, 51), forced_end=(50, 51))


def test_a_model_may_reason_first(compiler, tokenizer):
    source = make(compiler, {"regex": "ab"}, reasoning=THINK)
    plain = allowed(make(compiler, {"regex": "ab"}), [])
    assert allowed(source, []) == plain | {40} and source.forced(0, []) == []
    assert allowed(source, [40]) == {41}  # only the rest of the start fits
    inside = allowed(source, [40, 41])
    assert len(inside) > 1000 and EOS not in inside
    assert len(allowed(source, [40, 41, 7, 50])) > 1000
    assert allowed(source, [40, 41, 7, 50, 51]) == plain
    ids = tokenizer.encode("ab", add_special_tokens=False)
    assert allowed(source, [40, 41, 7, 50, 51, *ids]) == {EOS}
    assert allowed(source, ids, 1) == {EOS}  # another one did not reason


def test_the_start_of_reasoning_may_begin_as_what_matches(compiler, tokenizer):
    """Its first token is a part of both."""
    ids = tokenizer.encode("<tool>", add_special_tokens=False)
    start = ReasoningTokens(start=(ids[0], 41), end=(50,), forced_end=(50,))
    source = make(compiler, {"regex": "<tool>"}, reasoning=start, forces=True)
    assert {ids[1], 41} <= allowed(source, ids[:1])
    assert len(allowed(source, [ids[0], 41])) > 1000
    assert ids[0] in allowed(source, [ids[0], 41, 50])
    assert allowed(source, ids, 1) == {EOS}


def test_reasoning_that_began_in_the_prompt(compiler):
    source = make(compiler, {"regex": "ab"}, reasoning=THINK, is_reasoning=True)
    assert len(allowed(source, [])) > 1000
    assert allowed(source, [7, 50, 51]) == allowed(make(compiler, {"regex": "ab"}), [])
    assert reasoning_at_end([1, 40, 41, 9], (40, 41), (50, 51)) is True
    assert reasoning_at_end([1, 40, 41, 50, 51, 9], (40, 41), (50, 51)) is False
    assert reasoning_at_end([1, 9], (40, 41), (50, 51)) is None


def test_a_grammar_is_compiled_once(compiler):
    one = compiler.compile(StructuredOutputsParams(regex="once"))
    two = compiler.compile(StructuredOutputsParams(regex="once"))
    assert one.matcher is two.matcher
    for i in range(140):
        compiler.compile(StructuredOutputsParams(regex=f"r{i}"))
    assert compiler.compile(StructuredOutputsParams(regex="once")).matcher is not one.matcher
