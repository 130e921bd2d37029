"""What a runner asks of whoever knows the other hosts of its engine."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import jax

from jaxpage.runner.calls import Call


class OtherHosts(Protocol):
    """Their devices are in this engine's mesh, so nothing runs unless they run it too."""

    def executing(self, calls: list[Call], /) -> AbstractContextManager[None]:
        """Around the execution of calls here: the others execute them meanwhile. Raises RuntimeError if they cannot."""
        ...

    def reading(self, arrays: list[jax.Array], /) -> AbstractContextManager[None]:
        """Around what reads arrays: begins when they are computed. Raises RuntimeError if they never will be."""
        ...
