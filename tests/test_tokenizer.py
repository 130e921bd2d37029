"""Text that grows token by token equals the text decoded at once; stop strings are found once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from jaxpage import tiny
from jaxpage.sampling_params import SamplingParams
from jaxpage.tokenizer import (
    ByteDecoder,
    Detokenizer,
    WindowDecoder,
    bad_words_token_ids,
    load_chat_template,
    load_tokenizer,
    token_decoder,
)

EMOJI = "naïve 👩‍👩‍👧‍👦 €5 日本語 🇫🇷 <|im_end|> a�b"
FAST = settings(max_examples=60, deadline=None)


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory):
    return load_tokenizer(str(tiny.build(tmp_path_factory.mktemp("tokenizer") / "tiny")))


@pytest.fixture(scope="session")
def sentencepiece():
    """Llama 2's kind: ▁ for spaces, bytes for what is not in the vocabulary."""
    pieces = ["<unk>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁", "▁the", "▁a", "the", "a", "é", "日", "b", "▁b", "."]
    backend = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.add_special_tokens(["</s>"])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def whole(tokenizer, ids, params=None):
    params = params or SamplingParams()
    return tokenizer.decode(
        ids,
        skip_special_tokens=params.skip_special_tokens,
        clean_up_tokenization_spaces=False,
    )


def grow(tokenizer, ids, params=None, context=()):
    """The text after each token, and at last."""
    detokenizer = Detokenizer(tokenizer, params or SamplingParams(), context)
    texts = []
    for token_id in ids:
        assert detokenizer.append(token_id, ends=False, check_stop=True) is None
        texts.append(detokenizer.text)
    detokenizer.flush()
    return [*texts, detokenizer.text]


@FAST
@given(data=st.data(), skip=st.booleans())
def test_any_ids_grow_to_what_they_decode_to_at_once(byte_level, data, skip):
    byte_ids = byte_level.convert_tokens_to_ids(list("âĤ¬ðŁĺĢÃ"))  # of €, 😀, é
    token = st.one_of(st.integers(0, 511), st.sampled_from([*byte_ids, 0, 2]))
    ids = data.draw(st.lists(token, max_size=30))
    params = SamplingParams(skip_special_tokens=skip)
    texts = grow(byte_level, ids, params)
    assert texts[-1] == whole(byte_level, ids, params)
    for shorter, longer in zip(texts, texts[1:], strict=False):
        assert longer.startswith(shorter)


@FAST
@given(data=st.data())
def test_the_window_agrees_with_the_byte_decoder(byte_level, data):
    byte_ids = byte_level.convert_tokens_to_ids(list("âĤ¬ðŁĺĢÃ"))
    ids = data.draw(st.lists(st.one_of(st.integers(0, 511), st.sampled_from(byte_ids))))
    decoder = WindowDecoder(byte_level, SamplingParams())
    pieces = [decoder.append(token_id) for token_id in ids]
    assert "".join(pieces) + decoder.flush() == whole(byte_level, ids)


@pytest.mark.parametrize("garbage", ["Ĥ", "âĤ", "ðŁĺ"])  # never ends in a character
def test_the_window_stays_short_whatever_comes(byte_level, garbage):
    ids = byte_level.convert_tokens_to_ids(list(garbage)) * 100
    decoder = WindowDecoder(byte_level, SamplingParams())
    text = ""
    for token_id in ids:
        text += decoder.append(token_id)
        assert len(decoder._ids) <= 24
    assert text + decoder.flush() == "\ufffd" * 100


def test_each_tokenizer_gets_the_decoder_it_can_have(byte_level, sentencepiece):
    assert isinstance(token_decoder(byte_level, SamplingParams()), ByteDecoder)
    assert isinstance(token_decoder(sentencepiece, SamplingParams()), WindowDecoder)


def test_characters_are_never_split(byte_level):
    ids = byte_level(EMOJI)["input_ids"]
    texts = grow(byte_level, ids, SamplingParams(skip_special_tokens=False))
    assert len(ids) > len(EMOJI)  # or there would be nothing to split
    assert texts[-1] == EMOJI
    for text in texts:
        assert EMOJI.startswith(text)


@FAST
@given(
    text=st.text(alphabet="the ab.é日€😀", max_size=15), context=st.sampled_from(["", "a", "a b"])
)
def test_sentencepiece_text_continues_its_prompt(sentencepiece, text, context):
    """Spaces at the start of a text are dropped, at the start of a continuation they are not."""

    def encode(s):
        pieces = ((f"<0x{b:02X}>" for b in c.encode()) if c in "€😀. hte" else [c] for c in s)
        tokens = ["▁" if t == "<0x20>" else t for piece in pieces for t in piece]
        return sentencepiece.convert_tokens_to_ids(tokens)

    before, ids = encode(context), encode(text)
    texts = grow(sentencepiece, ids, context=before)
    full, prompt = whole(sentencepiece, before + ids), whole(sentencepiece, before)
    assert texts[-1] == full[len(prompt) :]
    for shorter in texts:
        assert texts[-1].startswith(shorter)


@pytest.mark.parametrize("prompt", ["日😀", "😀" * 9, "a😀", "日日", "😀ab", "a�b"])
def test_a_prompt_is_never_cut_inside_a_character(sentencepiece, prompt):
    """Its end is the context of the first token: without one, that loses its space."""
    pieces = [[c] if c in "ab" else [f"<0x{x:02X}>" for x in c.encode()] for c in prompt]
    before = sentencepiece.convert_tokens_to_ids([t for piece in pieces for t in piece])
    ids = sentencepiece.convert_tokens_to_ids(["▁the", "▁a"])
    assert grow(sentencepiece, ids, context=before)[-1] == " the a"


def test_special_tokens_show_only_if_asked_for(byte_level):
    ids = byte_level("a<|im_end|>b")["input_ids"]
    assert grow(byte_level, ids)[-1] == "ab"
    shown = SamplingParams(skip_special_tokens=False)
    assert grow(byte_level, ids, shown)[-1] == "a<|im_end|>b"


def test_ids_beyond_the_tokenizer_have_no_text(byte_level):
    """Embeddings are often padded to a round number of rows."""
    (a,) = byte_level("a")["input_ids"]
    assert grow(byte_level, [a, 5000, a])[-1] == "aa"


def run_stop(tokenizer, ids, params):
    """(text, stop string, tokens read) of a generation that ends at its first stop string."""
    detokenizer = Detokenizer(tokenizer, params)
    for count, token_id in enumerate(ids, start=1):
        past = count > params.min_tokens
        stop = detokenizer.append(token_id, ends=False, check_stop=past)
        if stop is not None:
            return detokenizer.text, stop, count
    detokenizer.flush()
    return detokenizer.text, None, len(ids)


@FAST
@given(
    text=st.text(alphabet="abcé€", max_size=25),
    stops=st.lists(st.text(alphabet="abcé€", min_size=1, max_size=4), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_stop_strings_end_the_text_where_a_naive_search_says(byte_level, text, stops, include):
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    expected, expected_stop = text, None
    for end in range(1, len(text) + 1):
        match = next((s for s in stops if text[:end].endswith(s)), None)
        if match is not None:
            expected, expected_stop = text[: end if include else end - len(match)], match
            break
    ids = [i for c in text for i in byte_level(c)["input_ids"]]
    got, stop, _ = run_stop(byte_level, ids, params)
    assert (got, stop) == (expected, expected_stop)


def test_the_stop_that_completes_first_wins_within_one_token(byte_level):
    ids = byte_level(" the")["input_ids"]
    assert len(ids) == 1
    assert run_stop(byte_level, ids, SamplingParams(stop=["the", "th", "h"]))[:2] == (" ", "th")
    assert run_stop(byte_level, ids, SamplingParams(stop=["h", "th"]))[:2] == (" t", "h")


def test_a_stop_string_may_span_tokens(byte_level):
    ids = byte_level(" forest the day")["input_ids"]
    text, stop, _ = run_stop(byte_level, ids, SamplingParams(stop=["st the"]))
    assert (text, stop) == (" fore", "st the")


def test_stop_strings_are_ignored_until_min_tokens(byte_level):
    ids = byte_level("a")["input_ids"] * 5
    text, stop, count = run_stop(byte_level, ids, SamplingParams(stop=["a"], min_tokens=3))
    assert (text, stop, count) == ("aaa", "a", 4)


def test_what_may_become_a_stop_string_is_held_back(byte_level):
    detokenizer = Detokenizer(byte_level, SamplingParams(stop=["bcd"]))
    texts = []
    for c in "abcx":
        detokenizer.append(byte_level(c)["input_ids"][0], ends=False, check_stop=True)
        texts.append(detokenizer.text)
    detokenizer.flush()
    assert [*texts, detokenizer.text] == ["", "", "a", "ab", "abcx"]


@pytest.mark.parametrize(("include", "expected"), [(False, "a"), (True, "ab")])
def test_a_stop_token_has_text_only_if_asked_for(byte_level, include, expected):
    params = SamplingParams(include_stop_str_in_output=include)
    detokenizer = Detokenizer(byte_level, params)
    for token_id, ends in zip(byte_level("ab")["input_ids"], (False, True), strict=True):
        detokenizer.append(token_id, ends=ends, check_stop=True)
    assert detokenizer.text == expected
    detokenizer.flush()
    assert detokenizer.text == expected


def test_bad_words_are_banned_after_a_space_too(byte_level):
    plain, spaced = byte_level.encode("a"), byte_level.encode(" a")
    assert len(plain) == len(spaced) == 1 and plain != spaced
    assert bad_words_token_ids(byte_level, ["a"]) == (tuple(plain), tuple(spaced))
    # Of unequal lengths: vLLM takes the second for the first with a space before it.
    assert bad_words_token_ids(byte_level, ["the"]) == (tuple(byte_level.encode("the")),)


def test_errors_of_loading_name_the_folder(tmp_path):
    with pytest.raises(ValueError, match="not a folder"):
        load_tokenizer(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_without_a_vocabulary_is_refused(tmp_path):
    folder = tiny.build(tmp_path / "tiny")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="has no vocabulary: tokenizer.json .* is missing"):
        load_tokenizer(str(folder))


def test_a_token_within_a_character_has_no_text_and_the_last_has_the_character(byte_level):
    euro = byte_level.convert_tokens_to_ids(list("âĤ¬"))
    detokenizer = Detokenizer(byte_level, SamplingParams())
    before = [*byte_level.encode("the"), *euro]
    texts = [detokenizer.decode_token(t, before[: i - 3]) for i, t in enumerate(euro)]
    assert texts == ["", "", "€"]
    assert detokenizer.decode_token(euro[2]) == ""  # nothing is known of what came before
    smile = byte_level.convert_tokens_to_ids(list("ðŁĺĢ"))
    two = [*euro, *smile]
    assert [detokenizer.decode_token(t, two[:i]) for i, t in enumerate(two)][-4:] == [
        "",
        "",
        "",
        "😀",
    ]
    (the,) = byte_level.encode("a")
    assert detokenizer.decode_token(the, euro[:2]) == "a"


def test_a_chat_template_is_a_file_or_a_template(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ 1 }}")
    assert load_chat_template(str(tmp_path / "t.jinja")) == "{{ 1 }}"
    assert load_chat_template(tmp_path / "t.jinja") == "{{ 1 }}"
    assert load_chat_template("{{ 2 }}") == "{{ 2 }}"
    assert load_chat_template(None) is None
    with pytest.raises(ValueError, match="neither"):
        load_chat_template("chatml")
