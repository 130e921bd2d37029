"""Prompts that cannot be read say why; options reach the tokenizer."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from jaxpage import tiny
from jaxpage.prompts import Prompt, parse
from jaxpage.tokenization import Tokenization, read_tokenization
from jaxpage.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(str(tiny.build(tmp_path_factory.mktemp("prompts") / "tiny")))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (b"x", r"must be a str, .*got b'x'"),
        (5, "got 5"),
        ("a\ud800b", r"lone surrogate, '\\ud800', at position 1"),
        ({"prompt": "\udfff"}, "lone surrogate"),
        ({"type": "token", "prompt": "x"}, 'of "type": "token" needs "prompt_token_ids"'),
        ({"type": "audio", "prompt": "x"}, "must be one of text, token, embeds, got 'audio'"),
        ({"type": [], "prompt": "x"}, r"must be one of text, token, embeds, got \[\]"),
        ({"prompt": "x", "mm_processor_kwargs": {"size": 3}}, "'mm_processor_kwargs' is not supp"),
        ({"prompt": "x", "multi_modal_uuids": {"image": ["a"]}}, "'multi_modal_uuids' is not supp"),
        ({"prompt": "x", "token_type_ids": [0]}, "'token_type_ids' is not supported"),
        ({"prompt_embeds": np.zeros((2, 4, 3))}, r"got float64 \[2, 4, 3\]"),
    ],
)
def test_what_is_no_prompt_is_named(tokenizer, prompts, message):
    with pytest.raises(ValueError, match=message):
        parse(prompts, tokenizer)


@pytest.mark.parametrize(
    "extra",
    [
        {"type": "token"},
        {"mm_processor_kwargs": {}, "multi_modal_uuids": {}},
        {"mm_processor_kwargs": None, "multi_modal_uuids": None, "token_type_ids": None},
    ],
)
def test_keys_of_vllm_that_ask_for_nothing_are_accepted(tokenizer, extra):
    (prompt,) = parse({"prompt_token_ids": [5, 6], **extra}, tokenizer)
    assert prompt == Prompt(token_ids=[5, 6])
    (text,) = parse({"prompt": "Once"} | extra | {"type": "text"}, tokenizer)
    assert text == parse("Once", tokenizer)[0]


def test_embeddings_may_be_a_batch_of_one(tokenizer):
    embeds = np.arange(12, dtype=np.float32).reshape(1, 4, 3)
    (prompt,) = parse({"type": "embeds", "prompt_embeds": embeds}, tokenizer)
    assert prompt.token_ids == [0] * 4 and (prompt.embeds == embeds[0]).all()


def cut_to_two() -> Tokenization:
    return read_tokenization({"truncation": True, "max_length": 2}).cut_by_tokenizer()


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_ids_and_embeddings_are_cut_at_the_end_that_the_tokenizer_cuts(tokenizer, side):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.truncation_side = side
    (whole,) = parse("Once upon a time", tokenizer)
    kept = slice(-2, None) if side == "left" else slice(2)
    embeds = np.arange(12, dtype=np.float32).reshape(4, 3)
    prompts = ["Once upon a time", {"prompt_token_ids": whole.token_ids}, {"prompt_embeds": embeds}]
    text, ids, rows = parse(prompts, tokenizer, cut_to_two())
    assert text.token_ids == ids.token_ids == whole.token_ids[kept]
    assert rows.token_ids == [0, 0] and (rows.embeds == embeds[kept]).all()


def test_tokenization_kwargs_reach_the_tokenizer(tokenizer):
    (whole,) = parse("Once upon a time", tokenizer)
    (short,) = parse("Once upon a time", tokenizer, cut_to_two())
    assert short.token_ids == whole.token_ids[-2:]
    with pytest.raises(ValueError, match="tokenization_kwargs has padding_side; supp"):
        parse("Once", tokenizer, {"padding_side": "left"})
    (same,) = parse("Once upon a time", tokenizer, {"max_length": 2, "padding": False})
    assert same == whole  # max_length alone truncates nothing
    (lower,) = parse("ONCE Upon a time", tokenizer, {"do_lower_case": True})
    assert (lower,) == tuple(parse("once upon a time", tokenizer))
    (named,) = parse([whole.token_ids], tokenizer, {"needs_detokenization": True})
    assert named.text == tokenizer.decode(whole.token_ids)
    for option in ({"padding": True}, {"pad_prompt_tokens": 9}, {"padding": "max_length"}):
        with pytest.raises(ValueError, match=f"tokenization_kwargs has {next(iter(option))}; supp"):
            parse("Once", tokenizer, option)
    for option in ({"truncation_side": "middle"}, {"truncation": "only_second"}):
        with pytest.raises(ValueError, match=f"{next(iter(option))} must be .*, got '"):
            parse("Once", tokenizer, option)
    for length in (-3, "2"):
        with pytest.raises(ValueError, match=f"max_length .* at least 1, got {length!r}"):
            parse("Once", tokenizer, {"truncation": True, "max_length": length})
