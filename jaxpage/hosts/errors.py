"""Errors that end an engine of several hosts."""

from __future__ import annotations


class HostLostError(RuntimeError):
    """A host of this engine died, hangs, or failed. The engine takes no more requests; restart all hosts."""


class WireError(ConnectionError):
    """The received bytes are not what the other side sent, or come from another program."""
