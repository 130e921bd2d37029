"""Values moved to other lanes of other registers: heads need not be whole registers.

A register is 8 or 16 rows of LANES lanes. Those of 4 bytes can be rotated along the lanes, and a mask of lanes chooses
between two.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic_tpu import LANES


class Move(NamedTuple):
    """Lanes of a register that come from another one, which is rotated for it."""

    source: int
    target: int
    first: int  # of the target's lanes
    end: int
    rotation: int


def moves(source: int, target: int, count: int) -> list[Move]:
    """What brings `count` lanes from lane `source` of some registers to lane `target` of others."""
    borders = (i for i in range(1, count) if (source + i) % LANES == 0 or (target + i) % LANES == 0)
    found = []
    for begin, end in itertools.pairwise([0, *borders, count]):
        register, first = divmod(target + begin, LANES)
        found.append(
            Move(
                source=(source + begin) // LANES,
                target=register,
                first=first,
                end=first + end - begin,
                rotation=(target - source) % LANES,
            )
        )
    return found


def loader(load: Callable[[int], jax.Array]) -> Callable[[int, int], jax.Array]:
    """load(register), rotated, float32: once for each, since two registers may need it."""

    @cache
    def loaded(register: int, rotation: int) -> jax.Array:
        x = load(register).astype(jnp.float32)
        return pltpu.roll(x, rotation, 1) if rotation else x

    return loaded


def gathered(wanted: list[Move], register: int, load: Callable, x: Any) -> Any:
    """A register in float32: what is moved there, and x elsewhere. If x is None, other lanes are undefined.

    load: of `loader`.
    """
    for move in wanted:
        if move.target != register:
            continue
        found = load(move.source, move.rotation)
        if x is not None and move.end - move.first < LANES:
            lane = lax.broadcasted_iota(jnp.int32, found.shape, 1)
            found = jnp.where((lane >= move.first) & (lane < move.end), found, x)
        x = found
    return x


def alternating(arrays: Sequence[jax.Array], size: int) -> jax.Array:
    """Arrays of whole registers [T, heads * size] as float32[T, heads * len(arrays) * size]: the first head of each,
    then the second of each, and so on.
    """
    loads = [loader(lambda i, x=x: x[:, i * LANES : (i + 1) * LANES]) for x in arrays]
    width = sum(x.shape[1] for x in arrays)
    parts = []
    for number in range(width // size):
        head, which = divmod(number, len(arrays))
        parts.append((loads[which], moves(head * size, number * size, size)))
    registers = []
    for register in range(width // LANES):
        x = None
        for load, wanted in parts:
            x = gathered(wanted, register, load, x)
        registers.append(x)
    return jnp.concatenate(registers, axis=1)
