"""The generated text: answers agree with the table, seeds fix it, held-out names stay held out."""

from __future__ import annotations

import json
import random
import re

import pytest
from tokenizers import Tokenizer

from jaxpage.demo import checkpoint, text, tokens, words

SEEDS = range(200)


def cells(table: str) -> dict[str, dict[str, str]]:
    """A markdown table, read back: rows by name."""
    header, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
    )
    assert header == ["Name", "Age", "Occupation", "Country"]
    return {row[0]: dict(zip(("name", *text.COLUMNS), row, strict=True)) for row in rows}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(checkpoint() / "tokenizer.json"))


def test_a_look_up_is_answered_from_the_row_that_it_names():
    for seed in SEEDS:
        rng = random.Random(seed)
        people = text.people(rng, rng.randint(1, 8))
        for column in text.COLUMNS:
            turn = text.look_up(rng, people, column)
            (row,) = (r for n, r in cells(text.table(people)).items() if n in turn.question)
            assert turn.answer == words.ANSWERS[column].format(**row)
            assert row["name"] in turn.question


def test_the_wording_is_the_promised_one():
    person = text.Person("John Doe", 29, "Teacher", "France")
    turn = text.look_up(random.Random(1), [person], "age")
    assert turn.answer == "According to the table, John Doe is 29 years old."
    assert "What is the age of {name}?" in words.QUESTIONS["age"]
    assert "John" in words.FIRST_NAMES and "Doe" in words.LAST_NAMES


def test_json_holds_what_was_asked_for_and_what_the_row_says():
    for seed in SEEDS:
        rng = random.Random(seed)
        people = text.people(rng, 5)
        turn = text.json_record(rng, people)
        record = json.loads(turn.answer)
        row = cells(text.table(people))[record["name"]]
        assert {key: str(value) for key, value in record.items()} == {k: row[k] for k in record}
        asked = turn.question.removeprefix("Reply in JSON: ").split(" of ")[0]
        assert asked.replace(" and ", ", ").split(", ") == list(record)
        assert isinstance(record.get("age", 0), int)


def test_sums_are_right_and_as_long_as_asked():
    for seed in SEEDS:
        turn = text.addition(random.Random(seed), 2)
        left, total = turn.answer.rstrip(".").split(" = ")
        numbers = [int(number) for number in left.split(" + ")]
        assert sum(numbers) == int(total) and max(numbers) < 100
        assert left in turn.question


def test_stories_fill_every_blank_and_hardly_repeat():
    stories = {text.story(random.Random(seed), "owl").answer for seed in range(1000)}
    assert len(stories) > 990
    assert not any("{" in one for one in stories)
    assert not any(f" a {vowel}" in one for one in stories for vowel in "aeiou")
    assert "about an owl." in text.story(random.Random(0), "owl").question


def test_most_tables_repeat_no_first_and_no_last_name_and_none_repeats_a_person():
    distinct = 0
    for seed in SEEDS:
        names = [p.name for p in text.people(random.Random(seed), 20)]
        assert len(set(names)) == 20
        parts = [set(part) for part in zip(*(name.split() for name in names), strict=True)]
        distinct += all(len(part) == 20 for part in parts)
    assert 0.8 < distinct / len(SEEDS) < 0.97


def test_one_seed_says_one_thing():
    def say(seed: int) -> str:
        return tokens.conversation(random.Random(seed), rows=6, length=200)

    assert say(3) == say(3)
    assert say(3) != say(4)


def test_held_out_names_and_sums_never_occur_in_training():
    rng = random.Random(0)
    held_out = {p.name for _ in range(100) for p in text.people(rng, 10, split="held_out")}
    sums = {text.addition(rng, 2, split="held_out").answer.split(" =")[0] for _ in range(300)}
    assert len(held_out) > 300 and len(sums) > 200
    said = "\n".join(
        tokens.conversation(random.Random(seed), rows=12, length=300) for seed in range(1500)
    )
    pairs = set(re.findall(r"[A-Z]\w+ [A-Z]\w+", said))
    assert len(pairs) > 4000 and not pairs & held_out
    assert not set(re.findall(r"\d+ \+ \d+", said)) & sums


def test_a_table_that_the_names_cannot_fill_is_refused():
    with pytest.raises(ValueError, match="1 to 45"):
        text.people(random.Random(0), 46)
    assert len(text.people(random.Random(0), 45, split="held_out")) == 45


@pytest.mark.slow  # trains it
def test_the_packaged_tokenizer_is_the_one_that_is_trained(tokenizer):
    assert tokens.train_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_names_jobs_and_countries_are_one_token_each(tokenizer):
    spaced = words.FIRST_NAMES + words.LAST_NAMES + words.OCCUPATIONS + words.COUNTRIES
    quoted = words.FIRST_NAMES + words.OCCUPATIONS + words.COUNTRIES
    for word in [f" {word}" for word in spaced] + list(quoted):
        assert len(tokenizer.encode(word).ids) == 1, word
    assert len(set(spaced)) == len(spaced)


def test_every_row_of_a_table_has_as_many_tokens(tokenizer):
    people = text.people(random.Random(0), 30)
    table = f"{text.table(people)}\n"
    for line in table.splitlines(keepends=True)[2:]:
        assert len(tokenizer.encode(line).ids) == tokens.ROW_TOKENS


def test_any_text_survives_the_tokenizer(tokenizer):
    for one in ("Zoë said: 12 + 7 = 19!\n\n\tdef f(x): ...", "日本語 🙂", '{"a": [1, 2]}'):
        assert tokenizer.decode(tokenizer.encode(one).ids) == one
