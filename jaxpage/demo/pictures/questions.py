"""Questions about a picture, and the one correct answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from jaxpage.demo.pictures.scenes import COLOURS, PLACES, SHAPES, SIZES, Scene, Thing

NUMBERS = ("no", "one", "two", "three", "four", "five")


@dataclass(frozen=True)
class Turn:
    """A question and its answer."""

    kind: str
    question: str
    answer: str


def describe(rng: random.Random, scene: Scene) -> Turn:
    """All shapes, in the order of their places."""
    question = rng.choice(
        ("What is in the picture?", "Describe the picture.", "What do you see?", "What is this?")
    )
    return Turn("describe", question, _sentence([_placed(thing) for thing in scene.things]))


def where(rng: random.Random, scene: Scene) -> Turn | None:
    """The place of a shape; None if none is unique by colour and shape."""
    thing = _alone(rng, scene, lambda thing: (thing.colour, thing.shape))
    if thing is None:
        return None
    name = f"{thing.colour} {thing.shape}"
    return Turn("where", f"Where is the {name}?", f"The {name} is {PLACES[thing.place]}.")


def colour(rng: random.Random, scene: Scene) -> Turn | None:
    """The colour of a shape that occurs once; None if there is none."""
    thing = _alone(rng, scene, lambda thing: thing.shape)
    if thing is None:
        return None
    question = rng.choice(("What colour is the {}?", "Which colour does the {} have?"))
    return Turn("colour", question.format(thing.shape), f"The {thing.shape} is {thing.colour}.")


def size(rng: random.Random, scene: Scene) -> Turn | None:
    """The size of a shape; None if none is unique by colour and shape."""
    thing = _alone(rng, scene, lambda thing: (thing.colour, thing.shape))
    if thing is None:
        return None
    name = f"{thing.colour} {thing.shape}"
    return Turn("size", f"Is the {name} small or large?", f"The {name} is {thing.size}.")


def at_place(rng: random.Random, scene: Scene) -> Turn:
    """What is at a place, mostly an occupied one."""
    place = rng.choice(scene.things).place if rng.random() < 0.75 else rng.randrange(len(PLACES))
    found = [thing for thing in scene.things if thing.place == place]
    answer = f"A {found[0].name}." if found else "Nothing."
    return Turn("at", f"What is {PLACES[place]}?", answer)


def count(rng: random.Random, scene: Scene) -> Turn:
    """How many things there are, in all or of one shape or colour."""
    kind = rng.random()
    if kind < 0.3:
        found, one, several = len(scene.things), "thing", "things"
    elif kind < 0.65:
        shape = rng.choice((rng.choice(SHAPES), rng.choice(scene.things).shape))
        found = sum(thing.shape == shape for thing in scene.things)
        one, several = shape, plural(shape)
    else:
        colour = rng.choice((rng.choice(tuple(COLOURS)), rng.choice(scene.things).colour))
        found = sum(thing.colour == colour for thing in scene.things)
        one, several = f"{colour} thing", f"{colour} things"
    verb = "is" if found == 1 else "are"
    answer = f"There {verb} {NUMBERS[found]} {one if found == 1 else several}."
    return Turn("count", f"How many {several} are there?", answer)


def exists(rng: random.Random, scene: Scene) -> Turn:
    """Whether there is a thing of a colour and a shape; half of the time both are of a thing in the scene."""
    here = rng.choice(scene.things)
    colour, shape = here.colour, here.shape
    if rng.random() < 0.5:
        other = rng.random()
        colour = rng.choice(tuple(COLOURS)) if other < 0.67 else colour
        shape = rng.choice(SHAPES) if other > 0.33 else shape
    found = any((thing.colour, thing.shape) == (colour, shape) for thing in scene.things)
    article = "an" if colour[0] in "aeiou" else "a"
    return Turn("exists", f"Is there {article} {colour} {shape}?", "Yes." if found else "No.")


ASKING: dict[str, Callable[[random.Random, Scene], Turn | None]] = {
    "describe": describe,
    "where": where,
    "colour": colour,
    "size": size,
    "at": at_place,
    "count": count,
    "exists": exists,
}
_WEIGHTS = (3, 3, 2, 2, 3, 4, 3)


def ask(rng: random.Random, scene: Scene, kind: str | None = None) -> Turn | None:
    """A question of a kind, by default a random one; None if the scene has no such question."""
    kind = kind or rng.choices(tuple(ASKING), _WEIGHTS)[0]
    return ASKING[kind](rng, scene)


def every_text() -> list[str]:
    """All words of questions and answers, for the tokenizer."""
    names = [
        f"A {size} {colour} {shape}" for size in SIZES for colour in COLOURS for shape in SHAPES
    ]
    things = [f" {plural(shape)} are {number}" for shape in SHAPES for number in NUMBERS]
    return [*names, *things, *(f"is {place}." for place in PLACES)]


def plural(shape: str) -> str:
    return f"{shape}es" if shape.endswith("s") else f"{shape}s"


def _placed(thing: Thing) -> str:
    return f"a {thing.name} {PLACES[thing.place]}"


def _sentence(parts: list[str]) -> str:
    joined = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{joined[0].upper()}{joined[1:]}."


def _alone(rng: random.Random, scene: Scene, key: Callable[[Thing], object]) -> Thing | None:
    """A random thing whose key is unique."""
    keys = [key(thing) for thing in scene.things]
    found = [thing for thing, own in zip(scene.things, keys, strict=True) if keys.count(own) == 1]
    return rng.choice(found) if found else None
