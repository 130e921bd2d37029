"""What devices exchange, according to the text of a compiled program: kinds of collectives, calls and bytes.

Knows the syntax of XLA's optimised programs (HLO). Must not know jax, nor what a program computes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_CALL = re.compile(rf" (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_ARRAY = re.compile(r"(?P<dtype>pred|[a-z]+(?P<bits>\d+)\w*)\[(?P<sizes>[\d,]*)\]")
# jax gives it to all collectives of a `shard_map`. XLA numbers its own.
_SHARED_CHANNEL = "1"


class Exchange(NamedTuple):
    """Collectives of one kind and size."""

    kind: str  # one of KINDS
    count: int
    num_bytes: int  # of the result of each on one device


def exchanges(text: str) -> list[Exchange]:
    """The exchanges in a program's HLO, the largest first. One of the compiler's own may appear several times, in the
    computations that it overlaps with; these share a channel.
    """
    calls: dict[str, tuple[str, int]] = {}
    for line in text.splitlines():
        found = _CALL.search(line)
        channel = found and _CHANNEL.search(line, found.end())
        if found and channel:
            name, _, made = line[: found.start()].partition(" = ")
            result = _result(made) if found["start"] else made
            is_shared = channel[1] == _SHARED_CHANNEL
            number = name if is_shared else channel[0]
            calls[number] = (found["kind"], sum(map(_bytes, _ARRAY.finditer(result))))
    counted = Counter(calls.values())
    return sorted(
        (Exchange(kind, count, num_bytes) for (kind, num_bytes), count in counted.items()),
        key=lambda each: (-each.num_bytes, each.kind),
    )


def _result(made: str) -> str:
    """The results in "(operands, results, ...)", the type of the start of an asynchronous call."""
    parts, depth, begin = [], 0, 1
    for index, character in enumerate(made):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or depth == 0:
            parts.append(made[begin:index])
            begin = index + 1
    return parts[1]


def _bytes(array: re.Match[str]) -> int:
    bits = int(array["bits"] or 8)  # pred has none
    return math.prod(int(n) for n in array["sizes"].split(",") if n) * bits // 8
