"""The syntax of XLA's optimised programs (HLO): computations of instructions, of which each makes arrays.

Must not know jax, nor what a program computes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_HEAD = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(
    r"^\s*(?P<root>ROOT )?%?(?P<name>\S+) = (?P<made>\(.*?\)|\S+) "
    r"(?P<opcode>[a-z][\w\-]*)\((?P<operands>[^)]*)\)"
)
_OPERAND = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+\d\w*)\[(?P<shape>[\d,]*)\]")
_BITS = re.compile(r"[a-z]+(\d+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Array:
    """The type of an array, without its layout; dtype: in XLA's words, such as "bf16", "f8e4m3fn" and "pred"."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        bits = _BITS.match(self.dtype)
        return self.size * int(bits[1] if bits else 8) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """operands: the names of the instructions whose results it uses; made: the type of its result, with layouts."""

    line: str
    name: str
    opcode: str
    operands: tuple[str, ...]
    made: str
    is_root: bool  # whether its result is that of its computation

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays in its result."""
        return arrays_in(self.made)

    @property
    def num_bytes(self) -> int:
        """The size of its result."""
        return sum(each.num_bytes for each in self.arrays)

    @property
    def op_name(self) -> str:
        """Its origin, as traced; "" if it has none."""
        found = _OP_NAME.search(self.line)
        return found[1] if found else ""


@dataclass(frozen=True, kw_only=True)
class Program:
    """entry: the name of the computation that runs; the others are called by instructions."""

    entry: str
    computations: dict[str, list[Instruction]]

    def __iter__(self) -> Iterator[Instruction]:
        """All instructions, including those of fusions, loops and branches."""
        return (each for computation in self.computations.values() for each in computation)


def parse(text: str) -> Program:
    """`text`: a compiled program, `compiled.as_text()`."""
    entry, computation = "", list[Instruction]()
    computations = {entry: computation}
    for line in text.splitlines():
        if head := _HEAD.match(line):
            computation = computations.setdefault(head["name"], [])
            entry = head["name"] if head["entry"] else entry
        elif found := _INSTRUCTION.match(line):
            computation.append(
                Instruction(
                    line=line,
                    name=found["name"],
                    opcode=found["opcode"],
                    operands=tuple(_OPERAND.findall(found["operands"])),
                    made=found["made"],
                    is_root=bool(found["root"]),
                )
            )
    return Program(entry=entry, computations=computations)


def arrays_in(made: str) -> tuple[Array, ...]:
    """The arrays in the type of a result, or of a part of it. Tokens are no arrays."""
    return tuple(
        Array(found["dtype"], tuple(int(n) for n in found["shape"].split(",") if n))
        for found in _ARRAY.finditer(made)
    )
