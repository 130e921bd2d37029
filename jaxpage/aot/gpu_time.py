"""How long the kernels of a GPU program take, from its HLO: XLA gives no estimates for GPUs.

A kernel takes the time in which the GPU moves its bytes or computes its products, at the rates that copies and products
were measured to achieve, plus the time of a kernel without work. Its bytes are those of its operands and results. If an
operand is only sliced or gathered from, the slices count; if an array is written in place, what is written.

Reads programs in the syntax of `hlo`, and a chip's rates. Must not know jax.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from jaxpage.aot.contents import COLLECTIVES
from jaxpage.aot.hlo import Instruction, Program
from jaxpage.aot.targets import Chip

# Kernels whose bytes and flops depend on the batch.
ATTENTION = ("paged_decode", "paged_prefill", "paged_combine")
STATES = ("delta_rule", "mamba2")  # which move the states of the rows only

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


def nanoseconds(program: Program, chip: Chip) -> dict[str, int | None]:
    """The time of each instruction that launches a kernel, by name; None for `ours`."""
    found: dict[str, int | None] = {}
    for computation in program.computations.values():
        made = {each.name: each for each in computation}
        for each in computation:
            if each.opcode in _FREE:
                continue
            if ours(each) is not None:
                found[each.name] = None
                continue
            num_bytes, flops = _work(each, made, program)
            seconds = max(
                num_bytes / (chip.bytes_per_second * chip.copy_share),
                flops / (chip.flops_per_second * chip.product_share),
            )
            found[each.name] = round(1e9 * (seconds + chip.seconds_per_kernel))
    return found


def ours(kernel: Instruction) -> str | None:
    """The name of a kernel whose work depends on the batch: `paged_attention`, or one of STATES. None: another one."""
    if kernel.opcode != "custom-call":
        return None
    if any(f"/{name}/" in kernel.line for name in ATTENTION):
        return "paged_attention"
    return next((name for name in STATES if f"/{name}/" in kernel.line), None)


def _work(
    kernel: Instruction, made: Mapping[str, Instruction], program: Program
) -> tuple[int, float]:
    """Bytes that it moves, and flops of its products. `made`: the instructions that make operands, by name."""
    called = _CALLS.search(kernel.line)
    if kernel.opcode == "fusion" and called and called[1] in program.computations:
        return _work_of_fusion(program.computations[called[1]])
    if kernel.opcode in _IN_PLACE:
        written = kernel.operands[_IN_PLACE[kernel.opcode]]
        return 2 * made[written].num_bytes, 0.0
    if kernel.opcode in _PARTS:
        return 2 * kernel.num_bytes, 0.0
    read = sum(made[name].num_bytes for name in kernel.operands)
    return read + kernel.num_bytes, _flops(kernel, made)


def _work_of_fusion(fused: Sequence[Instruction]) -> tuple[int, float]:
    made = {each.name: each for each in fused}
    uses: dict[str, list[Instruction]] = {}
    for each in fused:
        for name in each.operands:
            uses.setdefault(name, []).append(each)
    parameters = (each for each in fused if each.opcode == "parameter")
    read = sum(min(each.num_bytes, _bytes_read(each, each.num_bytes, uses)) for each in parameters)
    written = sum(_bytes_written(each, made) for each in fused if each.is_root)
    return read + written, sum(_flops(each, made) for each in fused)


def _bytes_read(
    array: Instruction, num_bytes: int, uses: Mapping[str, Sequence[Instruction]]
) -> int:
    """Bytes that its uses read of an array, or a view of it, that has `num_bytes`."""
    total = 0
    for use in uses.get(array.name, ()):
        is_first = use.operands[0] == array.name
        if use.opcode in _VIEWS:
            total += _bytes_read(use, num_bytes, uses)
        elif use.opcode in _PARTS and is_first:
            total += use.num_bytes
        elif not (use.opcode in _IN_PLACE and is_first):
            return num_bytes
    return total


def _bytes_written(root: Instruction, made: Mapping[str, Instruction]) -> int:
    if root.opcode in _VIEWS:
        return _bytes_written(made[root.operands[0]], made)
    if root.opcode == "tuple":
        return sum(_bytes_written(made[name], made) for name in root.operands)
    if root.opcode in _IN_PLACE:
        return made[root.operands[_IN_PLACE[root.opcode]]].num_bytes
    return root.num_bytes


def _flops(kernel: Instruction, made: Mapping[str, Instruction]) -> float:
    """The flops of a product, two for each element of the result and each that is summed; 0 for anything else."""
    contracted = None
    if kernel.opcode == "dot":
        contracted = _CONTRACTED.search(kernel.line)
    elif kernel.opcode == "custom-call" and '"__cublas' in kernel.line:
        contracted = _CONTRACTED_BY_CUBLAS.search(kernel.line)
    if contracted is None:
        return 0.0
    (multiplied, *_), (result, *_) = made[kernel.operands[0]].arrays, kernel.arrays
    flops = 2.0 * result.size
    for axis in re.findall(r"\d+", contracted[1]):
        flops *= multiplied.shape[int(axis)]
    return flops
