"""Prompts that cannot be read say why; options reach the tokenizer."""

from __future__ import annotations

import pytest

from jaxpage import tiny
from jaxpage.prompts import parse
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
    ],
)
def test_what_is_no_prompt_is_named(tokenizer, prompts, message):
    with pytest.raises(ValueError, match=message):
        parse(prompts, tokenizer)


def test_tokenization_kwargs_reach_the_tokenizer(tokenizer):
    (whole,) = parse("Once upon a time", tokenizer)
    options = {"truncation": True, "max_length": 2}
    (short,) = parse("Once upon a time", tokenizer, options)
    assert short.token_ids == whole.token_ids[-2:]
    with pytest.raises(ValueError, match="tokenization_kwargs has padding_side; supp"):
        parse("Once", tokenizer, {"padding_side": "left"})
    for length in (-3, "2"):
        with pytest.raises(ValueError, match=f"max_length .* at least 1, got {length!r}"):
            parse("Once", tokenizer, options | {"max_length": length})
