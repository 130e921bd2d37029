"""The README's table of what compiles where is what the compilers did here."""

from __future__ import annotations

import pytest

from tests.aot import steps, table

pytestmark = pytest.mark.aot


def test_the_readme_says_what_compiles_where(request):
    if reason := table.missing():
        pytest.skip(reason)
    seen = table.see(steps.compile_everywhere())
    request.config.cache.set(table.KEPT, seen)
    assert table.in_readme() == table.render(seen), "write it anew: python -m tests.aot.table"
