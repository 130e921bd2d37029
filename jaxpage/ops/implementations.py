"""How an operation finds its implementation: it tries a list in order, and each one accepts or gives a reason.

Knows no particular operation. XLA is last in each list, since it supports everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pallas_kernels import hopper

Need = TypeVar("Need")  # what a model needs of an implementation
Chosen = TypeVar("Chosen")  # how the implementation serves that


class Unsupported(Exception):
    """An implementation does not support what is needed; the message is the reason, in one line."""


@dataclass(frozen=True)
class Implementation(Generic[Need, Chosen]):
    """`accept` returns how it serves a need, or raises Unsupported."""

    name: str
    platform: str | None  # that it is for; None: all
    accept: Callable[[Need], Chosen]


@dataclass(frozen=True)
class Choice(Generic[Chosen]):
    """The first implementation that supports what is needed, and the reasons of those before it on this platform."""

    name: str
    chosen: Chosen
    refusals: tuple[str, ...] = ()

    @property
    def reason(self) -> str | None:
        """Why no better implementation was chosen; None if there is none for this platform."""
        return "; ".join(self.refusals) or None


def first_supported(
    operation: str,
    implementations: Sequence[Implementation[Need, Chosen]],
    need: Need,
    platform: str,
) -> Choice[Chosen]:
    """Raises NotImplementedError with all reasons if no implementation supports what is needed."""
    refusals: list[str] = []
    others: list[str] = []
    for each in implementations:
        if each.platform not in (None, platform):
            others.append(f"{each.name}: it is for the platform {each.platform}")
            continue
        try:
            return Choice(each.name, each.accept(need), tuple(refusals))
        except Unsupported as error:
            refusals.append(str(error))
            others.append(f"{each.name}: {error}")
    raise NotImplementedError(
        f"no implementation of {operation} can serve this on the platform {platform}:\n  "
        + "\n  ".join(others)
    )


def require(reason: str | None) -> None:
    """Raises Unsupported if there is a reason."""
    if reason:
        raise Unsupported(reason)


def on_hopper(accept: Callable[[Any], Chosen]) -> Callable[[Any], Chosen]:
    """`accept`, of a need with a `device`, for a kernel that needs a Hopper GPU, and this machine's ptxas."""

    def accept_on_hopper(need: Any) -> Chosen:
        require(hopper.unsupported_reason_on(need.device.compute_capability))
        chosen = accept(need)
        require(hopper.unsupported_ptxas_here())
        return chosen

    return accept_on_hopper
