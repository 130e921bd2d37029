"""Lists in requests, of which only the first wrong entry is reported.

A body may have millions of entries. One error for each, in each form that a field may have, would take gigabytes, and
the event loop a minute.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import Field

T = TypeVar("T")

ListOf = Annotated[list[T], Field(fail_fast=True)]
