"""What the text of a compiled program shows: collectives, copies of large arrays, calls of kernels.

Knows the syntax of XLA's optimised programs (HLO). Must not know jax, nor what a program computes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COLLECTIVE = re.compile(
    rf"= \(?(?P<made>.*?) (?P<name>{'|'.join(COLLECTIVES)})(?:-start)?\(.*channel_id=(?P<channel>\d+)"
)
_INSTRUCTION = re.compile(r"= (?P<made>.*?) (?P<opcode>[a-z][\w-]*)\(%")
_KERNEL = re.compile(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu_v2)"')
_VMEM = re.compile(r'"scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"')
_NAME = re.compile(r'op_name="([^"]*)"')
_SHAPE = re.compile(r"(?P<dtype>\w+)\[(?P<sizes>[\d,]*)\]")

# Instructions whose result has the place of an operand, or that only refer to the results of others: the instructions
# of a fusion, a loop or a branch are in the text themselves. A custom call is a kernel, which declares what it aliases.
# Where an update cannot be done in place, XLA adds a copy before it.
_IN_PLACE = {"dynamic-update-slice", "scatter"}
_NAMES = {"parameter", "get-tuple-element", "bitcast", "tuple", "opt-barrier"}
_CALLS = {"custom-call", "fusion", "while", "conditional", "call"}


def collectives(text: str) -> dict[str, dict[str, int]]:
    """By name: the number of collectives in a program's HLO, and the elements in the largest result.

    One collective may appear several times, in the computations that it overlaps with; these share a channel.
    """
    largest: dict[str, dict[str, int]] = {}
    for match in _COLLECTIVE.finditer(text):
        sizes = list(_sizes(match["made"]))
        largest.setdefault(match["name"], {})[match["channel"]] = max(sizes, default=0)
    return {
        name: {"count": len(channels), "largest": max(channels.values())}
        for name, channels in largest.items()
    }


def copies_of_size(text: str, shapes: Iterable[tuple[int, ...]]) -> Iterator[str]:
    """Instructions that produce a new array as large as one of the shapes (of one device), in any layout."""
    sizes = {math.prod(shape) for shape in shapes}
    for line in text.splitlines():
        found = _INSTRUCTION.search(line)
        if found and found["opcode"] not in _IN_PLACE | _NAMES | _CALLS:
            if not sizes.isdisjoint(_sizes(found["made"])):
                yield line.strip()[:200]


def kernel_calls(text: str) -> list[tuple[str, int | None]]:
    """For each call of a Pallas kernel its name, as traced, and its limit of VMEM bytes: the compiler refuses a TPU
    kernel that needs more. None where there is no limit, as on GPUs.
    """
    found = []
    for line in text.splitlines():
        if _KERNEL.search(line):
            name, limit = _NAME.search(line), _VMEM.search(line)
            found.append((name[1] if name else "", limit and int(limit[1])))
    return found


def _sizes(made: str) -> Iterator[int]:
    """The number of elements of each array in the type of an instruction."""
    return (
        math.prod(int(n) for n in shape["sizes"].split(",") if n) for shape in _SHAPE.finditer(made)
    )
