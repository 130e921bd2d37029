"""How an operation finds its implementation: it tries a list in order, and each says why it cannot serve.

Knows no operation. XLA stands last in each list, since it serves everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Request = TypeVar("Request")  # what an operation is asked for
Chosen = TypeVar("Chosen")  # what an implementation makes of it


class Unsupported(Exception):
    """An implementation cannot serve a request; the message is the reason, in one line."""


@dataclass(frozen=True)
class Implementation(Generic[Request, Chosen]):
    """`accept` says how it serves a request, or raises Unsupported."""

    name: str
    platform: str | None  # of the devices that it is for; None: of all
    accept: Callable[[Request], Chosen]


@dataclass(frozen=True)
class Choice(Generic[Chosen]):
    """The first implementation that can serve, and the reasons of those for this platform that cannot."""

    name: str
    chosen: Chosen
    refusals: tuple[str, ...] = ()

    @property
    def reason(self) -> str | None:
        """Why it is not a better one; None if there is none for this platform."""
        return "; ".join(self.refusals) or None


def first_supported(
    operation: str,
    implementations: Sequence[Implementation[Request, Chosen]],
    request: Request,
    platform: str,
) -> Choice[Chosen]:
    """Raises NotImplementedError with the reasons of all if no implementation can serve."""
    refusals: list[str] = []
    others: list[str] = []
    for each in implementations:
        if each.platform not in (None, platform):
            others.append(f"{each.name}: it is for the platform {each.platform}")
            continue
        try:
            return Choice(each.name, each.accept(request), tuple(refusals))
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
