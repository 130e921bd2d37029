"""What a compiled program contains: exchanges between devices, copies of large arrays, calls of kernels.

Reads programs in the syntax of `hlo`. Must not know jax, nor what a program computes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxpage.aot.hlo import Instruction, Program, arrays_in

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_CHANNEL = re.compile(r"channel_id=(\d+)")
# jax gives it to all collectives of a `shard_map`. XLA numbers its own.
_SHARED_CHANNEL = "1"
_KERNEL = re.compile(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu_v2)"')
_VMEM = re.compile(r'"scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"')

# Instructions whose result has the place of an operand, or that only refer to the results of others: the instructions
# of a fusion, a loop or a branch are in the text themselves. A custom call is a kernel, which declares what it aliases.
# Where an update cannot be done in place, XLA adds a copy before it.
_IN_PLACE = {"dynamic-update-slice", "scatter"}
_NAMES = {"parameter", "get-tuple-element", "bitcast", "tuple", "opt-barrier"}
_CALLS = {"custom-call", "fusion", "while", "conditional", "call"}


class Exchange(NamedTuple):
    """Collectives of one kind and size."""

    kind: str  # one of COLLECTIVES
    count: int
    num_bytes: int  # of the result of each on one device


def exchanges(program: Program) -> list[Exchange]:
    """The largest first. A collective of the compiler's own may appear several times, in the computations that it
    overlaps with; these share a channel.
    """
    found: dict[str, tuple[str, int]] = {}
    for each in program:
        kind = each.opcode.removesuffix("-start")
        channel = _CHANNEL.search(each.line)
        if kind in COLLECTIVES and channel:
            number = each.name if channel[1] == _SHARED_CHANNEL else channel[0]
            found[number] = kind, sum(array.num_bytes for array in arrays_in(_result(each)))
    counted = Counter(found.values())
    return sorted(
        (Exchange(kind, count, num_bytes) for (kind, num_bytes), count in counted.items()),
        key=lambda each: (-each.num_bytes, each.kind),
    )


def copies_of_size(program: Program, shapes: Iterable[tuple[int, ...]]) -> Iterator[str]:
    """Instructions that produce a new array as large as one of the shapes (of one device), in any layout."""
    sizes = {math.prod(shape) for shape in shapes}
    for each in program:
        if each.operands and each.opcode not in _IN_PLACE | _NAMES | _CALLS:
            if not sizes.isdisjoint(array.size for array in each.arrays):
                yield each.line.strip()[:200]


def kernel_calls(program: Program) -> list[tuple[str, int | None]]:
    """For each call of a Pallas kernel its name, as traced, and its limit of VMEM bytes: the compiler refuses a TPU
    kernel that needs more. None where there is no limit, as on GPUs.
    """
    found = []
    for each in program:
        if _KERNEL.search(each.line):
            limit = _VMEM.search(each.line)
            found.append((each.op_name, limit and int(limit[1])))
    return found


def _result(collective: Instruction) -> str:
    """The type of its results. That of an asynchronous start is "(operands, results, ...)"."""
    made = collective.made
    if collective.opcode in COLLECTIVES:
        return made
    parts, depth, begin = [], 0, 1
    for index, character in enumerate(made):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or depth == 0:
            parts.append(made[begin:index])
            begin = index + 1
    return parts[1]
