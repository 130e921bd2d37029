"""The content of the pictures: a few coloured shapes on a plain background, each at one of nine places.

All randomness comes from the `random.Random` argument, so a seed fixes it. Some scenes are never used for training:
`split="held_out"` draws only from those.
"""

from __future__ import annotations

import math
import random
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxpage.demo.text import Split

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 96  # pixels of a picture
MAX_THINGS = 5

SHAPES = ("circle", "square", "triangle", "star", "cross")
COLOURS = {
    "red": (214, 40, 40),
    "orange": (247, 127, 0),
    "yellow": (240, 200, 20),
    "green": (40, 150, 70),
    "blue": (40, 90, 210),
    "purple": (130, 50, 160),
    "black": (20, 20, 20),
}
GROUNDS = ((255, 255, 255), (235, 235, 235), (222, 238, 250), (250, 240, 222))
SIZES = {"small": 8.0, "large": 13.5}  # half of their width in pixels
PLACES = (
    "at the top left",
    "at the top",
    "at the top right",
    "at the left",
    "in the middle",
    "at the right",
    "at the bottom left",
    "at the bottom",
    "at the bottom right",
)
_FINE = 4  # factor of supersampling, for smooth edges


@dataclass(frozen=True)
class Thing:
    """One shape."""

    place: int  # index of PLACES
    shape: str
    colour: str
    size: str

    @property
    def name(self) -> str:
        return f"{self.size} {self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """The description of a picture; `things` are in the order of their places."""

    things: tuple[Thing, ...]
    ground: tuple[int, int, int]
    shifts: tuple[tuple[float, float], ...]  # of each thing from the centre of its place, in pixels


def scene(rng: random.Random, count: int | None = None, *, split: Split = "train") -> Scene:
    """A scene with `count` things, 1 to MAX_THINGS; random by default."""
    while True:
        number = count or rng.choices(range(1, MAX_THINGS + 1), (1, 2, 3, 3, 3))[0]
        places = sorted(rng.sample(range(len(PLACES)), number))
        things = tuple(
            Thing(place, rng.choice(SHAPES), rng.choice(tuple(COLOURS)), rng.choice(tuple(SIZES)))
            for place in places
        )
        if split_of(things) == split:
            shifts = tuple((rng.uniform(-2.5, 2.5), rng.uniform(-2.5, 2.5)) for _ in things)
            return Scene(things, rng.choice(GROUNDS), shifts)


def split_of(things: tuple[Thing, ...]) -> Split:
    """The split of pictures with these things: one in ten is held out."""
    key = ", ".join(f"{thing.name} {thing.place}" for thing in things)
    return "held_out" if zlib.crc32(key.encode()) % 10 == 0 else "train"


def draw(scene: Scene) -> Image:
    """The picture, RGB, SIDE x SIDE pixels."""
    from PIL import Image, ImageDraw

    canvas = Image.new("RGB", (SIDE * _FINE, SIDE * _FINE), scene.ground)
    pen = ImageDraw.Draw(canvas)
    for thing, (across, down) in zip(scene.things, scene.shifts, strict=True):
        row, column = divmod(thing.place, 3)
        x, y = (column + 0.5) * SIDE / 3 + across, (row + 0.5) * SIDE / 3 + down
        radius, colour = SIZES[thing.size], COLOURS[thing.colour]
        if thing.shape == "circle":
            box = (x - radius, y - radius, x + radius, y + radius)
            pen.ellipse([_FINE * value for value in box], fill=colour)
        else:
            corners = [
                (_FINE * (x + radius * a), _FINE * (y + radius * b))
                for a, b in _CORNERS[thing.shape]
            ]
            pen.polygon(corners, fill=colour)
    return canvas.resize((SIDE, SIDE), Image.Resampling.BOX)


def _star() -> list[tuple[float, float]]:
    turns = [math.pi * (i / 5 - 0.5) for i in range(10)]
    return [
        (r * math.cos(turn), r * math.sin(turn))
        for turn, r in zip(turns, (1.1, 0.45) * 5, strict=True)
    ]


# Corners of the polygons, in half widths from their centre, y downwards.
_CORNERS: dict[str, list[tuple[float, float]]] = {
    "square": [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    "triangle": [(0.0, -1.0), (1.0, 0.9), (-1.0, 0.9)],
    "star": _star(),
    "cross": [
        (-0.35, -1), (0.35, -1), (0.35, -0.35), (1, -0.35), (1, 0.35), (0.35, 0.35),
        (0.35, 1), (-0.35, 1), (-0.35, 0.35), (-1, 0.35), (-1, -0.35), (-0.35, -0.35),
    ],
}  # fmt: skip
