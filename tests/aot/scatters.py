"""Scatters of values of one or two bytes, which XLA's code for GPUs writes one by one and atomically."""

from __future__ import annotations

import re

_SMALL = re.compile(r"= (?:bf16|f16|[su](?:8|16)|f8\w+|pred)\[[^=]* scatter\(.*")


def atomic(program: str) -> list[str]:
    """The lines of those whose indices may not be distinct, in the text of a compiled program."""
    return [line for line in _SMALL.findall(program) if "unique_indices=true" not in line]
