"""Engines with fewer programs, which are compiled sooner.

For tests of what does not depend on sizes; that nothing does is tested in `end_to_end/test_invariance.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from jaxpage import engine_spec
from jaxpage.runner.buckets import Bucket, make_buckets


def few_buckets(**limits: int) -> tuple[Bucket, ...]:
    """The largest bucket of decode steps and the largest of others."""
    buckets = make_buckets(**limits)
    return max(b for b in buckets if b.decode), max(b for b in buckets if not b.decode)


@contextmanager
def few_programs() -> Iterator[None]:
    """Engines that are built meanwhile have `few_buckets`."""
    with mock.patch.object(engine_spec, "make_buckets", few_buckets):
        yield
