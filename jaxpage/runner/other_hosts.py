"""The interface through which a runner involves the other hosts of its engine."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import jax

from jaxpage.runner.calls import Call


class OtherHosts(Protocol):
    """Devices of other hosts are in this engine's mesh, so each program must run on all hosts."""

    def executing(self, calls: list[Call], /) -> AbstractContextManager[None]:
        """A context for executing calls here and on the other hosts. Raises RuntimeError if they cannot."""
        ...

    def reading(self, arrays: list[jax.Array], /) -> AbstractContextManager[None]:
        """A context for reading arrays; waits until they are computed. Raises RuntimeError if they never will be."""
        ...
