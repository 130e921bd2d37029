"""How long the exchanges of tensor parallelism take if nothing else uses the links.

Pure arithmetic: bytes over the links' bandwidth, and steps of a ring. Must not know compilers, models or chips.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxpage.aot.targets import Links


class Collective(NamedTuple):
    """A collective that a step calls `count` times."""

    kind: str  # as in `contents.COLLECTIVES`
    count: int
    bytes_per_row: float  # for each row of a step, see `bytes_sent`


# How often an array goes round the ring. For a sum: once to add up its parts, once to send each part to all devices.
_ROUNDS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}


def bytes_sent(kind: str, num_bytes: float, num_devices: int) -> float:
    """Bytes sent by each device. `num_bytes`: of the array that all have before or after; for all-to-all, its share."""
    return _ROUNDS[kind] * num_bytes * (num_devices - 1) / num_devices


def seconds_of(collective: Collective, num_rows: int, num_devices: int, links: Links) -> float:
    """Seconds of all its calls, one after the other. Rows are padded to a multiple of the devices."""
    if num_devices == 1:
        return 0.0
    kind, count, bytes_per_row = collective
    rows = -(-num_rows // num_devices) * num_devices
    steps = _ROUNDS[kind] * links.steps
    seconds = bytes_sent(kind, rows * bytes_per_row, num_devices) / links.bytes_per_second
    return count * (links.seconds_per_call + steps * links.seconds_per_step + seconds)
