"""How long the kernels of a GPU program take, from its HLO: XLA gives no estimates for GPUs.

A kernel takes the time in which the GPU moves its bytes or computes its products, at the rates that copies and products
were measured to achieve, plus the time of a kernel without work. Its bytes are those of its operands and results. If an
operand is only sliced or gathered from, the slices count; if an array is written in place, what is written.

Knows the text of optimised HLO and a chip's rates, and nothing of jax.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jaxpage.aot.hlo import COLLECTIVES
from jaxpage.aot.targets import Chip

# Kernels whose bytes and flops depend on the batch.
ATTENTION = ("paged_decode", "paged_prefill", "paged_combine")

_HEAD = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_LINE = re.compile(
    r"^\s*(?P<root>ROOT )?%?(?P<name>\S+) = (?P<made>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\((?P<operands>[^)]*)\)"
)
_ARRAY = re.compile(r"\b(?P<dtype>pred|[a-z]+\d\w*)\[(?P<shape>[\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLS = re.compile(r"\bcalls=%?([\w.\-]+)")
_CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")
_CONTRACTED_BY_CUBLAS = re.compile(r'"lhs_contracting_dimensions":\["([\d",]*)"\]')
# Nothing is launched for these; loops and branches consist of other lines, and exchanges are estimated elsewhere.
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"}
_FREE |= {"while", "conditional", "call", "opt-barrier", "partition-id", "replica-id"}
_FREE |= {f"{name}{end}" for name in ("async", "copy") for end in ("-start", "-done")}
_FREE |= {f"{name}{end}" for name in COLLECTIVES for end in ("", "-start", "-done")}
_VIEWS = ("bitcast", "reshape")
_PARTS = ("dynamic-slice", "slice", "gather")
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # the operand that is written


@dataclass(frozen=True, kw_only=True)
class _Line:
    text: str
    name: str
    made: str  # its result's type
    opcode: str
    operands: tuple[str, ...]
    is_root: bool


@dataclass
class _Computation:
    lines: list[_Line] = field(default_factory=list)

    def types(self) -> dict[str, str]:
        return {line.name: line.made for line in self.lines}


def nanoseconds(text: str, chip: Chip) -> dict[str, int | None]:
    """Of each instruction that launches a kernel, by name; None for attention's."""
    computations = _parse(text)
    found: dict[str, int | None] = {}
    for computation in computations.values():
        types = computation.types()
        for line in computation.lines:
            if line.opcode in _FREE:
                continue
            if line.opcode == "custom-call" and any(f"/{each}/" in line.text for each in ATTENTION):
                found[line.name] = None
                continue
            num_bytes, flops = _work(line, types, computations)
            seconds = max(
                num_bytes / (chip.bytes_per_second * chip.copy_share),
                flops / (chip.flops_per_second * chip.product_share),
            )
            found[line.name] = round(1e9 * (seconds + chip.seconds_per_kernel))
    return found


def _parse(text: str) -> dict[str, _Computation]:
    computations: dict[str, _Computation] = {}
    current = _Computation()
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = computations.setdefault(head["name"], _Computation())
        elif found := _LINE.match(line):
            names = tuple(_NAME.findall(found["operands"]))
            current.lines.append(
                _Line(
                    text=line,
                    name=found["name"],
                    made=found["made"],
                    opcode=found["opcode"],
                    operands=names,
                    is_root=bool(found["root"]),
                )
            )
    return computations


def _work(
    line: _Line, types: Mapping[str, str], computations: Mapping[str, _Computation]
) -> tuple[int, float]:
    """Bytes that the kernel moves, and flops of its products."""
    called = _CALLS.search(line.text)
    if line.opcode == "fusion" and called and called[1] in computations:
        return _work_of_fusion(computations[called[1]])
    moved = sum(_bytes(types.get(name, "")) for name in line.operands)
    if line.opcode in _IN_PLACE:
        return 2 * _bytes(types.get(line.operands[_IN_PLACE[line.opcode]], "")), 0.0
    if line.opcode in _PARTS:
        moved = _bytes(line.made)
    return moved + _bytes(line.made), _flops(line, types)


def _work_of_fusion(fused: _Computation) -> tuple[int, float]:
    types = fused.types()
    uses: dict[str, list[_Line]] = {}
    for line in fused.lines:
        for name in line.operands:
            uses.setdefault(name, []).append(line)
    read = sum(
        min(_bytes(line.made), _bytes_read(line.name, line.made, uses))
        for line in fused.lines
        if line.opcode == "parameter"
    )
    by_name = {line.name: line for line in fused.lines}
    written = sum(_bytes_written(line, by_name) for line in fused.lines if line.is_root)
    return read + written, sum(_flops(line, types) for line in fused.lines)


def _bytes_read(name: str, made: str, uses: Mapping[str, list[_Line]]) -> int:
    total = 0
    for use in uses.get(name, ()):
        is_first = use.operands[0] == name
        if use.opcode in _VIEWS:
            total += _bytes_read(use.name, made, uses)
        elif use.opcode in _PARTS and is_first:
            total += _bytes(use.made)
        elif not (use.opcode in _IN_PLACE and is_first):
            return _bytes(made)
    return total


def _bytes_written(line: _Line, by_name: Mapping[str, _Line]) -> int:
    if line.opcode in _VIEWS and line.operands[0] in by_name:
        return _bytes_written(by_name[line.operands[0]], by_name)
    if line.opcode == "tuple":
        return sum(_bytes_written(by_name[name], by_name) for name in line.operands)
    if line.opcode in _IN_PLACE:
        return _bytes(by_name[line.operands[_IN_PLACE[line.opcode]]].made)
    return _bytes(line.made)


def _flops(line: _Line, types: Mapping[str, str]) -> float:
    """Of a product: two for each element of the result and each that is summed."""
    contracted = None
    if line.opcode == "dot":
        contracted = _CONTRACTED.search(line.text)
    elif line.opcode == "custom-call" and '"__cublas' in line.text:
        contracted = _CONTRACTED_BY_CUBLAS.search(line.text)
    shapes = _shapes(types.get(line.operands[0], "")) if line.operands else []
    if contracted is None or not shapes:
        return 0.0
    summed = [shapes[0][int(i)] for i in re.findall(r"\d+", contracted[1])]
    return 2.0 * math.prod(_shapes(line.made)[0]) * math.prod(summed)


def _shapes(made: str) -> list[tuple[int, ...]]:
    return [shape for _, shape in _arrays(made)]


def _arrays(made: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for found in _ARRAY.finditer(made):
        yield found["dtype"], tuple(int(n) for n in found["shape"].split(",") if n)


def _bytes(made: str) -> int:
    return sum(math.prod(shape) * _bits(dtype) // 8 for dtype, shape in _arrays(made))


def _bits(dtype: str) -> int:
    """16 of bf16, 8 of f8e4m3fn and of pred."""
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 8
