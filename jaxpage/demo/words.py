"""The words of the demo model, read from `words.toml`: names, jobs, questions, small talk, stories."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import Any

_FILE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("words.toml").read_text("utf-8"))

FIRST_NAMES = tuple(_FILE["first_names"].split())
LAST_NAMES = tuple(_FILE["last_names"].split())
OCCUPATIONS = tuple(_FILE["occupations"].split())
COUNTRIES = tuple(_FILE["countries"].split())
STORY_ANIMALS = tuple(_FILE["story_animals"].split())
STORY_MOODS = tuple(_FILE["story_moods"].split())
GREETINGS = tuple(_FILE["greetings"])
INTRODUCTIONS = tuple(_FILE["introductions"])
SUMS = tuple(_FILE["sums"])
STORY_REQUESTS = tuple(_FILE["story_requests"])
QUESTIONS: dict[str, list[str]] = _FILE["questions"]  # by column
ANSWERS: dict[str, str] = _FILE["answers"]  # by column
# Groups of questions, each with its answer.
TALK = tuple((tuple(questions), answer) for questions, answer in _FILE["talk"])


def _sentences(group: dict[str, Any]) -> tuple[str, ...]:
    """All combinations of the group's parts; placeholders such as "{animal}" remain."""
    fields = [f"{{{field}}}" for field in group.get("for_each", ())]
    found = []
    for parts in itertools.product(*(_FILE["parts"][field[1:-1]] for field in fields)):
        for sentence in group["sentences"]:
            for field, part in zip(fields, parts, strict=True):
                sentence = sentence.replace(field, part)
            found.append(sentence)
    return tuple(found)


# A story has one sentence of each group, in this order, with the given probability.
STORY = tuple((_sentences(group), group["chance"]) for group in _FILE["story"])
