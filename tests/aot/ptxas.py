"""What ptxas says of the kernels that it assembles."""

from __future__ import annotations

import re
from typing import Any

_KERNEL = re.compile(r"(\d+) bytes spill stores.*?Used (\d+) registers", re.DOTALL)
_NAMED = re.compile(r"Function properties for (\S+)\s.*?(\d+) bytes spill stores", re.DOTALL)


def report(log: str) -> dict[str, Any]:
    """Of each kernel the bytes that it puts into memory, and its registers; "waits": wgmma that waits for itself."""
    return {
        "spilled": [int(spilled) for spilled, _ in _KERNEL.findall(log)],
        "registers": [int(used) for _, used in _KERNEL.findall(log)],
        "for_hopper": log.count("for 'sm_90a'"),
        "waits": "serialized" in log,
    }


def spilled_by_kernel(log: str) -> dict[str, int]:
    """Bytes of registers that each kernel puts into memory."""
    return {name: int(num_bytes) for name, num_bytes in _NAMED.findall(log)}
