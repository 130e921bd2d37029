"""Chips to compile for: the numbers in their data sheets.

Knows numbers and names. Must not know jax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One device as jax counts them (a TPU7x chip is two). Rates are peaks, from data sheets."""

    name: str
    platform: str  # "tpu" or "gpu"
    device_kind: str  # jax's name of one device
    num_bytes: int  # memory that programs can have: what the TPUs' compiler allows, what jax takes of a GPU
    bytes_per_second: float  # of that memory
    flops_per_second: float  # products of bfloat16
    devices_per_chip: int = 1
    rank: int = 2  # numbers in a topology; 0: it has none, and is used alone


CHIPS = {
    chip.name: chip
    for chip in (
        # https://cloud.google.com/tpu/docs/v5e, /v5p, /v6e, /tpu7x
        Chip(
            name="v5e",
            platform="tpu",
            device_kind="TPU v5 lite",
            num_bytes=int(15.75 * GIB),
            bytes_per_second=819e9,
            flops_per_second=197e12,
        ),
        Chip(
            name="v5p",
            platform="tpu",
            device_kind="TPU v5",
            num_bytes=int(95.73 * GIB),
            bytes_per_second=2765e9,
            flops_per_second=459e12,
            rank=3,
        ),
        Chip(
            name="v6e",
            platform="tpu",
            device_kind="TPU v6 lite",
            num_bytes=int(31.24 * GIB),
            bytes_per_second=1640e9,
            flops_per_second=918e12,
        ),
        Chip(
            name="tpu7x",
            platform="tpu",
            device_kind="TPU7x",
            num_bytes=int(94.74 * GIB),
            bytes_per_second=3690e9,
            flops_per_second=1153e12,
            devices_per_chip=2,
            rank=3,
        ),
        # NVIDIA H200 SXM data sheet. Of the memory that its driver reports jax takes three quarters, unless
        # XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
        Chip(
            name="h200",
            platform="gpu",
            device_kind="NVIDIA H200",
            num_bytes=int(0.75 * 143_771 * 2**20),
            bytes_per_second=4800e9,
            flops_per_second=989e12,
            rank=0,
        ),
    )
}


@dataclass(frozen=True)
class Target:
    """Some chips of one kind."""

    chip: Chip
    topology: tuple[int, ...]  # chips along each axis; () for a single one

    @property
    def name(self) -> str:
        return ":".join(
            [self.chip.name, *(["x".join(map(str, self.topology))] * bool(self.topology))]
        )

    @property
    def num_devices(self) -> int:
        return math.prod(self.topology) * self.chip.devices_per_chip


def parse_target(text: str) -> Target:
    """ "v6e:2x2", "tpu7x:2x2x1" or "h200". Raises ValueError for anything else."""
    name, _, topology = text.strip().lower().partition(":")
    if name not in CHIPS:
        raise ValueError(f"no chip {name!r}; known are {', '.join(CHIPS)}")
    chip = CHIPS[name]
    if not topology and chip.rank == 0:
        return Target(chip, ())
    sizes = topology.split("x")
    if len(sizes) != chip.rank or not all(size.isdigit() and int(size) > 0 for size in sizes):
        example = ":".join([name, *(["x".join("221"[: chip.rank])] * bool(chip.rank))])
        raise ValueError(f"{text!r} is no target of this chip; write it like {example}")
    return Target(chip, tuple(map(int, sizes)))
