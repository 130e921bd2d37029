"""What ends an engine of several hosts."""

from __future__ import annotations


class HostLostError(RuntimeError):
    """A host of this engine has died, hangs, or has failed. The engine takes no more requests; start all hosts anew."""


class WireError(ConnectionError):
    """What came over a connection is not what the other side sent, or comes from another program."""
