"""The table of what compiles where, in jaxpage/aot/README.md, is what the compilers did."""

from __future__ import annotations

import pytest

from tests.aot import table
from tests.aot.compiling import missing, seen
from tests.aot.suites import calls

pytestmark = pytest.mark.aot


def test_the_readme_says_what_compiles_where():
    for _, target in calls():
        if reason := missing(target):
            pytest.skip(reason)
    found = {call: seen(*call).programs for call in calls()}
    assert table.in_readme() == table.render(table.see(found)), (
        "write it anew: python -m tests.aot.evidence && python -m tests.aot.table"
    )
