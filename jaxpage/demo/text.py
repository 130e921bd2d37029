"""The data of the demo model: people in a table, look-ups, JSON, sums, small talk, stories.

All randomness comes from the `random.Random` argument, so a seed fixes it. Some name pairs and some sums are never used
for training: `split="held_out"` draws only from those.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from jaxpage.demo import words

Split = Literal["train", "held_out"]
Column = Literal["age", "occupation", "country"]
Kind = Literal["look_up", "json", "sum", "talk", "story"]

COLUMNS: tuple[Column, ...] = ("age", "occupation", "country")
# Larger tables would make drawing names slow.
MAX_ROWS = min(len(words.FIRST_NAMES), len(words.LAST_NAMES)) // 2


@dataclass(frozen=True)
class Person:
    """One row of a table."""

    name: str
    age: int
    occupation: str
    country: str


@dataclass(frozen=True)
class Turn:
    """A question and the one correct answer (for a story: one of very many)."""

    kind: Kind
    question: str
    answer: str


def split_of(key: str) -> Split:
    """The split of a name pair ("John Doe") or a sum ("37 + 58"): one in ten is held out."""
    return "held_out" if zlib.crc32(key.encode()) % 10 == 0 else "train"


def people(rng: random.Random, rows: int, *, split: Split = "train") -> list[Person]:
    """`rows` people with names of one split; in nine tables of ten all first names and all last names are distinct.

    Raises ValueError if there are not enough names.
    """
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"{rows} rows; a table has 1 to {MAX_ROWS}")
    distinct = rng.random() < 0.9
    found: list[Person] = []
    taken = set[str]()
    while len(found) < rows:
        first, last = rng.choice(words.FIRST_NAMES), rng.choice(words.LAST_NAMES)
        name = f"{first} {last}"
        parts = {first, last} if distinct else {name}  # first and last names have no word in common
        if parts & taken or split_of(name) != split:
            continue
        taken |= parts
        age = rng.randint(18, 89)
        found.append(Person(name, age, rng.choice(words.OCCUPATIONS), rng.choice(words.COUNTRIES)))
    return found


def table(rows: Sequence[Person]) -> str:
    """The people as a markdown table, without a newline at the end."""
    lines = ["| Name | Age | Occupation | Country |", "|---|---|---|---|"]
    lines += [f"| {p.name} | {p.age} | {p.occupation} | {p.country} |" for p in rows]
    return "\n".join(lines)


def system_message(table_text: str, introduction: str = words.INTRODUCTIONS[0]) -> str:
    """The system message before questions about a table."""
    return f"{introduction}\n\n{table_text}"


def look_up(rng: random.Random, rows: Sequence[Person], column: Column | None = None) -> Turn:
    """A question about one cell of the table; the column is random by default."""
    person = rng.choice(rows)
    column = column or rng.choice(COLUMNS)
    question = rng.choice(words.QUESTIONS[column]).format(name=person.name)
    return Turn("look_up", question, words.ANSWERS[column].format(**asdict(person)))


def json_record(rng: random.Random, rows: Sequence[Person]) -> Turn:
    """Some columns of one row, requested as JSON."""
    person = rng.choice(rows)
    drawn = rng.sample(COLUMNS, rng.choice((1, 2, 2, 3)))
    columns = [column for column in COLUMNS if column in drawn]
    wanted = ", ".join(["name", *columns[:-1]]) + f" and {columns[-1]}"
    record = {"name": person.name} | {column: getattr(person, column) for column in columns}
    return Turn("json", f"Reply in JSON: {wanted} of {person.name}.", json.dumps(record))


def addition(rng: random.Random, digits: int | None = None, *, split: Split = "train") -> Turn:
    """A sum of two numbers of up to `digits` digits, 1 to 3; by default random, mostly 2 and 3."""
    while True:
        first, second = (
            rng.randrange(10 ** (digits or rng.choices((1, 2, 3), (1, 3, 4))[0])) for _ in range(2)
        )
        if split_of(f"{first} + {second}") == split:
            question = rng.choice(words.SUMS).format(a=first, b=second)
            return Turn("sum", question, f"{first} + {second} = {first + second}.")


def talk(rng: random.Random) -> Turn:
    """A line of small talk."""
    questions, answer = rng.choice(words.TALK)
    return Turn("talk", rng.choice(questions), answer)


def story(rng: random.Random, animal: str | None = None) -> Turn:
    """A request for a story, and one of the very many stories of `words.STORY`."""
    chosen: str = animal or rng.choice(words.STORY_ANIMALS)
    friend = rng.choice([other for other in words.STORY_ANIMALS if other != chosen])
    mood, friend_mood = rng.sample(words.STORY_MOODS, 2)
    parts = {"animal": chosen, "friend": friend, "mood": mood, "friend_mood": friend_mood}
    parts["name"] = rng.choice(words.FIRST_NAMES)
    lines = [
        rng.choice(sentences).format(**parts)
        for sentences, chance in words.STORY
        if rng.random() < chance
    ]
    article = "an" if chosen[0] in "aeiou" else "a"
    question = rng.choice(words.STORY_REQUESTS).format(article=article, animal=chosen)
    return Turn("story", question, " ".join(lines))


def turns(rng: random.Random, rows: Sequence[Person], weights: dict[Kind, float]) -> Iterator[Turn]:
    """Endless turns of the training split, with each kind's frequency given by its weight.

    Look-ups and JSON need `rows`.
    """
    makers = {"sum": addition, "talk": talk, "story": story}
    about_rows = {"look_up": look_up, "json": json_record}
    while True:
        kind = rng.choices(list(weights), list(weights.values()))[0]
        yield about_rows[kind](rng, rows) if kind in about_rows else makers[kind](rng)


def messages(system: str | None, said: Sequence[Turn]) -> list[dict[str, str]]:
    """The conversation as chat messages, without the answer of the last turn."""
    chat = [] if system is None else [{"role": "system", "content": system}]
    for turn in said:
        chat.append({"role": "user", "content": turn.question})
        chat.append({"role": "assistant", "content": turn.answer})
    return chat[:-1] if said else chat
