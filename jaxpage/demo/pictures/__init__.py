"""The embedded demo with pictures: a tiny checkpoint that sees shapes, and the script that trained it.

Knows where the packaged files are, but not what is in them.
"""

from __future__ import annotations

from pathlib import Path


def checkpoint() -> Path:
    """The folder of the packaged checkpoint, in Hugging Face layout."""
    return Path(__file__).parent / "checkpoint"
